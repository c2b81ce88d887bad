"""Finding this machine's GPUs with the vendors' tools, choosing among them, and showing a server its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.gpus.inventory import Gpu, GpuKind, Inventory, target_gpus, visible_environment
from harness.gpus.tools import MIB, discover

ROOT = Path(__file__).resolve().parents[2]
Tool = Callable[[str, Mapping[str, str]], None]

SMI_QUERY = "--query-gpu=index,uuid,memory.total,compute_cap,mig.mode.current,name --format=csv,noheader,nounits"
H200 = "0, GPU-3f5b9a10-7c55-2b1e-9d1e-5a0c6f7e8d01, 143771, 9.0, Disabled, NVIDIA H200\n"
GB10 = "0, GPU-0c2d4e6f-1111-2222-3333-444455556666, [N/A], 12.1, [N/A], NVIDIA GB10\n"
LOST = "1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]\n"
CUT = (
    "0, GPU-aaaa0000-0000-0000-0000-000000000000, 81920, 8.0, Enabled, NVIDIA A100-SXM4-80GB\n"
    "1, GPU-bbbb0000-0000-0000-0000-000000000000, 81920, 8.0, Disabled, NVIDIA A100-SXM4-80GB\n"
    "2, GPU-cccc0000-0000-0000-0000-000000000000, 81920, 8.0, Enabled, NVIDIA A100-SXM4-80GB\n"
)
CUT_LIST = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa0000-0000-0000-0000-000000000000)
  MIG 3g.40gb     Device  0: (UUID: MIG-11111111-0000-0000-0000-000000000000)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-12222222-0000-0000-0000-000000000000)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb0000-0000-0000-0000-000000000000)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-cccc0000-0000-0000-0000-000000000000)
"""
AMD_QUERY = "static --asic --vram --json"
ROCM_QUERY = "--showproductname --showuniqueid --showmeminfo vram --json"


def amd_static(place: int, serial: str, gfx: str = "gfx942") -> dict[str, Any]:
    return {
        "gpu": place,
        "asic": {
            "market_name": "AMD Instinct MI300X",
            "vendor_id": "0x1002",
            "asic_serial": serial,
            "num_compute_units": 304,
            "target_graphics_version": gfx,
        },
        "vram": {"type": "HBM3", "vendor": "HYNIX", "size": {"value": 196592, "unit": "MB"}},
    }


def rocm_card(node: str, unique: str) -> dict[str, str]:
    return {
        "Unique ID": unique,
        "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "297070592",
        "Card Series": "AMD Instinct MI300X",
        "Card Model": "0x74a1",
        "Node ID": node,
        "GFX Version": "gfx942",
    }


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """Put a program on the tests' PATH that answers each command line with a text and others with an error."""

    def put(name: str, answers: Mapping[str, str]) -> None:
        cases = "".join(f"{shlex.quote(line)}) printf %s {shlex.quote(text)} ;;\n" for line, text in answers.items())
        script = f'#!/bin/sh\ncase "$*" in\n{cases}*) echo "unknown: $*" >&2; exit 3 ;;\nesac\n'
        write_script(tmp_path / name, script)

    return put


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Inventory]:
    """Discover with nothing but the test's own tools and no NVML."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return lambda: discover({"PATH": str(tmp_path)}, timeout=20)


def write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_a_machine_without_tools_has_no_gpus(find: Callable[[], Inventory]) -> None:
    """A missing tool is no fault: there are no such GPUs."""
    assert find() == Inventory()


def test_nvidia_smi_tells_gpus(tool: Tool, find: Callable[[], Inventory]) -> None:
    """Index, UUID, name, memory in bytes and compute capability come from nvidia-smi's own columns."""
    tool("nvidia-smi", {SMI_QUERY: H200})
    assert find() == Inventory(
        gpus=(
            Gpu(
                kind="cuda",
                index=0,
                uuid="GPU-3f5b9a10-7c55-2b1e-9d1e-5a0c6f7e8d01",
                name="NVIDIA H200",
                memory_total=143771 * MIB,
                arch="9.0",
                selector="0",
            ),
        )
    )


