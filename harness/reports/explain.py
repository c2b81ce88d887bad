"""What explains a failure: how much worse, whether by chance, model or machine, what it said, what changed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.baselines import Baseline
from harness.errors import DataUnavailable
from harness.gates.power import binomial_tail
from harness.gates.threshold import Verdict
from harness.reports.documents import ConfigDocument, Example, Json, RunDocument, read_run
from harness.reports.pointers import rerun
from harness.reports.untrusted import escaped, wrapped
from harness.run_settings import Difference, Settings, differences, settings_of_baseline, settings_of_result
from harness.servers.diagnosis import likely_cause

LABEL = 9
LONGEST = 4
"""Lines that one remark takes on a terminal at most; the record holds the rest."""
LOG_LINES = 6
DIFFERENCES = 6
UNLIKELY = 0.05
NO_ANSWERS_AT_FAULT = ("acceptance length", "startup check", "KV offload")
"""Gates that are not about what was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One thing to look at."""

    label: str
    text: str
    lines: tuple[str, ...] = ()
    """Shown as they are, one line each."""


def remarks(config: ConfigDocument, run: RunDocument) -> tuple[Remark, ...]:
    """Explain one failure from the record alone, in the order in which a person asks."""
    regressed = config.row.verdict is Verdict.REGRESSION
    found = [
        Remark(label="what", text=what(config)),
        *([Remark(label="noise?", text=noise)] if regressed and (noise := _noise(config)) else []),
        Remark(label="where", text=_blame(config)),
        *_spent(config),
        *_shown(config),
        Remark(label="changed", text=_changed(config, run)),
        Remark(label="files", text=config.folder),
        Remark(label="rerun", text=_rerun(config, run)),
    ]
    return tuple(found)


def what(config: ConfigDocument) -> str:
    """Say the verdict in a sentence; of an outage its first line, for the rest is a log."""
    if config.row.verdict is not Verdict.REGRESSION:
        return config.row.reason.partition("\n")[0]
    return "; ".join(_gate_sentence(gate, config) for gate in config.failing) or config.row.reason


def _gate_sentence(gate: Json, config: ConfigDocument) -> str:
    row, counts = config.row, config.result["counts"]
    whole = gate["name"] == "accuracy" and not config.result.get("stopped_early")
    if not whole or row.accuracy is None or row.floor is None:
        return str(gate["message"])
    return (
        f"accuracy {row.accuracy:.4f} is {row.floor - row.accuracy:.4f} below the floor {row.floor:g}: "
        f"{counts['correct']} of {row.graded} right (95% interval {row.low:.4f} to {row.high:.4f})"
    )


def _noise(config: ConfigDocument) -> str:
    """Say how likely the failure is by chance, as far as the record shows."""
    parts: list[str] = []
    row, threshold = config.row, config.result["threshold"]
    below = any(gate["name"] == "accuracy" for gate in config.failing)
    if below and threshold is not None and row.graded and row.floor is not None:
        high = (config.result.get("stopped_early") or {}).get("interval", {}).get("high", row.high)
        chance = binomial_tail(config.result["counts"]["correct"], row.graded, threshold)
        if high >= row.floor:
            parts.append("maybe: the interval reaches the floor")
        else:
            few = chance > UNLIKELY
            parts.append("maybe: so few questions say little" if few else "no: the whole interval is below the floor")
        parts.append(f"a model at {threshold:g} does so badly with p = {chance:.2g}")
    drop = config.result.get("smallest_drop")
    if below and drop is not None:
        parts.append(f"{row.graded} questions show a drop of {drop:.4f} or more")
    parts += _paired(config.result.get("against_baseline") or {})
    return "; ".join(parts)


def _paired(against: Json) -> Iterator[str]:
    count = against.get("baseline_runs")
    runs = "1 run" if count == 1 else f"{count} runs"
    if (paired := against.get("paired")) is not None:
        yield (
            f"against the baseline ({runs}) {-paired['loss']:+.4f}, p = {paired['p_value']:.2g}: "
            f"{paired['worse']} questions worse, {paired['better']} better"
        )
    if (values := against.get("values")) is not None:
        yield f"scores against the baseline ({runs}) {values['mean']:+.4f}, p = {values['p_value']:.2g}"


def _blame(config: ConfigDocument) -> str:
    """Say whether to look at the model or at the machine."""
    row = config.row
    if row.verdict is Verdict.REGRESSION:
        failed = f"{row.errors} of {row.errors + row.graded} requests failed"
        return f"the model, or how it is served: {failed}, and what answered lasted to the end"
    cause = likely_cause("\n".join((config.row.reason, *config.log)))
    told = f"likely cause: {cause}" if cause else "no cause that is known shows in reason or log"
    return f"the machine, not the model: nothing is said about it, run it again (exit status 75); {told}"


def _spent(config: ConfigDocument) -> Iterator[Remark]:
    """Name the questions that came to no answer, where they may explain what is missing."""
    row = config.row
    if config.failures:
        shown = "; ".join(f"{count} x {reason}" for reason, count in config.failures)
        yield Remark(label="failed", text=shown)
    lost = [(row.truncated, "truncated at max_tokens"), (row.unanswered, "without an answer")]
    if any(count for count, _ in lost) and row.accuracy is not None:
        missing = ", ".join(f"{count} {why}" for count, why in lost if count)
        could = (config.result["counts"]["correct"] + row.truncated + row.unanswered) / row.graded
        met = row.floor is not None and could >= row.floor > row.accuracy
        effect = "were all of them right, the floor would be met" if met else "right or wrong, they decide nothing"
        yield Remark(label="lost", text=f"{missing}: {effect}")


def _shown(config: ConfigDocument) -> Iterator[Remark]:
    """Show the log of an outage, or examples of a regression in what was answered."""
    if config.row.verdict is not Verdict.REGRESSION:
        if config.log:
            yield Remark(label="log", text="server.log ends:", lines=config.log[-LOG_LINES:])
        return
    about = [gate for gate in config.failing if not gate["name"].startswith(NO_ANSWERS_AT_FAULT)]
    if about and config.examples:
        yield Remark(
            label="answers", text=_kind(config), lines=tuple(example_line(example) for example in config.examples)
        )


def _kind(config: ConfigDocument) -> str:
    if config.row.accuracy is None:
        return "the documents predicted worst:"
    known = any(example.before is not None for example in config.examples)
    return "wrong now and right before:" if known else "wrong, such as:"


def example_line(example: Example) -> str:
    """Put one example on one line: gold, said, before, then the question."""
    question = shortened(example.question, 90)
    if example.value is not None and not example.gold:
        return f"document {example.index}: {example.value:.4f} bits per byte: {question}"
    said = example.extracted if example.extracted is not None else f"nothing ({example.status})"
    gold = example.gold.rpartition("####")[2].strip()
    parts = [f"question {example.index}: gold {shortened(gold, 20)}, said {shortened(said, 20)}"]
    if example.before is not None:
        parts.append(f"before {shortened(example.before.rpartition('####')[2], 24)}")
    return f"{', '.join(parts)}: {question}"


def shortened(text: str, length: int) -> str:
    """Put text on one line of at most so many letters, its middle left out."""
    flat = " ".join(text[: 50 * length].split() if len(text) < 50 * length else _ends(text, length))
    if len(flat) <= length:
        return flat
    tail = (length - 1) // 3
    return f"{flat[: length - 1 - tail]}…{flat[len(flat) - tail :]}"


def _ends(text: str, length: int) -> list[str]:
    """The words at both ends of a text that is far too long, without splitting all of it."""
    return f"{text[: 2 * length]} {text[-2 * length :]}".split()


def changes(config: ConfigDocument, run: RunDocument) -> tuple[str, tuple[Difference, ...]] | None:
    """List the settings that differ from the last green run, or else from the baseline; None where neither is known."""
    now = settings_of_result(config.result, run.run)
    if config.green is not None:
        commit = run.run.get("environment", {}).get("commit", "unknown")
        found = differences(config.green.settings, now)
        if "unknown" not in (commit, config.green.commit) and commit != config.green.commit:
            found = (*found, Difference(name="commit", a=config.green.commit[:12], b=commit[:12]))
        return f"since the last green run, {config.green.run_id}", found
    told = (config.result.get("against_baseline") or {}).get("baseline_circumstances")
    if told is None:
        return None
    return "since the baseline", differences(_of_baseline(told), now)


def _of_baseline(told: Json) -> Settings:
    """Read what a baseline tells of its run; what it is bound to is the same here, or it had been refused."""
    known = {name: value for name, value in told.items() if value != "unknown"}
    return settings_of_baseline(Baseline(binding={}, circumstances=known, answers=()))


def _changed(config: ConfigDocument, run: RunDocument) -> str:
    found = changes(config, run)
    if found is None:
        return "not known: there is no baseline, and no earlier green run in the same results folder"
    since, different = found
    if not different:
        return f"{since}: no setting that is recorded"
    shown = [f"{one.name}: {shortened(one.a, 40)} -> {shortened(one.b, 40)}" for one in different[:DIFFERENCES]]
    more = [f"{len(different) - DIFFERENCES} more"] if len(different) > DIFFERENCES else []
    return f"{since}: {'; '.join(shown + more)}"


def _rerun(config: ConfigDocument, run: RunDocument) -> str:
    options: list[Any] = list(run.run.get("options", ()))
    return rerun(config.row.config_id, run.lists, options)


def text_of(config: ConfigDocument, run: RunDocument, *, columns: int = 80) -> list[str]:
    """Render the remarks for a terminal; what others wrote is made harmless, and cut where it is long."""
    return [line for remark in remarks(config, run) for line in _text(remark, columns)]


def _text(remark: Remark, columns: int) -> Iterator[str]:
    room = columns - LABEL - 2
    whole = remark.label in ("rerun", "files")
    text = escaped(remark.text if whole else shortened(remark.text, LONGEST * (room - 4)))
    for number, part in enumerate([text] if whole else wrapped(text, room)):
        yield f"  {remark.label if number == 0 else '':<{LABEL}}{part}".rstrip()
    for line in remark.lines:
        yield f"    {_beginning(line, columns - 4)}"


def _beginning(line: str, room: int) -> str:
    """Cut a line after it is escaped: an escape takes more room than what it stands for."""
    first, *rest = wrapped(escaped(line[: 4 * room]), room)
    return f"{wrapped(first, room - 1)[0]}…" if rest or len(line) > 4 * room else first


def explain(config_folder: Path, *, columns: int = 80) -> list[str]:
    """Explain the failure that a config's folder in a run record holds; nothing where it passed.

    Raises DataUnavailable where that is no such folder.
    """
    folder = config_folder.resolve()
    run_folder = next((at for at in (folder, *folder.parents) if (at / "run.json").is_file()), None)
    if run_folder is None:
        raise DataUnavailable(f"{config_folder}: no run.json here or above: it is no part of a run record")
    run = read_run(run_folder)
    results = [config for config in run.failed if Path(config.folder).resolve() == folder]
    return [line for config in results for line in text_of(config, run, columns=columns)]
