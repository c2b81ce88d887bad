"""The terminal: a progress line while it runs, a table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from tqdm import tqdm

from harness.gates.threshold import Counts, Verdict
from harness.records import Row

HEADINGS = (
    "config",
    "accuracy",
    "95% interval",
    "floor",
    "n",
    "unans",
    "trunc",
    "err",
    "accept",
    "tok/s",
    "start",
    "verdict",
)
LABELS: Mapping[Verdict, str] = {
    Verdict.PASS: "pass",
    Verdict.REGRESSION: "REGRESSION",
    Verdict.INFRASTRUCTURE: "INFRA",
}


def table(rows: Sequence[Row]) -> list[str]:
    """Render one line per config under a heading; a figure that does not exist is a dash."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    return [
        "  ".join(
            _align(cell, width, column) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def reading_notes(rows: Sequence[Row]) -> list[str]:
    """Name the configs whose two readings of the replies disagree, with both figures."""
    return [
        f"{row.config_id}: right by {' and '.join(f'{name} {n}' for name, n in sorted(row.correct_by_scorer.items()))} "
        f"of {row.graded}; {row.scorer} gates"
        for row in rows
        if len(set(row.correct_by_scorer.values())) > 1
    ]


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column in {0, len(HEADINGS) - 1} else cell.rjust(width)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.config_id,
        _number(row.accuracy, ".4f"),
        f"{row.low:.3f}-{row.high:.3f}" if row.graded else "-",
        _number(row.floor, ".3f"),
        str(row.graded),
        str(row.unanswered),
        str(row.truncated),
        str(row.errors),
        _number(row.acceptance_length, ".2f"),
        _number(row.tokens_per_second, ".0f"),
        _number(row.startup, ".0f", "s"),
        LABELS[row.verdict],
    )


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


class LiveLine:
    """One tqdm line per config; silent where nobody watches (no terminal, or CI)."""

    def __init__(self, name: str, stream: IO[str] | None = None) -> None:
        stream = stream or sys.stderr
        watched = stream.isatty() and not os.environ.get("CI")
        self._bar = tqdm(
            desc=name, unit="q", file=stream, disable=not watched, leave=False, dynamic_ncols=True, delay=0
        )
        self._name = name

    def stage(self, text: str) -> None:
        self._bar.set_description_str(f"{self._name}: {text}")

    def answered(self, counts: Counts, total: int) -> None:
        self._bar.total = total
        if counts.accuracy is not None:
            self._bar.set_postfix_str(f"accuracy {counts.accuracy:.3f}, errors {counts.errors}", refresh=False)
        self._bar.update(counts.asked - self._bar.n)

    def close(self) -> None:
        self._bar.close()