def test_memory_that_is_not_told_is_unknown(tool: Tool, find: Callable[[], Inventory]) -> None:
    """A GPU that shares the CPU's memory has no size of its own, which is not a size of 0."""
    tool("nvidia-smi", {SMI_QUERY: GB10})
    assert [(gpu.memory_total, gpu.arch) for gpu in find().gpus] == [(None, "12.1")]


def test_a_lost_gpu_is_left_out_and_named(tool: Tool, find: Callable[[], Inventory]) -> None:
    """A GPU that fell off the bus does not hide the others."""
    tool("nvidia-smi", {SMI_QUERY: H200 + LOST})
    found = find()
    assert [gpu.index for gpu in found.gpus] == [0]
    assert "GPU is lost" in found.faults[0]


def test_mig_instances_stand_for_their_gpu(tool: Tool, find: Callable[[], Inventory]) -> None:
    """A GPU in MIG mode offers its instances and not itself, and nothing while it is not cut."""
    tool("nvidia-smi", {SMI_QUERY: CUT, "-L": CUT_LIST})
    found = [(gpu.index, gpu.uuid[:8], gpu.memory_total, gpu.parent and gpu.parent[:8]) for gpu in find().gpus]
    assert found == [
        (0, "MIG-1111", 40 * 10**9, "GPU-aaaa"),
        (0, "MIG-1222", 10 * 10**9, "GPU-aaaa"),
        (1, "GPU-bbbb", 81920 * MIB, None),
    ]


@pytest.mark.parametrize("wrapped", [False, True], ids=["a list", "gpu_data"])
def test_amd_smi_tells_gpus_in_hips_order(tool: Tool, find: Callable[[], Inventory], wrapped: bool) -> None:
    """AMD's GPUs are numbered as HIP does, by the driver's node, and known by the UUID that HIP knows."""
    static: Any = [amd_static(0, "0x00AB"), amd_static(1, "0x4162405E51BB99B0", "gfx942:sramecc+:xnack-")]
    nodes = [{"gpu": 0, "bdf": "0000:05:00.0", "node_id": 3}, {"gpu": 1, "bdf": "0000:26:00.0", "node_id": 2}]
    warning = "WARNING: [AMDGPU] devices are in a low-power state\n"
    answer = json.dumps({"gpu_data": static} if wrapped else static, indent=4)
    tool("amd-smi", {AMD_QUERY: warning + answer, "list --json": json.dumps(nodes)})
    found = [(gpu.kind, gpu.index, gpu.uuid, gpu.arch, gpu.memory_total) for gpu in find().gpus]
    assert found == [
        ("rocm", 0, "GPU-4162405e51bb99b0", "gfx942", 196592 * MIB),
        ("rocm", 1, "GPU-00000000000000ab", "gfx942", 196592 * MIB),
    ]


def test_rocm_smi_tells_gpus(tool: Tool, find: Callable[[], Inventory]) -> None:
    """Where amd-smi is not there or fails, rocm-smi tells the same, and the failure is kept."""
    tool("amd-smi", {})
    cards = {"card0": rocm_card("5", "0xff"), "card1": rocm_card("4", "N/A"), "system": {"Driver version": "6.8.5"}}
    tool("rocm-smi", {ROCM_QUERY: json.dumps(cards)})
    found = find()
    assert [(gpu.uuid, gpu.arch, gpu.memory_total) for gpu in found.gpus] == [
        ("rocm-0", "gfx942", 206141652992),
        ("GPU-00000000000000ff", "gfx942", 206141652992),
    ]
    assert found.faults == ("amd-smi failed with exit code 3: unknown: static --asic --vram --json",)


