"""A comparison of two runs as text of 80 columns, as Markdown and as JSON; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.comparison import Accuracy, Comparison, ConfigComparison, Figure, Flip, PairedChange
from harness.fail_conditions import Judged, Outcome
from harness.recordings import Answer, Measure
from harness.reports.untrusted import code, escaped, fenced, html, wrapped

SCHEMA_VERSION = 1
COLUMNS = 80
NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a measure is shown."""

    label: str
    spec: str


LOOKS: Mapping[Measure, Look] = {
    Measure.ACCURACY: Look(label="accuracy", spec=".4f"),
    Measure.TOKENS_PER_SECOND: Look(label="output tokens/s", spec=".1f"),
    Measure.QUESTIONS_PER_SECOND: Look(label="questions/s", spec=".2f"),
    Measure.LATENCY_MEAN: Look(label="latency, mean (s)", spec=".3f"),
    Measure.LATENCY_P50: Look(label="latency, p50 (s)", spec=".3f"),
    Measure.LATENCY_P95: Look(label="latency, p95 (s)", spec=".3f"),
    Measure.STARTUP: Look(label="start-up (s)", spec=".1f"),
    Measure.ACCEPTANCE_LENGTH: Look(label="acceptance length", spec=".3f"),
    Measure.TRUNCATED: Look(label="truncated (share)", spec=".4f"),
    Measure.UNANSWERED: Look(label="unanswered (share)", spec=".4f"),
    Measure.ERRORS: Look(label="errors (share)", spec=".4f"),
}
HEADINGS = ("", "A", "B", "change", "of A")


def render_text(comparison: Comparison, judged: Sequence[Judged], *, flips: int) -> str:
    """Render for a terminal, with at most so many flips of each config."""
    lines = [*_wrap(f"A: {comparison.a}"), *_wrap(f"B: {comparison.b}")]
    for config in comparison.configs:
        lines += ["", *_wrap(f"== {_name(config)} =="), *_text_of(config, flips)]
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines += ["", *_wrap(f"only in {side}: {', '.join(names)}", "  ")]
    if judged:
        lines += ["", "conditions:", *(line for one in judged for line in _wrap(f"  {_mark(one)} {one}", "    "))]
    return "\n".join(lines) + "\n"


def _text_of(config: ConfigComparison, flips: int) -> Iterator[str]:
    rows = [HEADINGS, *_rows(config)]
    for label, *cells in rows:
        yield (f"{label:<20}" + "".join(f"{cell:>15}" for cell in cells)).rstrip()
    yield ""
    for sentence in _sentences(config):
        yield from _wrap(sentence, "  ")
    for warning in config.warnings:
        yield from _wrap(f"WARNING: {warning}", "  ")
    yield "settings that differ:" if config.settings else "settings that differ: none that is recorded"
    for difference in config.settings:
        yield from _wrap(f"  {difference.name}: {difference.a} -> {difference.b}", "    ")
    for flip in config.flips[:flips]:
        yield ""
        yield from _text_of_flip(flip)
    left = len(config.flips) - flips
    if left > 0:
        yield ""
        yield f"{left} more flips: --flips {len(config.flips)} shows all, and so does --format json"


def _text_of_flip(flip: Flip) -> Iterator[str]:
    yield f"question {flip.index}, {flip.became} in B ({_how_often(flip)})"
    for label, text in _parts(flip):
        yield f"  {label}:"
        yield from (f"  | {line}".rstrip() for line in wrapped(text, COLUMNS - 4))


def render_markdown(comparison: Comparison, judged: Sequence[Judged]) -> str:
    """Render for a pull request; every flip is there, folded away."""
    lines = ["## Comparison", "", f"A: {code(comparison.a)}", "", f"B: {code(comparison.b)}", ""]
    for one in judged:
        lines.append(f"- **{_mark(one)}** {html(str(one))}")
    for config in comparison.configs:
        lines += ["", f"### {code(_name(config))}", "", *_markdown_of(config)]
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines += ["", f"Only in {side}: {', '.join(map(code, names))}"]
    return "\n".join(lines) + "\n"


