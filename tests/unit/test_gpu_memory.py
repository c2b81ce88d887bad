"""GPU memory that comes back, late or never, and who is named then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.errors import GpuMemoryHeld
from harness.gpus.inventory import Gpu
from harness.gpus.memory import GIB, GpuMemory, Holder

GPU = Gpu(kind="cuda", index=3, uuid="GPU-a", name="H200", memory_total=140 * GIB, arch="9.0", selector="3")


class Readings:
    """A GPU whose memory use is a series of readings, the last for ever."""

    def __init__(self, *gib: float | None) -> None:
        self._readings: Iterator[float | None] = iter(gib)
        self._last: float | None = None
        self.left = len(gib)

    def used(self, gpu: Gpu) -> int | None:
        self.left -= 1
        self._last = next(self._readings, self._last)
        return None if self._last is None else round(self._last * GIB)

    def holders(self, gpu: Gpu) -> Sequence[Holder]:
        return [Holder(pid=4711, bytes=12 * GIB), Holder(pid=4712, bytes=None)]


def test_memory_that_comes_back_late_is_waited_for() -> None:
    """The second server waits until the first one's memory is gone, within a margin."""
    readings = Readings(1.0, 12.0, 6.0, 1.3)
    memory = GpuMemory(readings, wait=30.0)
    assert memory.ready([GPU]) == {"GPU-a": GIB}
    assert memory.ready([GPU]) == {"GPU-a": round(1.3 * GIB)}
    assert readings.left == 0


def test_memory_that_does_not_come_back_is_an_outage_that_names_who_holds_it() -> None:
    """The message names the GPU, both figures and the processes."""
    memory = GpuMemory(Readings(1.0, 13.0), wait=0.0)
    memory.ready([GPU])
    with pytest.raises(GpuMemoryHeld) as caught:
        memory.ready([GPU])
    for part in ("GPU 3 (GPU-a)", "13.00 GiB", "1.00 GiB before", "pid 4711 (12.00 GiB)", "pid 4712"):
        assert part in str(caught.value)


def test_memory_that_others_hold_from_the_start_is_theirs() -> None:
    """A GPU that was in use before our first server is no leak of ours."""
    assert GpuMemory(Readings(100.0), wait=0.0).ready([GPU]) == {"GPU-a": 100 * GIB}


def test_a_margin_does_not_creep() -> None:
    """What is compared with is the first reading, not the last: small leaks add up to an outage."""
    memory = GpuMemory(Readings(1.0, 1.4, 1.8), wait=0.0)
    memory.ready([GPU])
    memory.ready([GPU])
    with pytest.raises(GpuMemoryHeld):
        memory.ready([GPU])


def test_memory_that_cannot_be_read_is_not_waited_for() -> None:
    """Without a driver library there is nothing to wait for, and nothing is claimed."""
    assert GpuMemory(Readings(None), wait=0.0).ready([GPU]) == {}


FAKE_NVML = """
class NVMLError(Exception): ...
class Info: used = 7
class Process: pid, usedGpuMemory = 12, 5
def nvmlInit():
    if {broken}: raise NVMLError("no driver")
def nvmlShutdown(): print("shut", end=" ")
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetMemoryInfo(handle): return Info
def nvmlDeviceGetComputeRunningProcesses(handle): return [Process]
"""


@pytest.mark.parametrize(
    ("broken", "printed"), [(False, "shut 7 shut [(12, 5)]"), (True, "None []")], ids=["driver", "no driver"]
)
def test_nvidias_library_is_read_by_uuid_and_closed(tmp_path: Path, broken: bool, printed: str) -> None:
    """Each reading opens and closes the library; one without its driver reads nothing."""
    (tmp_path / "pynvml.py").write_text(FAKE_NVML.format(broken=broken))
    program = (
        "from harness.gpus.memory import NvmlReader\nfrom harness.gpus.inventory import Gpu\n"
        f"gpu = {GPU!r}\nreader = NvmlReader()\n"
        "print(reader.used(gpu), end=' ')\nprint([(h.pid, h.bytes) for h in reader.holders(gpu)])\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed
