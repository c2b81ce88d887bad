"""The GPUs of this machine: which there are, which of them a run may use, and how a server is told."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.errors import ConfigError

GpuKind = Literal["cuda", "rocm", "xpu"]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance of one."""

    kind: GpuKind
    index: int
    """Its place in the order the runtime counts in; for a MIG instance that of the GPU it is cut from."""
    uuid: str
    name: str
    memory_total: int | None
    """Bytes; None where the driver does not say, as with memory shared with the CPU."""
    arch: str | None
    """Compute capability ("9.0") or gfx name ("gfx942"); None where it is not known."""
    selector: str
    """What names it in the variable that makes GPUs visible."""
    parent: str | None = None
    """For a MIG instance the UUID of its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What was found, and what went wrong on the way."""

    gpus: tuple[Gpu, ...] = ()
    faults: tuple[str, ...] = ()
    """One line for each tool that is here but failed and each GPU that could not be read."""


def target_gpus(option: str | None, env: Mapping[str, str], found: Inventory) -> tuple[Gpu, ...]:
    """Choose the GPUs a run may use: `--gpus`, within what the vendor's variable leaves visible.

    The variables mean what they mean to the runtimes: CUDA_VISIBLE_DEVICES takes indices, UUIDs and unique beginnings
    of them; a negative entry ends the list; empty is no GPU for CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES and the
    same as unset for HIP_VISIBLE_DEVICES and ZE_AFFINITY_MASK. CUDA indices count in PCI bus order, as nvidia-smi's do.
    A number in `--gpus` counts the visible GPUs, so that a job cannot leave what its scheduler gave it. Raises
    ConfigError for an entry that names no GPU, where a runtime would go on with fewer.
    """
    visible = _VISIBLE[found.gpus[0].kind](env, found.gpus) if found.gpus else ()
    if option is None:
        return visible
    if not visible:
        why = "hidden by the environment" if found.gpus else "; ".join(("none was found", *found.faults))
        raise ConfigError(f"--gpus {option}: there is no GPU to choose from here ({why})")
    return _chosen("--gpus", option, visible, lambda place: visible[place : place + 1], option=True)


def visible_environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Give the variables that show a server these GPUs and no others; none for no GPUs."""
    if not gpus:
        return {}
    names = ",".join(gpu.selector for gpu in gpus)
    match gpus[0].kind:
        case "cuda":
            # Indices rather than UUIDs, which older vLLM cannot read; CUDA's own order puts the fastest first.
            return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}
        case "rocm":
            return {"HIP_VISIBLE_DEVICES": names, "CUDA_VISIBLE_DEVICES": names}  # vLLM refuses two that differ
        case "xpu":
            return {"ZE_AFFINITY_MASK": names}


def _cuda_visible(env: Mapping[str, str], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return gpus
    # CUDA shows one MIG instance of a GPU that is named by its index.
    return _chosen("CUDA_VISIBLE_DEVICES", text, gpus, lambda place: [gpu for gpu in gpus if gpu.index == place][:1])


def _rocm_visible(env: Mapping[str, str], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    outer = env.get("ROCR_VISIBLE_DEVICES")
    if outer is not None:
        shown = _chosen("ROCR_VISIBLE_DEVICES", outer, gpus, lambda place: gpus[place : place + 1])
        # HIP counts what ROCR_VISIBLE_DEVICES has left, and a server inherits that variable.
        gpus = tuple(replace(gpu, selector=str(place)) for place, gpu in enumerate(shown))
    said = {name: env[name] for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if env.get(name)}
    if len(set(said.values())) > 1:
        both = " and ".join(f"{name}={text}" for name, text in said.items())
        raise ConfigError(f"{both} differ, which vLLM refuses: unset one")
    for name, text in said.items():
        return _chosen(name, text, gpus, lambda place: gpus[place : place + 1])
    return gpus


def _xpu_visible(env: Mapping[str, str], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    text = env.get("ZE_AFFINITY_MASK")
    if not text:
        return gpus
    if "." in text:
        raise ConfigError(f"ZE_AFFINITY_MASK={text}: tiles cannot be told apart here: name whole GPUs, such as 0,1")
    return _chosen("ZE_AFFINITY_MASK", text, gpus, lambda place: gpus[place : place + 1])


_VISIBLE: dict[GpuKind, Callable[[Mapping[str, str], tuple[Gpu, ...]], tuple[Gpu, ...]]] = {
    "cuda": _cuda_visible,
    "rocm": _rocm_visible,
    "xpu": _xpu_visible,
}


def _chosen(
    source: str, text: str, gpus: Sequence[Gpu], at: Callable[[int], Sequence[Gpu]], *, option: bool = False
) -> tuple[Gpu, ...]:
    """Resolve a list of GPUs as an option or a variable holds it; `at` gives the GPU at a number, if any."""
    chosen: list[Gpu] = []
    if not text and not option:
        return ()
    for entry in (part.strip() for part in text.split(",")):
        if not option and (re.fullmatch(r"-\d+", entry) or entry == "NoDevFiles"):
            break
        found = at(int(entry)) if entry.isdecimal() else _begins(entry, gpus)
        fault = None
        if len(found) != 1:
            fault = f"could be any of {', '.join(gpu.uuid for gpu in found)}" if found else "names no GPU"
        elif found[0] in chosen:
            fault = "names a GPU that stands in the list already"
        if fault is not None:
            numbered = (f"{place if option else gpu.index} ({gpu.uuid[:12]}…)" for place, gpu in enumerate(gpus))
            said = f"{source}{' ' if option else '='}{text}: {entry or 'an empty entry'}"
            raise ConfigError(f"{said} {fault}; there are {', '.join(numbered)}")
        chosen += found
    return tuple(chosen)


def _begins(entry: str, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Find the GPUs whose UUID begins so; one that is cut into MIG instances stands for the first of them."""
    first = {gpu.parent or gpu.uuid: gpu for gpu in reversed(gpus)}
    by_uuid = {gpu.uuid: gpu for gpu in gpus} | first
    return [gpu for uuid, gpu in by_uuid.items() if entry and uuid.lower().startswith(entry.lower())]


