"""Which GPUs this machine has, as NVML and the vendors' own tools tell."""

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.gpus.inventory import Gpu, Inventory

MIB = 1024 * 1024


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
