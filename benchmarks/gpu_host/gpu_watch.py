"""Watches the GPUs from the side: what they hold, for how long they hold more than before, who holds it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.gpus.inventory import Gpu, target_gpus
from harness.gpus.memory import MARGIN_BYTES, NvmlReader
from harness.gpus.tools import discover

POLL_SECONDS = 0.5
SETTLE_SECONDS = 10.0


@dataclass(kw_only=True)
class GpuWatch:
    """A context manager; without GPUs it watches nothing, and of several those that the environment leaves visible."""

    gpus: tuple[Gpu, ...] = field(default_factory=lambda: target_gpus(None, os.environ, discover()))
    busy_seconds: float = 0.0
    """Summed over GPUs: as long as one held more than before."""
    peak: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = NvmlReader()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before: Mapping[str, int] = self.used()
        self.after: Mapping[str, int] = {}

    def __enter__(self) -> GpuWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        deadline = time.monotonic() + SETTLE_SECONDS
        self.after = self.used()
        while not self.is_back and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self.after = self.used()

    @property
    def is_back(self) -> bool:
        """Whether no GPU holds more than before, but for what a driver context takes."""
        return all(used <= self.before.get(uuid, used) + MARGIN_BYTES for uuid, used in self.after.items())

    def used(self) -> dict[str, int]:
        """Read bytes by UUID; GPUs that cannot be read are left out."""
        read = {gpu.uuid: self._reader.used(gpu) for gpu in self.gpus}
        return {uuid: used for uuid, used in read.items() if used is not None}

    def pids(self) -> set[int]:
        """List the processes that hold memory of any GPU."""
        return {holder.pid for gpu in self.gpus for holder in self._reader.holders(gpu)}

    def facts(self) -> dict[str, object]:
        """Say for the record what was seen; the numbers are None where there was nothing to watch."""
        seen = bool(self.before)
        return {
            "gpu_seconds": round(self.busy_seconds, 1) if seen else None,
            "memory_before": dict(self.before),
            "memory_peak": self.peak,
            "memory_after": dict(self.after),
            "memory_is_back": self.is_back if seen else None,
        }

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(POLL_SECONDS):
            now, used = time.monotonic(), self.used()
            self.peak = {uuid: max(size, self.peak.get(uuid, 0)) for uuid, size in used.items()}
            holding = sum(size > self.before.get(uuid, size) + MARGIN_BYTES for uuid, size in used.items())
            self.busy_seconds += holding * (now - last)
            last = now