def discover(env: Mapping[str, str] = os.environ, *, timeout: float = 30.0) -> Inventory:
    """Find the GPUs of this machine, all of one vendor, whatever variables hide some of them.

    NVML is asked first, then each vendor's tool on PATH. A missing tool means no such GPUs; one that fails or takes
    more than `timeout` seconds is a fault. Nothing is raised.
    """
    tools = _Tools(env, timeout)
    faults: list[str] = []
    for read in (_nvml, _nvidia_smi, _amd_smi, _rocm_smi, _xpu_smi):
        try:
            found = read(tools)
        except _Unreadable as error:
            faults.append(str(error))
            continue
        faults += found.faults
        if found.gpus:
            return Inventory(gpus=found.gpus, faults=tuple(faults))
    return Inventory(faults=tuple(faults))


class _Unreadable(Exception):
    """A tool is here and gave no answer that can be used."""


@dataclass(frozen=True, slots=True)
class _Tools:
    """Runs the vendors' command-line tools."""

    env: Mapping[str, str]
    timeout: float

    def run(self, name: str, *arguments: str) -> str | None:
        """Return what a tool prints, or None where there is no such tool."""
        program = shutil.which(name, path=self.env.get("PATH", os.defpath))
        if program is None:
            return None
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self._finish([program, *arguments], out, err)
            out.seek(0)
            err.seek(0)
            printed, complaint = (file.read().decode(errors="replace") for file in (out, err))
        if code:
            lines = (complaint.strip() or printed.strip() or "it printed nothing").splitlines()
            raise _Unreadable(f"{name} failed with exit code {code}: {lines[-1].strip()[:200]}")
        return printed

    def _finish(self, command: list[str], out: Any, err: Any) -> int:
        # Files and a session of its own: a pipe would stay open for as long as any child of a hung tool lives.
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(self.env), start_new_session=True
            )
        except OSError as error:
            raise _Unreadable(f"{command[0]} cannot be run: {error.strerror}") from error
        try:
            return process.wait(self.timeout)
        except subprocess.TimeoutExpired as error:
            raise _Unreadable(f"{' '.join(command)} did not finish within {self.timeout:g} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)

    def json(self, name: str, *arguments: str) -> Any:
        """Return the JSON that a tool prints, after whatever warnings, or None where there is no such tool."""
        printed = self.run(name, *arguments)
        if printed is None:
            return None
        for start in re.finditer(r"^\s*(?=[\[{])", printed, re.MULTILINE):
            with contextlib.suppress(ValueError):
                return json.JSONDecoder().raw_decode(printed, start.end())[0]
        raise _Unreadable(f"{name} {' '.join(arguments)} printed no JSON: {printed.strip()[:200]}")


def _nvml(tools: _Tools) -> Inventory:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Inventory()
    answers: list[Inventory] = []
    # A thread, because a call into a driver that hangs cannot be interrupted.
    thread = threading.Thread(target=lambda: answers.append(_read_nvml(nvml)), name="nvml", daemon=True)
    thread.start()
    thread.join(tools.timeout)
    if not answers:
        raise _Unreadable(f"NVML did not answer within {tools.timeout:g} s")
    return answers[0]


def _read_nvml(nvml: Any) -> Inventory:
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError_LibraryNotFound:
        return Inventory()
    except nvml.NVMLError as error:
        return Inventory(faults=(f"NVML: {error}",))
    gpus: list[Gpu] = []
    faults: list[str] = []
    try:
        for index in range(count):
            try:
                gpus += _nvml_gpu(nvml, index)
            except nvml.NVMLError as error:
                faults.append(f"NVML: GPU {index}: {error}")
    finally:
        nvml.nvmlShutdown()
    return Inventory(gpus=tuple(gpus), faults=tuple(faults))


def _nvml_gpu(nvml: Any, index: int) -> Iterator[Gpu]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def memory(device: Any) -> int | None:
        with contextlib.suppress(nvml.NVMLError):
            return int(nvml.nvmlDeviceGetMemoryInfo(device).total)
        return None

    whole = Gpu(
        kind="cuda",
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_total=memory(handle),
        arch="{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        selector=str(index),
    )
    cut = 0
    with contextlib.suppress(nvml.NVMLError):  # not supported by most GPUs
        cut = nvml.nvmlDeviceGetMigMode(handle)[0]
    if not cut:
        yield whole
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # a place without an instance
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            uuid = nvml.nvmlDeviceGetUUID(device)
            name = nvml.nvmlDeviceGetName(device)
            yield replace(whole, uuid=uuid, name=name, memory_total=memory(device), selector=uuid, parent=whole.uuid)


def _nvidia_smi(tools: _Tools) -> Inventory:
    fields = ("index", "uuid", "memory.total", "compute_cap", "mig.mode.current", "name")
    printed = tools.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits") or ""
    lines = [line.split(",", len(fields) - 1) for line in printed.splitlines() if line.strip()]
    rows = [dict(zip(fields, (value.strip() for value in line), strict=False)) for line in lines]
    cut: dict[str, list[tuple[str, str]]] = {}
    if any(row.get("mig.mode.current") == "Enabled" for row in rows):
        cut = _smi_instances(tools.run("nvidia-smi", "-L") or "")
    gpus: list[Gpu] = []
    faults: list[str] = []
    for row in rows:
        index, uuid = _number(row["index"]), row.get("uuid", "")
        if index is None or len(row) < len(fields) or not uuid.startswith("GPU-"):
            faults.append(f"nvidia-smi: {', '.join(row.values())}")
            continue
        memory = _number(row["memory.total"])
        whole = Gpu(
            kind="cuda",
            index=index,
            uuid=uuid,
            name=row["name"],
            memory_total=None if memory is None else memory * MIB,
            arch=_matching(r"\d+\.\d+", row["compute_cap"]),
            selector=str(index),
        )
        if row["mig.mode.current"] != "Enabled":
            gpus.append(whole)
        for profile, instance in cut.get(uuid, ()):
            gigabytes = re.search(r"(\d+)gb", profile)  # the one place that tells an instance's memory, rounded
            memory = int(gigabytes[1]) * 10**9 if gigabytes else None
            name = f"{whole.name} MIG {profile}"
            gpus.append(replace(whole, uuid=instance, name=name, memory_total=memory, selector=instance, parent=uuid))
    return Inventory(gpus=tuple(gpus), faults=tuple(faults))


def _smi_instances(printed: str) -> dict[str, list[tuple[str, str]]]:
    """Read profile and UUID of each MIG instance, by the UUID of its GPU, off `nvidia-smi -L`."""
    found: dict[str, list[tuple[str, str]]] = {}
    parent = ""
    for line in printed.splitlines():
        if whole := re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line):
            parent = whole[1]
        elif instance := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line):
            found.setdefault(parent, []).append((instance[1], instance[2]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """One AMD GPU as a tool reports it, unchecked."""

    node: Any
    serial: Any
    name: Any
    memory: Any
    arch: Any


def _amd_smi(tools: _Tools) -> Inventory:
    entries = _entries(tools.json("amd-smi", "static", "--asic", "--vram", "--json"))
    nodes: dict[Any, Any] = {}
    if entries:
        with contextlib.suppress(_Unreadable):
            listed = _entries(tools.json("amd-smi", "list", "--json"))
            nodes = {str(entry.get("gpu")): entry.get("node_id") for entry in listed}
    cards = []
    for entry in entries:
        asic, vram = _mapping(entry.get("asic")), _mapping(entry.get("vram"))
        mib = _number(_mapping(vram.get("size")).get("value"))
        cards.append(
            _Card(
                node=nodes.get(str(entry.get("gpu"))),
                serial=asic.get("asic_serial"),
                name=asic.get("market_name"),
                memory=mib and mib * MIB,
                arch=asic.get("target_graphics_version"),
            )
        )
    return _amd_gpus(cards)


def _rocm_smi(tools: _Tools) -> Inventory:
    printed = tools.json("rocm-smi", "--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--json")
    cards = []
    for key, value in _mapping(printed).items():
        if not key.startswith("card"):
            continue
        said = {name.lower(): text for name, text in _mapping(value).items()}  # "Card series" until ROCm 6
        cards.append(
            _Card(
                node=said.get("node id"),
                serial=said.get("unique id"),
                name=said.get("card series") or said.get("device name"),
                memory=said.get("vram total memory (b)"),
                arch=said.get("gfx version"),
            )
        )
    return _amd_gpus(cards)


def _amd_gpus(cards: list[_Card]) -> Inventory:
    """Put AMD's GPUs in HIP's order, that of the driver's node numbers; the tools count by bus address."""
    nodes = [_number(card.node) for card in cards]
    if None not in nodes:
        cards = [card for _, card in sorted(zip(nodes, cards, strict=True), key=lambda pair: pair[0] or 0)]
    gpus = []
    for index, card in enumerate(cards):
        serial = _matching(r"0x0*[1-9a-f][0-9a-f]*", str(card.serial).lower())
        gpu = Gpu(
            kind="rocm",
            index=index,
            uuid=f"GPU-{int(serial, 16):016x}" if serial else f"rocm-{index}",
            name=str(card.name or "AMD GPU"),
            memory_total=_number(card.memory),
            arch=_matching(r"gfx[0-9a-f]+", str(card.arch).lower().partition(":")[0]),
            selector=str(index),
        )
        gpus.append(gpu)
    return Inventory(gpus=tuple(gpus))


def _xpu_smi(tools: _Tools) -> Inventory:
    printed = _mapping(tools.json("xpu-smi", "discovery", "-j"))
    gpus = []
    for device in _entries(printed.get("device_list")):
        index = _number(device.get("device_id"))
        if index is None:
            continue
        details: Mapping[str, Any] = {}
        with contextlib.suppress(_Unreadable):
            details = _mapping(tools.json("xpu-smi", "discovery", "-d", str(index), "-j"))
        gpus.append(
            Gpu(
                kind="xpu",
                index=index,
                uuid=str(device.get("uuid") or f"xpu-{index}"),
                name=str(device.get("device_name") or "Intel GPU"),
                memory_total=_number(details.get("memory_physical_size_byte")),
                arch=None,
                selector=str(index),
            )
        )
    fault = printed.get("error")
    return Inventory(gpus=tuple(gpus), faults=(f"xpu-smi: {fault}",) if fault else ())


def _entries(data: Any) -> list[Mapping[str, Any]]:
    """Take the rows of a tool's answer, which newer amd-smi wraps in a mapping."""
    rows = _mapping(data).get("gpu_data", data)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | str) and str(value).strip().isdecimal() else None


def _matching(pattern: str, text: str | None) -> str | None:
    return text if text is not None and re.fullmatch(pattern, text) else None
