"""The GPUs of this machine: which of them a run may use, and how a server is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.errors import ConfigError

GpuKind = Literal["cuda", "rocm", "xpu"]


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