def test_xpu_smi_tells_gpus(tool: Tool, find: Callable[[], Inventory]) -> None:
    """Intel's GPUs come with the memory that each one's own page tells, or none where it cannot be read."""
    devices = [
        {"device_id": place, "device_name": "Intel(R) Data Center GPU Max 1100", "uuid": f"00000000-0000-00{place}"}
        for place in range(2)
    ]
    tool(
        "xpu-smi",
        {
            "discovery -j": json.dumps({"device_list": devices}),
            "discovery -d 0 -j": json.dumps({"device_id": 0, "memory_physical_size_byte": "51539607552"}),
        },
    )
    found = [(gpu.kind, gpu.index, gpu.memory_total, gpu.arch) for gpu in find().gpus]
    assert found == [("xpu", 0, 51539607552, None), ("xpu", 1, None, None)]


@pytest.mark.parametrize(
    "printed",
    ["", "nonsense", "No devices were found", "[]", "{}", "[1, null]", '{"gpu_data": 3}', '{"card0": 7}', '{"a": "["}'],
)
@pytest.mark.parametrize("name", ["nvidia-smi", "amd-smi", "rocm-smi", "xpu-smi"])
def test_odd_answers_are_no_gpus(tmp_path: Path, find: Callable[[], Inventory], name: str, printed: str) -> None:
    """Whatever a tool prints, discovery does not raise."""
    write_script(tmp_path / name, f"#!/bin/sh\nprintf %s {shlex.quote(printed)}\n")
    if name == "rocm-smi" and printed.startswith('{"card0"'):
        assert [gpu.arch for gpu in find().gpus] == [None]
    else:
        assert find().gpus == ()


def test_a_tool_that_fails_is_named(tool: Tool, find: Callable[[], Inventory], tmp_path: Path) -> None:
    """A broken driver is told, since a machine whose GPUs cannot be seen is not one without."""
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    write_script(tmp_path / "nvidia-smi", f'#!/bin/sh\necho "{said}"\nexit 9\n')
    (tmp_path / "xpu-smi").write_bytes(b"\x7fELF no program")
    (tmp_path / "xpu-smi").chmod(0o755)
    nvidia, xpu = find().faults
    assert nvidia == f"nvidia-smi failed with exit code 9: {said}"
    assert "xpu-smi cannot be run" in xpu