def _markdown_of(config: ConfigComparison) -> Iterator[str]:
    yield f"| {' | '.join(HEADINGS)} |"
    yield "| :-- | --: | --: | --: | --: |"
    for row in _rows(config):
        yield f"| {' | '.join(row)} |"
    yield ""
    for sentence in _sentences(config):
        yield f"- {html(sentence)}"
    for warning in config.warnings:
        yield f"- **Warning:** {html(warning)}"
    yield ""
    if config.settings:
        yield from ("| setting | A | B |", "| :-- | :-- | :-- |")
        for difference in config.settings:
            yield f"| {code(difference.name)} | {code(difference.a)} | {code(difference.b)} |"
    else:
        yield "No recorded setting differs."
    for became in ("wrong", "right"):
        flips = [flip for flip in config.flips if flip.became == became]
        if flips:
            yield from ("", f"<details><summary>{len(flips)} became {became}</summary>")
            for flip in flips:
                yield from ("", f"**Question {flip.index}** ({_how_often(flip)})")
                for label, text in _parts(flip):
                    yield from ("", f"{label}:", "", fenced(text))
            yield from ("", "</details>")


def render_json(comparison: Comparison, judged: Sequence[Judged]) -> str:
    """Render everything, for programs."""
    document = {
        "schema": SCHEMA_VERSION,
        "a": comparison.a,
        "b": comparison.b,
        "configs": [_json_of(config) for config in comparison.configs],
        "only_in_a": list(comparison.only_a),
        "only_in_b": list(comparison.only_b),
        "conditions": [
            {"config_id": one.config_id, "condition": one.condition.text, "outcome": one.outcome, "reason": one.reason}
            for one in judged
        ],
    }
    # ASCII, because a model's text may hold half a surrogate pair, which UTF-8 cannot.
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _json_of(config: ConfigComparison) -> dict[str, Any]:
    return {
        "config_id": {"a": config.id_a, "b": config.id_b},
        "figures": {figure.measure.value: _json_of_figure(figure) for figure in config.figures},
        "accuracy": {"a": _json_of_accuracy(config.accuracy_a), "b": _json_of_accuracy(config.accuracy_b)},
        "paired": _json_of_paired(config.paired),
        "not_paired_because": config.refusal,
        "incomplete": config.incomplete,
        "settings": [{"name": one.name, "a": one.a, "b": one.b} for one in config.settings],
        "warnings": list(config.warnings),
        "flips": [_json_of_flip(flip) for flip in config.flips],
    }


def _json_of_figure(figure: Figure) -> dict[str, Any]:
    numbers = {"a": figure.a, "b": figure.b, "change": figure.change, "relative": figure.relative}
    return {**{name: _float(value) for name, value in numbers.items()}, "no_change_because": figure.gap}


def _json_of_accuracy(accuracy: Accuracy | None) -> dict[str, Any] | None:
    if accuracy is None:
        return None
    interval = accuracy.interval
    return {
        "accuracy": float(accuracy.value),
        "questions": accuracy.questions,
        "runs": accuracy.runs,
        "low": interval.low,
        "high": interval.high,
        "confidence": interval.confidence,
    }


def _json_of_paired(paired: PairedChange | None) -> dict[str, Any] | None:
    if paired is None:
        return None
    return {
        "questions": paired.questions,
        "change": float(paired.change),
        "low": paired.low,
        "high": paired.high,
        "confidence": 0.95,
        "p_value": paired.p_value,
        "test": paired.test,
        "flips_by_chance": paired.flips_by_chance,
        "same_text": paired.same_text,
    }


