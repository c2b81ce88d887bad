"""A config's samples for the page: short rows to list and filter, and the long texts put away in chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import DataUnavailable
from harness.records import read_samples
from harness.reports.page.chunks import Chunks
from harness.reports.page.marks import find_answer, find_gold, in_utf16
from harness.tasks.base import Status

EXCERPT = 140
"""Characters of a question that the list shows and finds without unpacking."""
COLUMNS = (
    "index",
    "pass",
    "status",
    "correct",
    "changed",
    "extracted",
    "gold",
    "excerpt",
    "tokens",
    "latency",
    "value",
    "chunk",
    "place",
)
_SHOWN = ("question", "gold", "text", "reasoning", "extracted", "found_by", "finish_reason", "scores", "measures")
_FACTS = ("prompt_tokens", "attempts", "error", "prompt_sha256", "unanswered_because", "prompt_tokens_cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    """Where the baseline's text is, and what the list says of it."""

    changed: str
    right: float
    runs: int
    chunk: int
    place: int


def sample_rows(folder: Path, chunks: Chunks) -> list[list[Any]]:
    """Read every pass's samples, one at a time, into rows of `COLUMNS` in order of pass and question.

    Raises DataUnavailable where the record is damaged.
    """
    flips = _flips(folder / "flips.jsonl", chunks)
    rows: list[list[Any]] = []
    for number, path in _passes(folder):
        with _reading(path):
            for sample in read_samples(path):
                flip = flips.get(sample["index"]) if number == 1 else None
                rows.append(_row(sample, number, flip, chunks))
    return sorted(rows, key=lambda row: (row[1], row[0]))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise DataUnavailable(f"{path}: a line is damaged: {fault}; remove that line to render the rest") from error


def _passes(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("samples*.jsonl"):
        named = re.fullmatch(r"samples(?:-(\d+))?\.jsonl", path.name)
        if named:
            yield int(named[1] or 1), path


def _flips(path: Path, chunks: Chunks) -> dict[int, _Flip]:
    flips: dict[int, _Flip] = {}
    with _reading(path):
        for line in read_samples(path) if path.is_file() else ():
            chunk, place = chunks.add({"baseline": line["baseline_text"]})
            right, runs = line["baseline_right"], line["baseline_runs"]
            flips[line["index"]] = _Flip(changed=line["changed"], right=right, runs=runs, chunk=chunk, place=place)
    return flips


def _row(sample: Mapping[str, Any], number: int, flip: _Flip | None, chunks: Chunks) -> list[Any]:
    detail = {key: sample.get(key) for key in (*_SHOWN, *_FACTS)}
    text, gold = sample.get("text"), sample.get("gold")
    answer = find_gold(gold)
    detail["mark"] = in_utf16(text or "", find_answer(text, sample.get("extracted"), sample.get("found_by")))
    detail["gold_mark"] = in_utf16(gold or "", answer)
    if flip is not None:
        detail["baseline"] = {"right": flip.right, "runs": flip.runs, "chunk": flip.chunk, "place": flip.place}
    chunk, place = chunks.add(detail)
    return [
        sample["index"],
        number,
        sample["status"],
        sample["correct"] if sample["scores"] or sample["status"] != Status.OK else None,
        flip.changed if flip else None,
        _short(sample.get("extracted")),
        _short(gold[slice(*answer)] if gold and answer else gold),
        _short(sample.get("question"), EXCERPT),
        sample.get("generated_tokens"),
        sample.get("latency"),
        sample.get("value"),
        chunk,
        place,
    ]


def _short(text: str | None, limit: int = 40) -> str | None:
    if text is None:
        return None
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[:limit] + "…"
