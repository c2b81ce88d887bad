"""What was tried and whether it held, written to a file after every single check."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Checks:
    """A list of checks on disk."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def check(self, what: str, held: bool, seen: str) -> None:
        """Note one check with what was seen."""
        self.rows.append({"what": what, "held": held, "seen": seen})
        self.write()
        print(f"{'ok  ' if held else 'FAIL'} {what}: {seen}", flush=True)

    def write(self) -> None:
        document = {**self.facts, "checks": self.rows}
        self.path.write_text(json.dumps(document, indent=2), encoding="utf-8")

    @property
    def failed(self) -> int:
        return sum(not row["held"] for row in self.rows)
