"""The records of `gpu_host.sh`: folders or packed files, of one call or several, put together and read."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecords:
    """One folder that holds `records/`; what is missing reads as nothing."""

    folder: Path
    note: str = ""
    """What whoever brought the records back has to say of them, from `note.txt` beside them."""

    @classmethod
    def of(cls, folder: Path, scratch: Path) -> HostRecords:
        """Read a visit's folder: `records/`, or packed files below it, which are put together in `scratch`.

        What a later call of the script holds again counts. Raises ValueError for a folder with neither.
        """
        told = folder / "note.txt"
        note = told.read_text(encoding="utf-8").strip() if told.is_file() else ""
        if (folder / "records").is_dir():
            return cls(folder=folder, note=note)
        packed = sorted(folder.rglob("records-*.tar.gz"), key=_last_written)
        if not packed:
            raise ValueError(f"{folder}: holds neither records/ nor records-….tar.gz")
        for path in packed:
            with tarfile.open(path) as tar:
                tar.extractall(scratch, filter="data")
        return cls(folder=scratch, note=note)

    @property
    def records(self) -> Path:
        return self.folder / "records"

    def document(self, name: str) -> dict[str, Any]:
        """Read `records/NAME.json`; empty where there is none."""
        path = self.records / f"{name}.json"
        if not path.is_file():
            return {}
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read

    def suite(self, name: str) -> dict[str, Any]:
        return self.document(f"suites/{name}")

    def log(self, name: str) -> str:
        """Read `records/NAME.log`; empty where there is none."""
        path = self.records / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def steps(self) -> list[dict[str, Any]]:
        """List every step of every call in the order they began."""
        lines = [
            line
            for path in sorted(self.records.glob("steps-*.jsonl"))
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        found = {(step["name"], step["began"]): step for step in map(json.loads, lines)}
        return sorted(found.values(), key=lambda step: float(step["began"]))


def _last_written(packed: Path) -> float:
    with tarfile.open(packed) as tar:
        return max((member.mtime for member in tar), default=0.0)


def by_server(configs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sum tasks of one server up: verdicts, accuracy of its first task, seconds from nothing to its last verdict."""
    found: dict[str, list[dict[str, Any]]] = {}
    for config in configs:
        found.setdefault(config["id"].partition(":")[0], []).append(config)
    return {server: _summed(rows) for server, rows in found.items()}


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = sorted(rows, key=lambda row: str(row["started"]))
    began, ended = (datetime.fromisoformat(text) for text in (rows[0]["started"], max(r["finished"] for r in rows)))
    questions = next((row for row in rows if row["id"].endswith(":gsm8k")), rows[0])
    return {
        "verdicts": [row["verdict"] for row in rows],
        "accuracy": questions["accuracy"],
        "floor": questions["floor"],
        "acceptance_length": questions["acceptance_length"],
        "startup": rows[0]["startup"],
        "asking": questions["asking"],
        "seconds": (ended - began).total_seconds(),
    }
