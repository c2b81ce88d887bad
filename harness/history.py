"""What earlier runs measured: an append-only index of run folders, which may be local or synced from CI."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, RecordUnwritable
from harness.records import SCHEMA_VERSION as RECORD_VERSION
from harness.records import write_text
from harness.reports.page import PastRun
from harness.reports.page.past import past_of
from harness.trends import SCHEMA_VERSION, Key, Point, Trend, trend

INDEX = "history.jsonl"
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All runs that count, and what could not be read."""

    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def trends(self) -> tuple[Trend, ...]:
        by_key: dict[Key, list[Point]] = {}
        for point in self.points:
            by_key.setdefault(point.key, []).append(point)
        return tuple(trend(key, by_key[key]) for key in sorted(by_key, key=str))


def past_runs(results_dir: Path, config_id: str | None = None) -> list[PastRun]:
    """List the runs of a config, or of all, oldest first, from the index and the folders; nothing is written."""
    index = results_dir / INDEX
    known = _indexed(index)
    points = _counting([*known, *_scan(results_dir, _run_ids(index, known), [])])
    found = [point.past for point in points if config_id is None or point.past.config_id == config_id]
    return sorted(found, key=lambda past: (past.started, past.run_id))


def runs_before(folder: Path) -> tuple[PastRun, ...]:
    """Return what a run's results folder holds of runs that began before it."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    started = str(run.get("started") or "")
    return tuple(past for past in past_runs(folder.absolute().parent) if past.started < started)


def update(results_dir: Path, *, rebuild: bool = False) -> History:
    """Add the finished runs below `results_dir` to its index, and read that.

    `rebuild` writes it anew, from the folders that are there. Where it cannot be written, a note says so. Raises
    ConfigError where `results_dir` is no folder.
    """
    if not results_dir.is_dir():
        raise ConfigError(f"--results {results_dir}: no such folder")
    index = results_dir / INDEX
    notes: list[str] = []
    known = [] if rebuild else _indexed(index)
    fresh = list(_scan(results_dir, _run_ids(index, known), notes))
    lines = "".join(json.dumps(point.to_json(), allow_nan=False) + "\n" for point in fresh)
    try:
        if rebuild:
            write_text(index, lines)
        elif fresh:
            _append(index, lines)
    except (OSError, RecordUnwritable) as error:
        notes.append(f"{index} is not kept: {error}")
    return History(points=_counting([*known, *fresh]), notes=tuple(notes))


def _append(index: Path, lines: str) -> None:
    """Add lines with one write, after what a writer that died may have left of its own."""
    torn = _is_torn(index)
    with index.open("ab", buffering=0) as file:
        file.write(("\n" * torn + lines).encode())
        os.fsync(file.fileno())


def _indexed(index: Path) -> list[Point]:
    """Read the index; lines that are torn, or of a version that this does not know, are ignored."""
    try:
        content = index.read_bytes()
    except OSError:
        return []
    return [point for line in content.split(b"\n")[:-1] for point in _point_of_line(line)]


def _point_of_line(line: bytes) -> Iterator[Point]:
    try:
        document = json.loads(line)
        if document["schema"] == SCHEMA_VERSION:
            yield Point.from_json(document)
    except _DAMAGE:
        return


def _run_ids(index: Path, points: Sequence[Point]) -> set[str]:
    """Name the runs that need not be read again; where the end is torn off, the last run may have lost lines."""
    whole = points[:-1] if _is_torn(index) else points
    last = {points[-1].past.run_id} if len(whole) < len(points) else set()
    return {point.past.run_id for point in whole} - last


def _is_torn(index: Path) -> bool:
    content = index.read_bytes() if index.is_file() else b""
    return bool(content) and not content.endswith(b"\n")


def _scan(results_dir: Path, known: Collection[str], notes: list[str]) -> Iterator[Point]:
    """Read the runs that are not known yet, however deep their folders lie; note those that cannot be used."""
    seen: set[str] = set()
    for path in sorted(results_dir.rglob("run.json"), key=lambda path: (path.parent.name, path)):
        folder = path.parent
        if folder.name in known or folder.name in seen:
            continue
        seen.add(folder.name)
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            if run["schema"] > RECORD_VERSION:
                notes.append(f"{folder} is left out: of version {run['schema']}; this reads up to {RECORD_VERSION}")
            elif not run["finished"]:
                notes.append(f"{folder} is left out: it was not finished")
            else:
                yield from [*_points(folder, run, notes)]
        except _DAMAGE as error:
            notes.append(f"{folder} is left out: {path.name} cannot be read: {type(error).__name__}: {error}")


def _points(folder: Path, run: Mapping[str, Any], notes: list[str]) -> Iterator[Point]:
    merged_from = tuple(str(part["run_id"]) for part in run.get("merged_from", ()))
    for path in sorted(folder.rglob("result.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            point = point_of(result, {**run, "run_id": folder.name}, merged_from)
        except _DAMAGE as error:
            notes.append(f"{path} is left out: it cannot be read: {type(error).__name__}: {error}")
        else:
            yield point


def point_of(result: Mapping[str, Any], run: Mapping[str, Any], merged_from: Sequence[str] = ()) -> Point:
    """Read a `result.json` and its `run.json`; raises LookupError, TypeError or ValueError where they are damaged."""
    counts, task = result["counts"], result["task"]
    backend = result["server"].get("backend", "vllm")
    return Point(
        key=Key(config_id=str(result["config_id"]), task=str(task["name"]), backend=str(backend)),
        past=past_of(result, run),
        graded=counts["asked"] - counts["errors"],
        questions_sha256=task.get("questions_sha256"),
        merged_from=tuple(merged_from),
    )


def _counting(points: Iterable[Point]) -> tuple[Point, ...]:
    """Leave out what a merged run repeats of its shards, and all but the last of what stands several times."""
    found = {(point.past.run_id, point.key): point for point in points}
    repeated = {run_id for point in found.values() for run_id in point.merged_from}
    return tuple(point for point in found.values() if point.past.run_id not in repeated)