def test_a_tool_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that does not answer costs its time limit and leaves no process behind."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    child = tmp_path / "child"
    write_script(tmp_path / "nvidia-smi", f"#!/bin/sh\n/bin/sleep 600 &\necho $! > {child}\nwait\n")
    found = discover({"PATH": str(tmp_path)}, timeout=2)
    assert found.gpus == ()
    assert "did not finish within 2 s" in found.faults[0]
    deadline = time.monotonic() + 10
    while is_running(int(child.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(child.read_text()))


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


FAKE_NVML = '''
"""As much of nvidia-ml-py as discovery asks for: a whole GPU, one that is lost, one that is cut."""
from types import SimpleNamespace
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
class NVMLError_NotSupported(NVMLError): pass
def nvmlInit():
    fail()
def nvmlShutdown(): print("shut down")
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetUUID(handle): return {0: "GPU-zero", 2: "GPU-two"}.get(handle) or "MIG-" + handle
def nvmlDeviceGetName(handle): return "NVIDIA H200" if isinstance(handle, int) else "NVIDIA H200 MIG 1g.18gb"
def nvmlDeviceGetMemoryInfo(handle):
    if handle == 0: raise NVMLError_NotSupported()
    return SimpleNamespace(total=150 if handle == 2 else 18)
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetMigMode(handle):
    if handle == 0: raise NVMLError_NotSupported()
    return [1, 1]
def nvmlDeviceGetMaxMigDeviceCount(handle): return 7
def nvmlDeviceGetMigDeviceHandleByIndex(handle, place):
    if place != 3: raise NVMLError("not found")
    return "three"
'''


def run_with_nvml(tmp_path: Path, failing: str, code: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pynvml.py").write_text(f"{FAKE_NVML}\nimport time\ndef fail(): {failing}\n", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PATH": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, text=True, capture_output=True, timeout=60, check=True
    )


def test_nvml_is_asked_first(tmp_path: Path, tool: Tool) -> None:
    """With nvidia-ml-py installed GPUs and MIG instances come from NVML, which is shut down again."""
    tool("nvidia-smi", {})
    code = "from harness.gpus.tools import discover; found = discover(); print(*found.gpus, *found.faults, sep='\\n')"
    shut, whole, part, fault = run_with_nvml(tmp_path, "pass", code).stdout.splitlines()
    assert shut == "shut down"
    expected = Gpu(
        kind="cuda", index=0, uuid="GPU-zero", name="NVIDIA H200", memory_total=None, arch="9.0", selector="0"
    )
    assert whole == repr(expected)
    assert part == repr(
        replace(
            expected,
            index=2,
            uuid="MIG-three",
            name="NVIDIA H200 MIG 1g.18gb",
            memory_total=18,
            selector="MIG-three",
            parent="GPU-two",
        )
    )
    assert fault == "NVML: GPU 1: GPU is lost"


@pytest.mark.parametrize(
    ("failing", "fault"),
    [
        ("raise NVMLError_LibraryNotFound()", "()"),
        ("raise NVMLError('Driver Not Loaded')", "('NVML: Driver Not Loaded',)"),
    ],
    ids=["no library", "no driver"],
)
def test_nvidia_smi_is_asked_where_nvml_is_not_there(tmp_path: Path, tool: Tool, failing: str, fault: str) -> None:
    """A machine without NVML is no fault, one whose driver is broken is, and either way nvidia-smi is asked."""
    tool("nvidia-smi", {SMI_QUERY: H200})
    code = "from harness.gpus.tools import discover; found = discover(); print(found.faults, '\\n', found.gpus[0].name)"
    printed = run_with_nvml(tmp_path, failing, code).stdout.splitlines()
    assert [line.strip() for line in printed] == [fault, "NVIDIA H200"]


def test_an_nvml_that_hangs_is_left_behind(tmp_path: Path) -> None:
    """A call that a hung driver never answers neither blocks discovery nor the end of the program."""
    code = "from harness.gpus.tools import discover; print(discover(timeout=0.5).faults)"
    assert "NVML did not answer within 0.5 s" in run_with_nvml(tmp_path, "time.sleep(3600)", code).stdout


def gpus(kind: GpuKind, count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            kind=kind,
            index=place,
            uuid=f"GPU-{'abcdefgh'[place]}1234567",
            name="a GPU",
            memory_total=None,
            arch=None,
            selector=str(place),
        )
        for place in range(count)
    )


CUDA = gpus("cuda", 4)
ROCM = gpus("rocm", 4)
XPU = gpus("xpu", 4)
MIG = (
    replace(CUDA[0], uuid="MIG-11", selector="MIG-11", parent="GPU-a1234567"),
    replace(CUDA[0], uuid="MIG-12", selector="MIG-12", parent="GPU-a1234567"),
    CUDA[1],
)

