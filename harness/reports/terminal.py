"""The terminal: a table that fits its width, and what explains each failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.gates.threshold import Verdict
from harness.records import Row
from harness.reports.documents import RunDocument
from harness.reports.explain import text_of
from harness.reports.live import LiveLine
from harness.reports.untrusted import escaped, shown_width, wrapped

__all__ = ["LABELS", "LiveLine", "measured", "notes", "plain", "run_lines", "shown_width", "table"]

NOTHING = "-"
GAP, INDENT = "  ", "    "
SKIPPED: Literal["skipped"] = "skipped"
LABELS: Mapping[Verdict, str] = {
    Verdict.PASS: "pass",
    Verdict.REGRESSION: "REGRESSION",
    Verdict.INFRASTRUCTURE: "INFRA",
}
Outcome = Verdict | Literal["skipped"]
Paint = Callable[[str, Outcome], str]
"""Colours a verdict's word, padding excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One figure of a row."""

    heading: str
    cell: Callable[[Row], str]
    words: str
    """How the figure reads beside others on a row's second line; {} is the cell."""
    use: int
    """0 must be there; the higher, the sooner it moves to the second line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A config as the table shows it."""

    name: str
    label: str
    outcome: Outcome
    cells: tuple[str, ...]
    below: tuple[str, ...] = field(default=())
    """What stands on the lines under it."""


def plain(text: str, outcome: Outcome) -> str:
    """Leave a verdict as it is."""
    return text


def measured(row: Row) -> str:
    """Show the accuracy, or bits per byte where the task has no accuracy."""
    if "bits_per_byte" in row.measures:
        return f"{row.measures['bits_per_byte']:.4f} b/B"
    return _number(row.accuracy, ".4f")


def _change(row: Row) -> str:
    change = row.change or {}
    if "accuracy" in change:
        return f"{change['accuracy']:+.4f}"
    return _number(change.get("score"), "+.4f")


def _interval(row: Row) -> str:
    return f"{row.low:.3f}-{row.high:.3f}" if row.graded and row.accuracy is not None else NOTHING


COLUMNS = (
    _Column(heading="accuracy", cell=measured, words="{}", use=0),
    _Column(heading="95% interval", cell=_interval, words="95% interval {}", use=1),
    _Column(heading="floor", cell=lambda row: _number(row.floor, ".3f"), words="floor {}", use=2),
    _Column(heading="change", cell=_change, words="change {}", use=3),
    _Column(heading="n", cell=lambda row: str(row.graded), words="{} graded", use=4),
    _Column(heading="unans", cell=lambda row: str(row.unanswered), words="{} unanswered", use=8),
    _Column(heading="trunc", cell=lambda row: str(row.truncated), words="{} truncated", use=7),
    _Column(heading="err", cell=lambda row: str(row.errors), words="{} errors", use=5),
    _Column(
        heading="accept",
        cell=lambda row: _number(row.acceptance_length, ".2f"),
        words="acceptance length {}",
        use=6,
    ),
    _Column(heading="tok/s", cell=lambda row: _number(row.tokens_per_second, ".0f"), words="{} tokens/s", use=9),
    _Column(heading="start", cell=lambda row: _number(row.startup, ".0f", "s"), words="start-up {}", use=10),
)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{spec}}{unit}"


def table(
    rows: Sequence[Row], *, columns: int = 80, skipped: Mapping[str, str] | None = None, paint: Paint = plain
) -> list[str]:
    """Render one line per config under a heading, and what does not fit on an indented second line.

    A figure that does not exist is a dash; a figure that no config has gets no column. `skipped` says why configs did
    not run, by id. Ids are shortened in their middle only where they alone would not leave room for accuracy and
    verdict, and never so that two become equal.
    """
    skipped = skipped or {}
    there = [column for column in COLUMNS if any(column.cell(row) != NOTHING for row in rows) or not column.use]
    names = [escaped(name) for name in (*(row.config_id for row in rows), *skipped)]
    longest = max((shown_width(name) for name in ("config", *names)), default=0)
    widths = {c.heading: max(len(c.heading), *(len(c.cell(row)) for row in rows), 1) for c in there}
    labels = [*(LABELS[row.verdict] for row in rows), *(SKIPPED for _ in skipped), "verdict"]
    room = columns - max(map(len, labels)) - len(GAP)
    kept = _fitting(there, widths, room - longest)
    names = _shortened(names, room - sum(widths[c.heading] + len(GAP) for c in kept))
    lines = [
        _Line(
            name=name,
            label=LABELS[row.verdict],
            outcome=row.verdict,
            cells=tuple(column.cell(row) for column in kept),
            below=tuple(_rest(row, [column for column in there if column not in kept])),
        )
        for name, row in zip(names, rows, strict=False)
    ]
    reasons = zip(names[len(rows) :], skipped.values(), strict=True)
    dashes = tuple(NOTHING for _ in kept)
    lines += [
        _Line(name=name, label=SKIPPED, outcome=SKIPPED, cells=dashes, below=(escaped(reason),))
        for name, reason in reasons
    ]
    heading = _Line(name="config", label="verdict", outcome=SKIPPED, cells=tuple(c.heading for c in kept))
    first = max(shown_width(line.name) for line in (heading, *lines))
    sizes = [widths[column.heading] for column in kept]
    shown = [_render(heading, first, sizes, plain)]
    for line in lines:
        shown.append(_render(line, first, sizes, paint))
        below = ", ".join(line.below)
        shown += [INDENT + part for part in wrapped(below, columns - len(INDENT)) if below]
    return shown


