"""What the page says of each config: figures as text, the reason and its log, gates and circumstances; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.gates.threshold import Verdict
from harness.reports.page.past import interval_of

NOTHING = "–"
NUMBER = " num"
LABELS: Mapping[Verdict, str] = {
    Verdict.PASS: "pass",
    Verdict.REGRESSION: "regression",
    Verdict.INFRASTRUCTURE: "infrastructure",
}
_FOLDED = 240
"""Characters of a reason that are shown at once; the rest, such as a server's log, unfolds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A named figure with what it rests on."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView:
    """One config as the template shows it."""

    number: int
    config_id: str
    model: str
    verdict: str
    label: str
    accuracy: str
    """Or the first of the measures, where the task has no accuracy."""
    measured: bool
    """Whether there is an accuracy."""
    columns: tuple[tuple[str, str, str], ...]
    """Heading, value and class of what the table shows beside the accuracy."""
    figures: tuple[Figure, ...]
    headline: str
    """The reason, or its beginning where it is long."""
    reason: str | None
    """The whole of a long reason."""
    gates: tuple[Mapping[str, Any], ...]
    baseline: str | None
    circumstances: tuple[tuple[str, str], ...]
    """Name and JSON of what the config's result says of its task, its server and its counters."""


def view_of(number: int, result: Mapping[str, Any]) -> ConfigView:
    """Read a `result.json`."""
    verdict = Verdict(result["verdict"])
    headline, reason = _folded(result["reason"])
    accuracy = result["accuracy"]
    return ConfigView(
        number=number,
        config_id=result["config_id"],
        model=result["model_name"],
        verdict=verdict.value,
        label=LABELS[verdict],
        accuracy=_number(accuracy, ".4f") if accuracy is not None else _first_measure(result),
        measured=accuracy is not None,
        columns=tuple(_columns(result)),
        figures=tuple(_figures(result)),
        headline=headline,
        reason=reason,
        gates=tuple(result["gates"]),
        baseline=_baseline(result.get("against_baseline")),
        circumstances=tuple(_circumstances(result)),
    )


def _columns(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    counts, interval = result["counts"], interval_of(result)
    shown = f"{interval['low']:.3f} to {interval['high']:.3f}" if result["accuracy"] is not None else NOTHING
    yield "95% interval", shown, ""
    yield "floor", _number(result["floor"], ".3f"), NUMBER
    yield "n", f"{counts['asked'] - counts['errors']:,}", NUMBER
    yield "un / tr / err", " / ".join(str(counts[name]) for name in ("unanswered", "truncated", "errors")), NUMBER
    yield "accept", _number((result["acceptance"] or {}).get("length"), ".2f"), NUMBER
    yield "tokens/s", _number(result["tokens_per_second"], ",.0f"), NUMBER
    yield "start-up", _number(result["timings"]["startup"], ".0f", " s"), NUMBER


def _folded(reason: str) -> tuple[str, str | None]:
    first, _, rest = reason.partition("\n")
    if not rest and len(first) <= 3 * _FOLDED:
        return first, None
    return (first if len(first) <= _FOLDED else first[:_FOLDED] + "…"), reason


def _first_measure(result: Mapping[str, Any]) -> str:
    measures = result.get("measures") or {}
    return next((f"{name} {_number(value, '.4g')}" for name, value in measures.items()), NOTHING)


def _figures(result: Mapping[str, Any]) -> Iterator[Figure]:
    counts, timings = result["counts"], result["timings"]
    interval = interval_of(result)
    graded = counts["asked"] - counts["errors"]
    if result["accuracy"] is not None:
        confidence = f"{interval.get('confidence', 0.95):.0%} interval {interval['low']:.4f} to {interval['high']:.4f}"
        note = f"{counts['correct']} of {graded} right; {confidence}"
        yield Figure(name="accuracy", value=f"{result['accuracy']:.4f}", note=note)
        rule = f"threshold {result['threshold']:g} − tolerance {result['tolerance']:g}"
        yield Figure(name="floor", value=f"{result['floor']:g}", note=rule)
    for name, value in (result.get("measures") or {}).items():
        yield Figure(name=name.replace("_", " "), value=_number(value, ".5g"))
    kinds = ", ".join(f"{counts[name]} {name}" for name in ("unanswered", "truncated", "errors", "retried"))
    yield Figure(name="questions", value=f"{counts['asked']:,}", note=kinds)
    if result["tokens_per_second"] is not None:
        tokens, asking = result["output_tokens"], timings["asking"]
        note = f"{tokens:,} tokens in {asking:,.1f} s"
        yield Figure(name="output tokens/s", value=f"{result['tokens_per_second']:,.0f}", note=note)
    if timings["latency_p50"] is not None:
        note = f"mean {timings['latency_mean']:.2f} s, p95 {timings['latency_p95']:.2f} s"
        yield Figure(name="latency, p50", value=f"{timings['latency_p50']:.2f} s", note=note)
    acceptance = result["acceptance"]
    if acceptance:
        note = f"{acceptance['accepted_tokens']:,} draft tokens accepted in {acceptance['drafts']:,} drafts"
        yield Figure(name="acceptance length", value=_number(acceptance["length"], ".3f"), note=note)
    if timings["startup"] is not None:
        yield Figure(name="start-up", value=f"{timings['startup']:.1f} s")


def _baseline(facts: Mapping[str, Any] | None) -> str | None:
    if not facts:
        return None
    runs = facts["baseline_runs"]
    parts = list(_changes(facts))
    return f"{'; '.join(parts)}; against a baseline of {runs} run{'' if runs == 1 else 's'}" if parts else None


def _changes(facts: Mapping[str, Any]) -> Iterator[str]:
    flips, paired, drift = facts.get("flips"), facts.get("paired"), facts.get("drift")
    if flips:
        yield f"{len(flips['to_wrong'])} answers became wrong, {len(flips['to_right'])} became right"
    if paired:
        yield (
            f"change in accuracy {-paired['loss']:+.4f} over {paired['questions']} questions (95% interval "
            f"{-paired['high']:+.4f} to {-paired['low']:+.4f}; one-sided p = {paired['p_value']:.3g})"
        )
    if drift:
        yield drift["sentence"]


def _circumstances(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("task", "server", "counters", "stopped_early", "against_baseline"):
        if result.get(name):
            yield name.replace("_", " "), json.dumps(result[name], indent=2, ensure_ascii=False)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{spec}}{unit}"