def _json_of_flip(flip: Flip) -> dict[str, Any]:
    def side(answer: Answer) -> dict[str, Any]:
        return {"right": answer.history.right, "runs": answer.history.runs, "text": answer.text}

    return {
        "index": flip.index,
        "became": flip.became,
        "question": flip.question,
        "gold": flip.gold,
        "a": side(flip.a),
        "b": side(flip.b),
    }


def _float(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]


def _name(config: ConfigComparison) -> str:
    return config.id_a if config.id_a == config.id_b else f"{config.id_a} (A), {config.id_b} (B)"


def _mark(judged: Judged) -> str:
    return {Outcome.HOLDS: "FAILED", Outcome.NOT_JUDGED: "ERROR", Outcome.DOES_NOT_HOLD: "ok"}[judged.outcome]


def _rows(config: ConfigComparison) -> Iterator[tuple[str, ...]]:
    for figure in config.figures:
        look = LOOKS[figure.measure]
        values = [NOTHING if value is None else format(float(value), look.spec) for value in (figure.a, figure.b)]
        change = NOTHING if figure.change is None else format(float(figure.change), f"+{look.spec}")
        relative = NOTHING if figure.relative is None else format(float(figure.relative), "+.1%")
        yield (look.label, *values, change, relative)


def _sentences(config: ConfigComparison) -> Iterator[str]:
    """Say what the table cannot: sample sizes, intervals, whether the change is real, and why a figure has none."""
    for side, accuracy in (("A", config.accuracy_a), ("B", config.accuracy_b)):
        if accuracy is not None:
            runs = f", {accuracy.runs} runs" if accuracy.runs > 1 else ""
            yield (
                f"accuracy of {side}: {float(accuracy.value):.4f} over {accuracy.questions} questions{runs} "
                f"(95% interval {accuracy.interval.low:.4f} to {accuracy.interval.high:.4f})"
            )
    paired = config.paired
    if paired is None:
        yield f"answers are not paired: {config.refusal}"
    else:
        yield (
            f"change in accuracy: {float(paired.change):+.4f} over {paired.questions} questions "
            f"(95% interval {paired.low:+.4f} to {paired.high:+.4f}; p = {paired.p_value:.3g}, {paired.test})"
        )
        yield _flip_sentence(config.flips, paired)
    gaps = [figure for figure in config.figures if figure.gap not in (None, config.refusal)]
    for reason in dict.fromkeys(figure.gap for figure in gaps):
        names = ", ".join(LOOKS[figure.measure].label for figure in gaps if figure.gap == reason)
        yield f"no change told for {names}: {reason}"


def _flip_sentence(flips: Sequence[Flip], paired: PairedChange) -> str:
    wrong = sum(flip.became == "wrong" for flip in flips)
    text = f"flips: {wrong} answers became wrong, {len(flips) - wrong} became right"
    if paired.flips_by_chance is not None:
        text += f" ({paired.flips_by_chance:.1f} differ between two runs of A)"
    if paired.same_text is not None:
        text += f"; {paired.same_text} of {paired.questions} replies are the same to the letter"
    return text


def _how_often(flip: Flip) -> str:
    sides = (f"right in {x.history.right} of {x.history.runs} runs of {side}" for side, x in _sides(flip))
    return ", ".join(sides)


def _sides(flip: Flip) -> tuple[tuple[str, Answer], tuple[str, Answer]]:
    return ("A", flip.a), ("B", flip.b)


def _parts(flip: Flip) -> list[tuple[str, str]]:
    texts = [("question", flip.question), ("gold", flip.gold), ("A", flip.a.text), ("B", flip.b.text)]
    return [(label, text if text is not None else "(not kept)") for label, text in texts]


def _wrap(text: str, indent: str = "") -> list[str]:
    """Wrap a line of ours, which may quote what others wrote, with later lines indented."""
    first, *rest = wrapped(escaped(text), COLUMNS - len(indent))
    return [first, *(indent + line for line in rest)]
