"""What a server runs on, and what configs say about it: where they run, where not, and what differs there.

A requirement is written
    cuda               any GPU of the kind; likewise rocm, xpu, tpu and cpu
    cuda>=9.0          a compute capability; also > <= < == and several at once: cuda>=8.0,<9.0
    cuda:9.0           exactly this one
    rocm:gfx942        this gfx name; likewise tpu:v6e and cpu:aarch64
and a list of them holds where any one holds. Where a run may use unlike GPUs, each of them must meet it.
"""

from __future__ import annotations

import difflib
import importlib.util
import operator
import platform as machine
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from harness.errors import ConfigError
from harness.gpus.inventory import Gpu
from harness.yaml_source import Location

Capability = tuple[int, ...]
ROCM_TIMEOUT = "rocm_request_timeout_seconds"
"""vLLM's key for what `overrides: {rocm: {request_timeout_seconds: …}}` says in general."""


class PlatformKind(StrEnum):
    """vLLM's own names for its platforms."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    TPU = "tpu"
    CPU = "cpu"

    @property
    def counts_gpus(self) -> bool:
        """Whether parallel sizes ask for GPUs of this machine; elsewhere they ask for chips or cores."""
        return self in (PlatformKind.CUDA, PlatformKind.ROCM, PlatformKind.XPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The kind and, where they are known, the architectures of what a server may run on."""

    kind: PlatformKind
    archs: tuple[str, ...] = ()
    """One of each: "9.0", "gfx942", "v6e", "x86_64"; none where one of them is not known."""

    def __str__(self) -> str:
        return " ".join((self.kind, *self.archs))


def current_platform(
    env: Mapping[str, str],
    gpus: Sequence[Gpu],
    targets: Sequence[Gpu] = (),
    *,
    cpu_build: bool = False,
    devices: Path = Path("/dev"),
) -> Platform:
    """Find the platform that vLLM would find here, without importing torch.

    `gpus` are all that the machine has and `targets` those a run may use, where that is not all. `cpu_build` says that
    vLLM is its build for the CPU, which leaves GPUs alone.
    """
    if cpu_build or env.get("VLLM_TARGET_DEVICE") == "cpu":
        return Platform(kind=PlatformKind.CPU, archs=(machine.machine(),))
    if _has_tpu(devices):
        generation = env.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
        return Platform(kind=PlatformKind.TPU, archs=(generation,) if generation else ())
    if not gpus:
        return Platform(kind=PlatformKind.CPU, archs=(machine.machine(),))
    archs = {gpu.arch for gpu in targets or gpus}
    known = sorted(arch for arch in archs if arch is not None)
    return Platform(kind=PlatformKind(gpus[0].kind), archs=tuple(known) if len(known) == len(archs) else ())


def _has_tpu(devices: Path) -> bool:
    # libtpu is installed on other machines too, and what else is passed through VFIO is no TPU.
    nodes = [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]
    return bool(nodes) and importlib.util.find_spec("libtpu") is not None