CHOICES = [
    ("all", None, {}, CUDA, "0,1,2,3"),
    ("option", "3,0", {}, CUDA, "3,0"),
    ("option with spaces", " 1 , 2", {}, CUDA, "1,2"),
    ("option by UUID", "GPU-b1234567", {}, CUDA, "1"),
    ("option by the start of a UUID", "gpu-C,0", {}, CUDA, "2,0"),
    ("variable", None, {"CUDA_VISIBLE_DEVICES": "2,1"}, CUDA, "2,1"),
    ("variable by UUID", None, {"CUDA_VISIBLE_DEVICES": "GPU-d1234567,GPU-a"}, CUDA, "3,0"),
    ("variable, empty", None, {"CUDA_VISIBLE_DEVICES": ""}, CUDA, ""),
    ("variable, -1", None, {"CUDA_VISIBLE_DEVICES": "-1"}, CUDA, ""),
    ("variable, NoDevFiles", None, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, CUDA, ""),
    ("variable, up to -1", None, {"CUDA_VISIBLE_DEVICES": "3,-1,0"}, CUDA, "3"),
    ("option within the variable", "1,0", {"CUDA_VISIBLE_DEVICES": "2,3"}, CUDA, "3,2"),
    ("option by UUID within the variable", "GPU-d", {"CUDA_VISIBLE_DEVICES": "2,3"}, CUDA, "3"),
    ("other vendors' variables", None, {"HIP_VISIBLE_DEVICES": "9", "ZE_AFFINITY_MASK": "9"}, CUDA, "0,1,2,3"),
    ("a variable where there is nothing", None, {"CUDA_VISIBLE_DEVICES": "0"}, (), ""),
    ("MIG by UUID", None, {"CUDA_VISIBLE_DEVICES": "MIG-12"}, MIG, "MIG-12"),
    ("MIG by its GPU's index", None, {"CUDA_VISIBLE_DEVICES": "0,1"}, MIG, "MIG-11,1"),
    ("MIG by its GPU's UUID", None, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, MIG, "MIG-11"),
    ("MIG counted by the option", "1,2", {}, MIG, "MIG-12,1"),
    ("HIP", None, {"HIP_VISIBLE_DEVICES": "3,1"}, ROCM, "3,1"),
    ("HIP, empty", None, {"HIP_VISIBLE_DEVICES": ""}, ROCM, "0,1,2,3"),
    ("HIP by UUID", None, {"HIP_VISIBLE_DEVICES": "GPU-b1234567"}, ROCM, "1"),
    ("CUDA's variable for HIP", None, {"CUDA_VISIBLE_DEVICES": "1"}, ROCM, "1"),
    ("both of HIP's", None, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, ROCM, "1"),
    ("ROCR", None, {"ROCR_VISIBLE_DEVICES": "2,3"}, ROCM, "0,1"),
    ("ROCR, empty", None, {"ROCR_VISIBLE_DEVICES": ""}, ROCM, ""),
    ("HIP within ROCR", None, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ROCM, "1"),
    ("Level Zero", None, {"ZE_AFFINITY_MASK": "1,2"}, XPU, "1,2"),
    ("Level Zero, empty", None, {"ZE_AFFINITY_MASK": ""}, XPU, "0,1,2,3"),
]


@pytest.mark.parametrize(
    ("option", "env", "here", "chosen"), [row[1:] for row in CHOICES], ids=[row[0] for row in CHOICES]
)
def test_target_gpus_are_those_named(
    option: str | None, env: dict[str, str], here: tuple[Gpu, ...], chosen: str
) -> None:
    """`--gpus` chooses, in its order, among what the vendor's variable leaves visible; the variable means what it
    means to the vendor's runtime."""
    targets = target_gpus(option, env, Inventory(gpus=here))
    assert ",".join(gpu.selector for gpu in targets) == chosen


def test_rocr_names_the_gpus_that_hip_counts() -> None:
    """ROCR_VISIBLE_DEVICES picks by the machine's order, HIP_VISIBLE_DEVICES from what that leaves."""
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}
    (target,) = target_gpus(None, env, Inventory(gpus=ROCM))
    assert (target.index, target.uuid, target.selector) == (3, "GPU-d1234567", "1")


