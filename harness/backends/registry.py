"""Which kinds of engine can be asked: the project's own and those that others register by entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.backends.base import RequestKind
from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.config import ModelConfig
    from harness.servers.endpoint import Engine
    from harness.servers.process import Take

GROUP = "accuracy_gate.backends"
BUILT_IN: Mapping[str, str] = {
    "vllm": "harness.backends.built_in:VLLM",
    "vllm-offline": "harness.backends.built_in:VLLM_OFFLINE",
    "transformers": "harness.backends.built_in:TRANSFORMERS",
    "sglang": "harness.backends.built_in:SGLANG",
    "sglang-offline": "harness.backends.built_in:SGLANG_OFFLINE",
    "openai": "harness.backends.built_in:OPENAI",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run says about how an engine is started, beside the config."""

    log_path: Path
    """Where whatever the engine prints goes."""
    serve_command: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Which GPUs it sees, and where its ports lie."""
    within: float = float("inf")
    """Seconds that a start may take beside the config's own limit."""
    base_url: str | None = None
    """An engine that runs already, for backends that can be attached to one."""
    api_key: str | None = None
    started_ahead: Take | None = None
    """May give a process that waits to be a server, for backends that can use one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendType:
    """One kind of engine: what it can be asked, and how it comes to life."""

    name: str
    kinds: frozenset[RequestKind]
    start: Callable[[ModelConfig, Start], AbstractContextManager[Engine]]
    """Runs the engine until the block is left, or attaches to `Start.base_url`."""
    check: Callable[[ModelConfig, Start], None] = lambda config, start: None
    """Refuses, before anything starts, a config that cannot be run here; raises ConfigError."""
    attaches: bool = False
    """Whether it can ask an engine that somebody else started, at `Start.base_url`."""
    local: bool = True
    """Whether the engine runs on this machine and so takes its GPUs."""
    flags: str | None = None
    """Whose command line `server_args` and `engine` are written in: "vllm", "sglang", or None."""


def names() -> tuple[str, ...]:
    """Name every backend there is, the project's own first."""
    return (*BUILT_IN, *sorted(set(_registered()) - set(BUILT_IN)))


def flags_of(spec: str) -> str | None:
    """Say whose command line a backend's arguments are written in, without loading it where it is our own."""
    if spec in BUILT_IN:
        return {"vllm": "vllm", "vllm-offline": "vllm", "sglang": "sglang", "sglang-offline": "sglang"}.get(spec)
    return build_backend(spec).flags


def build_backend(spec: str) -> BackendType:
    """Find the kind of engine that a config's `backend:` or `--backend` names; it is loaded, not started.

    An entry point of the group `accuracy_gate.backends` names a BackendType, or a function that makes one. Raises
    ConfigError for a name nobody registered, and for a registration that cannot be loaded.
    """
    if spec in BUILT_IN:
        module, _, attribute = BUILT_IN[spec].partition(":")
        built_in: BackendType = getattr(import_module(module), attribute)
        return built_in
    if spec not in _registered():
        raise ConfigError(f"backend {spec}: there is none of that name; known: {', '.join(names())}")
    return _loaded(spec, _registered()[spec])


def _loaded(name: str, point: EntryPoint) -> BackendType:
    try:
        loaded: Any = point.load()
        made = loaded if isinstance(loaded, BackendType) else loaded()
    except Exception as error:
        raise ConfigError(f"backend {name}: {point.value} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(made, BackendType):
        raise ConfigError(f"backend {name}: {point.value} makes {type(made).__name__}, not BackendType")
    return made


@cache
def _registered() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
