"""That a server's GPU memory came back: read before its start, waited for before the next server's."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.errors import GpuMemoryHeld
from harness.gpus.inventory import Gpu

MARGIN_BYTES = 512 * 1024**2
"""A driver context of somebody else's comes and goes with so much."""
WAIT_SECONDS = 60.0
SETTLE_SECONDS = 2.0
"""A process that ended takes less to give its memory back; a cancelled job has no time for more."""
POLL_SECONDS = 0.2
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    bytes: int | None
    """None where the driver does not tell."""


class MemoryReader(Protocol):
    """Reads one GPU; None where its memory cannot be read."""

    def used(self, gpu: Gpu) -> int | None: ...

    def holders(self, gpu: Gpu) -> Sequence[Holder]: ...


class GpuMemory:
    """What each GPU held before the first server of this process was started on it.

    All of this is for GPUs that one server has for itself. On a shared one the driver does not tell whose memory it is,
    and that no process of ours is left, which is made sure of at every stop, is all that can be known.
    """

    def __init__(self, reader: MemoryReader | None = None, *, wait: float = WAIT_SECONDS) -> None:
        self._reader = reader or NvmlReader()
        self._wait = wait
        self._before: dict[str, int] = {}

    def ready(self, gpus: Sequence[Gpu]) -> Mapping[str, int]:
        """Wait until GPUs that served before hold no more than they did then; note those that did not. Bytes by UUID.

        Raises GpuMemoryHeld naming who holds the memory.
        """
        deadline = time.monotonic() + self._wait
        found: dict[str, int] = {}
        for gpu in gpus:
            used = self._reader.used(gpu)
            while used is not None and used > self._before.get(gpu.uuid, used) + MARGIN_BYTES:
                if time.monotonic() >= deadline:
                    raise GpuMemoryHeld(self._describe(gpu, used))
                time.sleep(POLL_SECONDS)
                used = self._reader.used(gpu)
            if used is not None:
                found[gpu.uuid] = used
                self._before.setdefault(gpu.uuid, used)
        return found

    def settled(self, gpus: Sequence[Gpu]) -> Mapping[str, int]:
        """Give the driver a moment to take a stopped server's memory back, and read what is held then."""
        deadline = time.monotonic() + min(SETTLE_SECONDS, self._wait)
        while True:
            found = self.used(gpus)
            late = [uuid for uuid, used in found.items() if used > self._before.get(uuid, used) + MARGIN_BYTES]
            if not late or time.monotonic() >= deadline:
                return found
            time.sleep(POLL_SECONDS)

    def used(self, gpus: Sequence[Gpu]) -> Mapping[str, int]:
        """Read what each GPU holds now, in bytes by UUID; those that cannot be read are left out."""
        read = {gpu.uuid: self._reader.used(gpu) for gpu in gpus}
        return {uuid: used for uuid, used in read.items() if used is not None}

    def _describe(self, gpu: Gpu, used: int) -> str:
        before = self._before[gpu.uuid]
        holders = [
            f"pid {holder.pid}" + ("" if holder.bytes is None else f" ({holder.bytes / GIB:.2f} GiB)")
            for holder in self._reader.holders(gpu)
        ]
        return (
            f"GPU {gpu.index} ({gpu.uuid}) still holds {used / GIB:.2f} GiB after {self._wait:g} s, {before / GIB:.2f} "
            f"GiB before its last server: {', '.join(holders) or 'held by a process that the driver does not name'}"
        )


class NvmlReader:
    """Reads NVIDIA's GPUs through nvidia-ml-py, the extra `gpu`; elsewhere nothing can be read."""

    def used(self, gpu: Gpu) -> int | None:
        with _Nvml() as nvml:
            if nvml is None or gpu.kind != "cuda":
                return None
            try:
                return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).used)
            except nvml.NVMLError:
                return None

    def holders(self, gpu: Gpu) -> Sequence[Holder]:
        with _Nvml() as nvml:
            if nvml is None:
                return ()
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except nvml.NVMLError:
                return ()
            return tuple(Holder(pid=process.pid, bytes=process.usedGpuMemory) for process in running)


class _Nvml:
    """The library, loaded for one reading; None where it or its driver is not here."""

    def __enter__(self) -> Any:
        self._library: Any = None
        try:
            library: Any = importlib.import_module("pynvml")
            library.nvmlInit()
        except ImportError:
            return None
        except library.NVMLError:
            return None
        self._library = library
        return library

    def __exit__(self, *exc_info: object) -> None:
        if self._library is not None:
            self._library.nvmlShutdown()