_ARCHS = {
    PlatformKind.CUDA: (r"\d+\.\d+", "a compute capability such as 9.0"),
    PlatformKind.ROCM: (r"gfx[0-9a-f]+", "a gfx name such as gfx942"),
    PlatformKind.TPU: (r"v\d+[a-z]*", "a generation such as v6e"),
    PlatformKind.CPU: (r"[a-z][a-z0-9_]+", "a machine such as x86_64 or aarch64"),
}
_SIGNS: dict[str, Callable[[Capability, Capability], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_UNKNOWN = {
    PlatformKind.CUDA: "the driver does not tell the compute capability of every GPU: try accuracy-gate[gpu]",
    PlatformKind.ROCM: "amd-smi and rocm-smi do not tell the gfx name of every GPU",
    PlatformKind.TPU: "TPU_ACCELERATOR_TYPE is not set: give it, such as v6e-8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A platform as a config names it."""

    text: str
    kind: PlatformKind
    arch: str | None = None
    bounds: tuple[tuple[str, Capability], ...] = ()
    """Comparisons with a compute capability, all of which must hold."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one requirement; raises ValueError saying what it must be."""
        word = re.split(r"[\s:<>=,]", text.strip(), maxsplit=1)[0]
        rest = text.strip().removeprefix(word).strip()
        if word not in list(PlatformKind):
            near = difflib.get_close_matches(word.lower(), list(PlatformKind), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"must name a platform, {', '.join(PlatformKind)}, as in cuda>=9.0 or rocm:gfx942{hint}")
        kind = PlatformKind(word)
        if rest.startswith(":"):
            return cls(text=text, kind=kind, arch=_arch(kind, rest[1:].strip()))
        return cls(text=text, kind=kind, bounds=_bounds(kind, rest) if rest else ())

    def matches(self, platform: Platform) -> bool:
        """Say whether a platform meets this; raises ConfigError where what must be compared is not known."""
        if platform.kind is not self.kind:
            return False
        if self.arch is None and not self.bounds:
            return True
        if not platform.archs:
            why = _UNKNOWN.get(self.kind, "the architecture is not known")
            raise ConfigError(f"{self.text} cannot be decided here: {why}")
        return all(self._fits(arch) for arch in platform.archs)

    def _fits(self, arch: str) -> bool:
        if self.arch is not None:
            return arch == self.arch
        return all(_SIGNS[sign](_capability(arch), bound) for sign, bound in self.bounds)

    def __str__(self) -> str:
        return self.text


def _arch(kind: PlatformKind, arch: str) -> str:
    if kind not in _ARCHS:
        raise ValueError(f"must be {kind} alone: its architectures are not told apart")
    pattern, example = _ARCHS[kind]
    if not re.fullmatch(pattern, arch):
        raise ValueError(f"must name {example} after {kind}:")
    return arch


def _bounds(kind: PlatformKind, text: str) -> tuple[tuple[str, Capability], ...]:
    parts = [re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(\d+\.\d+)\s*", part) for part in text.split(",")]
    if kind is not PlatformKind.CUDA:
        raise ValueError(f"must be {kind} or {kind}:NAME: only cuda has a compute capability to compare with")
    if not all(parts):
        raise ValueError("must compare with a compute capability, as in cuda>=9.0 or cuda>=8.0,<9.0")
    return tuple((part[1], _capability(part[2])) for part in parts if part)


def _capability(text: str) -> Capability:
    return tuple(int(number) for number in text.split("."))


def _requirement(value: Any) -> Requirement:
    if isinstance(value, Requirement):
        return value
    try:
        return Requirement.parse(value if isinstance(value, str) else "")
    except ValueError as error:
        raise PydanticCustomError("platform", "{why}", {"why": str(error)}) from error


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


PlatformRequirement = Annotated[
    Requirement,
    PlainValidator(_requirement),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^\s*(cuda|rocm|xpu|tpu|cpu)\s*([:<>=].*)?$"}),
]
PlatformRequirements = Annotated[
    list[PlatformRequirement],
    Field(min_length=1),
    BeforeValidator(_listed, json_schema_input_type=PlatformRequirement | list[PlatformRequirement]),
]
"""One requirement, or several of which one must hold."""


class SkipRow(BaseModel):
    """Where a config does not run, and why."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    when: PlatformRequirements = Field(description="The platform, or several: rocm, cuda<9.0, rocm:gfx942.")
    reason: str = Field(min_length=1, description="What the report says of the skipped test.")


def skip_reason(
    platform: Platform, platforms: Sequence[Requirement] | None, rows: Sequence[SkipRow] = ()
) -> str | None:
    """Say why a config does not run here, or None where it does; no `platforms` means all of them."""
    for row in rows:
        if any(requirement.matches(platform) for requirement in row.when):
            return f"{row.reason} (skipped on {', '.join(map(str, row.when))}; this is {platform})"
    if platforms is not None and not any(requirement.matches(platform) for requirement in platforms):
        return f"runs on {', '.join(map(str, platforms))} only; this is {platform}"
    return None


def _overrides(value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for key, keys in value.items():
        try:
            Requirement.parse(key)
        except ValueError as error:
            raise PydanticCustomError("overrides", "{key}: {why}", {"key": key, "why": str(error)}) from error
        for name in ("overrides", "platforms", "skip", ROCM_TIMEOUT):
            if name in keys:
                said = {"key": key, "name": name}
                raise PydanticCustomError("overrides", "{key}: {name} holds for all platforms: move it out", said)
    return value


Overrides = Annotated[dict[str, dict[str, Any]], AfterValidator(_overrides)]
"""Keys that differ on a platform, by requirement; each result must be a valid config of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Keys of a config that hold on some platform alone."""

    requirement: Requirement
    values: Mapping[str, Any]
    location: Location
    """Where they stand in the file."""

    def locate(self, key: Location) -> Location | None:
        """Find where this layer writes a key of the merged config, None where it does not."""
        inner: Any = self.values
        for part in key[:2] if key[:1] == ("env",) else key[:1]:
            if not isinstance(inner, Mapping) or part not in inner:
                return None
            inner = inner[part]
        return self.location if self.location == (ROCM_TIMEOUT,) else (*self.location, *key)


def override_layers(raw: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Take the overrides of a config as its file holds them, in order; their keys must be valid."""
    layers = []
    if raw.get(ROCM_TIMEOUT) is not None:
        timeout = {"request_timeout_seconds": raw[ROCM_TIMEOUT]}
        layers.append(Layer(requirement=Requirement.parse("rocm"), values=timeout, location=(ROCM_TIMEOUT,)))
    for key, values in (raw.get("overrides") or {}).items():
        layers.append(Layer(requirement=Requirement.parse(key), values=values, location=("overrides", key)))
    return tuple(layers)


def apply_layers(raw: Mapping[str, Any], layers: Sequence[Layer]) -> dict[str, Any]:
    """Merge layers into a config: a later one replaces keys, `env` is merged variable by variable."""
    merged = {key: value for key, value in raw.items() if key not in ("overrides", ROCM_TIMEOUT)}
    for layer in layers:
        before, after = merged.get("env"), layer.values.get("env")
        merged.update(layer.values)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            merged["env"] = {**before, **after}
    return merged


def written_at(key: Location, layers: Sequence[Layer]) -> Location:
    """Find where a file writes a key of the config that these layers were merged into."""
    places = (layer.locate(key) for layer in reversed(layers))
    return next((place for place in places if place is not None), key)