def _fitting(there: Sequence[_Column], widths: Mapping[str, int], room: int) -> list[_Column]:
    """Keep the columns of most use, in their order."""
    kept = list(there)
    while sum(widths[c.heading] + len(GAP) for c in kept) > room and any(c.use for c in kept):
        kept.remove(max(kept, key=lambda column: column.use))
    return kept


def _rest(row: Row, moved: Sequence[_Column]) -> Iterator[str]:
    """Say the figures that have no column; of what went wrong only what did."""
    cells = ((column, column.cell(row)) for column in moved)
    return (column.words.format(cell) for column, cell in cells if cell not in (NOTHING, "0"))


def _render(line: _Line, first: int, sizes: Sequence[int], paint: Paint) -> str:
    padding = " " * (first - shown_width(line.name))
    cells = "".join(GAP + cell.rjust(size) for cell, size in zip(line.cells, sizes, strict=True))
    return f"{line.name}{padding}{cells}{GAP}{paint(line.label, line.outcome)}"


def _shortened(names: Sequence[str], room: int) -> list[str]:
    """Cut the middle out of names that are too wide, so that all stay different; none is cut where that cannot be."""
    room = max(room, len("config"), 12)
    if all(shown_width(name) <= room for name in names):
        return list(names)
    middle = room // 2
    # As much of the beginning as of the end, or else what tells them apart.
    for head in sorted(range(1, room - 1), key=lambda head: abs(head - middle)):
        short = [_cut(name, head, room) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def _cut(name: str, head: int, room: int) -> str:
    """Keep so many columns of the beginning, and of the end what still fits."""
    if shown_width(name) <= room:
        return name
    start = _beginning(name, head)
    return f"{start}…{_beginning(name[::-1], room - 1 - shown_width(start))[::-1]}"


def _beginning(text: str, room: int) -> str:
    widths = itertools.accumulate(shown_width(character) for character in text)
    return text[: sum(width <= room for width in widths)]


def notes(rows: Sequence[Row]) -> list[str]:
    """Say what the table cannot: readings of the replies that disagree, and how clear choices were."""
    return [note for row in rows for note in _notes(row)]


def _notes(row: Row) -> Iterator[str]:
    name = escaped(row.config_id)
    if len(set(row.correct_by_scorer.values())) > 1:
        readings = " and ".join(f"{scorer} {right}" for scorer, right in sorted(row.correct_by_scorer.items()))
        yield f"{name}: right by {readings} of {row.graded}; {row.scorer} gates"
    margin = row.measures.get(f"margin_{row.scorer}")
    if margin is not None:
        low, high = (row.measures.get(f"margin_{end}") for end in ("low", "high"))
        interval = "" if low is None or high is None else f" (95% interval {low:+.4f} to {high:+.4f})"
        yield f"{name}: mean margin of the right choice {margin:+.4f}{interval}, {row.scorer}"
    if row.drift is not None:
        yield f"{name}: DRIFT: {escaped(row.drift)}"
    if row.reused:
        yield f"{name}: {row.reused} of {row.graded} answers were not asked now: from the cache or a resumed run"


def run_lines(run: RunDocument, *, columns: int = 80, paint: Paint = plain) -> list[str]:
    """Render a whole run: the table, its notes, and about ten lines for each failure."""
    lines = table(run.rows, columns=columns, skipped=run.skipped, paint=paint)
    lines += [line for note in notes(run.rows) for line in wrapped(note, columns)]
    for config in run.failed:
        name = f"{escaped(config.row.config_id)}: "
        lines += ["", name + paint(LABELS[config.row.verdict], config.row.verdict)]
        lines += text_of(config, run, columns=columns)
    return lines
