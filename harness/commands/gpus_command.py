"""`accuracy-gate gpus`: this machine's GPUs, who holds them, and who waits for them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from harness.gpus.inventory import Gpu
from harness.gpus.leases import GpuLeases, describe_need
from harness.gpus.memory import GIB, MemoryReader, NvmlReader
from harness.gpus.tickets import Holder
from harness.gpus.tools import discover
from harness.reports.untrusted import escaped


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate gpus` takes."""
    parser.add_argument("--format", choices=["text", "json"], default="text", help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or why no GPU is seen; 0 in either case."""
    found = discover()
    seen = look(found.gpus, GpuLeases().table(), found.faults, NvmlReader())
    report = seen.as_json() if arguments.format == "json" else seen.as_text()
    sys.stdout.write(report + "\n")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The GPUs of this machine at one moment."""

    gpus: tuple[Gpu, ...]
    used: Mapping[str, int | None]
    """Bytes by UUID; None where they cannot be read."""
    holders: tuple[Holder, ...]
    faults: tuple[str, ...]
    at: float
    """Seconds since the epoch."""

    @property
    def waiting(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.waits]

    def on(self, uuid: str) -> list[Holder]:
        """List who holds a GPU."""
        return [one for one in self.holders if one.ticket.granted is not None and uuid in one.ticket.granted.gpus]

    @property
    def elsewhere(self) -> list[str]:
        """The UUIDs of leased GPUs that are not seen from here."""
        leased = [uuid for one in self.holders if one.ticket.granted for uuid in one.ticket.granted.gpus]
        return [uuid for uuid in dict.fromkeys(leased) if uuid not in self.used]

    def as_text(self) -> str:
        """Render a table for a terminal."""
        lines = []
        if self.gpus:
            rows = [("GPU", "NAME", "MEMORY (GiB)", "HELD BY"), *(row for gpu in self.gpus for row in self._rows(gpu))]
            lines += _aligned(rows)
        else:
            lines.append("; ".join(("no GPU was found", *(escaped(fault) for fault in self.faults))))
        for uuid in self.elsewhere:
            lines += [f"{escaped(uuid)}, not seen from here: {self._describe(one)}" for one in self.on(uuid)]
        names = {gpu.uuid: str(gpu.index) for gpu in self.gpus}
        lines += [
            f"waiting: {self._describe(one)}: {escaped(describe_need(one.ticket, names))}" for one in self.waiting
        ]
        lines += [f"WARNING: {escaped(fault)}" for fault in self.faults if self.gpus]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Render the same for a program; times are ISO 8601 in UTC."""
        document = {
            "gpus": [
                {
                    "index": gpu.index,
                    "uuid": gpu.uuid,
                    "name": gpu.name,
                    "memory_used": self.used[gpu.uuid],
                    "memory_total": gpu.memory_total,
                    "holders": [_holder(one) for one in self.on(gpu.uuid)],
                }
                for gpu in self.gpus
            ],
            "elsewhere": [
                {"uuid": uuid, "holders": [_holder(one) for one in self.on(uuid)]} for uuid in self.elsewhere
            ],
            "waiting": [
                {**_holder(one), "count": one.ticket.count, "candidates": one.ticket.candidates} for one in self.waiting
            ],
            "faults": self.faults,
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def _rows(self, gpu: Gpu) -> Iterator[tuple[str, str, str, str]]:
        used, total = ("?" if size is None else f"{size / GIB:.1f}" for size in (self.used[gpu.uuid], gpu.memory_total))
        first, *more = [self._describe(one) for one in self.on(gpu.uuid)] or ["nobody"]
        yield str(gpu.index), escaped(gpu.name), f"{used} of {total}", first
        yield from (("", "", "", one) for one in more)

    def _describe(self, one: Holder) -> str:
        share = "" if one.ticket.share is None or one.waits else f", {one.ticket.share:g} of it"
        minutes = max(self.at - one.since, 0) / 60
        suspended = ", suspended" if one.is_stopped else ""
        return f"pid {one.pid}, {escaped(one.what)}{share}, for {minutes:.0f} min (since {_time(one.since)}){suspended}"


def look(gpus: tuple[Gpu, ...], holders: tuple[Holder, ...], faults: tuple[str, ...], reader: MemoryReader) -> Seen:
    """Put together what is known of the GPUs now."""
    used = {gpu.uuid: reader.used(gpu) for gpu in gpus}
    return Seen(gpus=gpus, used=used, holders=holders, faults=faults, at=time.time())


def _holder(one: Holder) -> dict[str, Any]:
    place = one.ticket.granted.place if one.ticket.granted else None
    return {
        "pid": one.pid,
        "what": one.what,
        "since": _time(one.since),
        "share": one.ticket.share,
        "place": place,
        "suspended": one.is_stopped,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
