"""The driver's run folder: files as they come from nodes, and a result for every config, its node gone or not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.config_lists import ListedConfig
from harness.errors import RecordUnwritable
from harness.gates.threshold import Verdict
from harness.on_ray.orders import Piece, Placement
from harness.records import EvalResult, RunRecord, now, read_samples, write_json
from harness.tally import Tally
from harness.tasks.base import Sample, Status


class ArrivingRecord:
    """A run record that is written by others, elsewhere."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._parts: dict[str, bytearray] = {}

    def take(self, piece: Piece) -> None:
        """Write a piece; a file that counts as a whole appears with its last one. Raises RecordUnwritable."""
        path = self.record.folder / piece.path
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not piece.whole:
                with path.open("r+b" if path.exists() else "xb") as file:
                    file.seek(piece.at)
                    file.write(piece.data)
                return
            part = self._parts.setdefault(piece.path, bytearray())
            part[piece.at :] = piece.data
            if piece.last:
                temporary = path.with_name(f".{path.name}.arriving")
                temporary.write_bytes(self._parts.pop(piece.path))
                temporary.replace(path)

    def verdict(self, entry: ListedConfig) -> Verdict | None:
        """Return what a config's result says; None where there is none."""
        result = self._read(entry)
        return Verdict(result["verdict"]) if result is not None else None

    def reason(self, entry: ListedConfig) -> str:
        result = self._read(entry)
        return str(result["reason"]) if result is not None else ""

    def put_away(self, entries: Sequence[ListedConfig], attempt: int) -> None:
        """Rename what an attempt that came to nothing wrote, so that the next one's files stand alone."""
        folders = {self.record.folder / name for entry in entries for name in (entry.folder, entry.server_id)}
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.is_file() and not path.name.startswith(("attempt-", ".")):
                    with _writing(path):
                        path.rename(path.with_name(f"attempt-{attempt}.{path.name}"))
        self._parts.clear()

    def settle(self, entry: ListedConfig, placement: Placement, reason: str, *, elsewhere: str = "") -> None:
        """Add to a config's result where it ran; where there is none, make it an outage for this reason.

        `elsewhere` is the folder on the node, which nobody would find.
        """
        folder = self.record.config(entry.folder).folder
        result = self._read(entry) or _outage(entry, folder, reason).to_json()
        if elsewhere:
            result["reason"] = result["reason"].replace(elsewhere, str(self.record.folder))
        result["server"] = {**result["server"], "ray": placement.facts()}
        write_json(folder / "result.json", result)

    def _read(self, entry: ListedConfig) -> dict[str, Any] | None:
        try:
            text = (self.record.folder / entry.folder / "result.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        result: dict[str, Any] = json.loads(text)
        return result


def _outage(entry: ListedConfig, folder: Path, reason: str) -> EvalResult:
    """Count the samples that arrived, as the evaluation would have."""
    tally = Tally()
    for sample in _samples(folder / "samples.jsonl"):
        tally.add(sample)
    config = entry.config
    perplexity = config.task == "perplexity"
    return EvalResult(
        config_id=entry.id,
        model_name=config.model_name,
        task={"name": config.task},
        verdict=Verdict.INFRASTRUCTURE,
        reason=reason,
        counts=tally.counts,
        threshold=None if perplexity else config.accuracy_threshold,
        tolerance=None if perplexity else config.tolerance,
        floor=None if perplexity else float(config.floor),
        correct_by_scorer=tally.correct_by_scorer,
        timings=tally.timings(),
        output_tokens=tally.output_tokens,
        server={"backend": config.backend},
        started=now(),
        finished=now(),
    )


def _samples(path: Path) -> Iterator[Sample]:
    rows: Iterable[dict[str, Any]] = read_samples(path) if path.is_file() else ()
    for row in rows:
        yield Sample(**{**row, "status": Status(row["status"])})


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordUnwritable(f"{path}: cannot be written: {error.strerror or error}") from error