FAULTS = [
    ("option, no such GPU", "0,9", {}, CUDA, "--gpus 0,9: 9 names no GPU"),
    ("option, not a number", "one", {}, CUDA, "--gpus one: one names no GPU"),
    ("option, negative", "-1", {}, CUDA, "--gpus -1: -1 names no GPU"),
    ("option, empty", "", {}, CUDA, "--gpus : an empty entry names no GPU"),
    ("option, twice", "1,1", {}, CUDA, "--gpus 1,1: 1 names a GPU that stands in the list already"),
    ("option, twice by UUID", "1,GPU-b", {}, CUDA, "GPU-b names a GPU that stands"),
    ("option, hidden", "2", {"CUDA_VISIBLE_DEVICES": "2,3"}, CUDA, "--gpus 2: 2 names no GPU"),
    ("option, hidden UUID", "GPU-a", {"CUDA_VISIBLE_DEVICES": "2,3"}, CUDA, "--gpus GPU-a: GPU-a names no GPU"),
    ("option, all hidden", "0", {"CUDA_VISIBLE_DEVICES": ""}, CUDA, "--gpus 0: there is no GPU .*environment"),
    ("option, no GPU at all", "0", {}, (), "--gpus 0: there is no GPU .*none was found; a tool failed"),
    ("option, ambiguous", "GPU-", {}, CUDA, "GPU- could be any of GPU-a1234567, GPU-b1234567"),
    ("variable, no such GPU", None, {"CUDA_VISIBLE_DEVICES": "0,4"}, CUDA, "CUDA_VISIBLE_DEVICES=0,4: 4 names no GPU"),
    ("variable, no such UUID", None, {"CUDA_VISIBLE_DEVICES": "GPU-x"}, CUDA, "CUDA_VISIBLE_DEVICES=GPU-x: GPU-x"),
    ("variable, trailing comma", None, {"CUDA_VISIBLE_DEVICES": "0,"}, CUDA, "0,: an empty entry names no GPU"),
    ("variable, twice", None, {"CUDA_VISIBLE_DEVICES": "0,0"}, CUDA, "0 names a GPU that stands in the list"),
    ("ROCR", None, {"ROCR_VISIBLE_DEVICES": "7"}, ROCM, "ROCR_VISIBLE_DEVICES=7: 7 names no GPU"),
    ("HIP beyond ROCR", None, {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}, ROCM, "HIP_VISIBLE_DEVICES=2"),
    ("two for HIP", None, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ROCM, "=0 and .*=1 differ"),
    ("Level Zero", None, {"ZE_AFFINITY_MASK": "0,5"}, XPU, "ZE_AFFINITY_MASK=0,5: 5 names no GPU"),
    ("tiles", None, {"ZE_AFFINITY_MASK": "0.1"}, XPU, "ZE_AFFINITY_MASK=0.1: tiles"),
]


@pytest.mark.parametrize(
    ("option", "env", "here", "message"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_an_entry_that_names_no_gpu_is_an_error(
    option: str | None, env: dict[str, str], here: tuple[Gpu, ...], message: str
) -> None:
    """Where a runtime would quietly go on with fewer GPUs, the option or variable and the entry are named."""
    with pytest.raises(ConfigError, match=message):
        target_gpus(option, env, Inventory(gpus=here, faults=("a tool failed",)))


@pytest.mark.parametrize(
    ("chosen", "variables"),
    [
        ((), {}),
        ((CUDA[3], CUDA[1]), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"}),
        (MIG[:1], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "MIG-11"}),
        (ROCM[2:], {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}),
        (XPU[:1], {"ZE_AFFINITY_MASK": "0"}),
    ],
    ids=["none", "cuda", "mig", "rocm", "xpu"],
)
def test_a_server_is_shown_its_own_gpus(chosen: tuple[Gpu, ...], variables: dict[str, str]) -> None:
    """A server is told its GPUs by the variables its platform reads, and reads back the same ones."""
    assert visible_environment(chosen) == variables
    if chosen:
        machine = {"cuda": MIG if chosen[0].parent else CUDA, "rocm": ROCM, "xpu": XPU}[chosen[0].kind]
        assert target_gpus(None, variables, Inventory(gpus=machine)) == tuple(chosen)
