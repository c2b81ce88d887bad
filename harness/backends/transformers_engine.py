"""The life of a transformers model made from a config: found, loaded, asked and taken out of memory again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.backends.batch_work import BatchSettings
from harness.backends.causal_model import CausalModel
from harness.backends.device_memory import release_memory
from harness.backends.engine_processes import printing_to
from harness.backends.optional_packages import without_misfits
from harness.backends.process_shares import join_launched, launched_several
from harness.backends.transformers import ENGINE, TransformersBackend
from harness.config import ModelConfig
from harness.errors import ConfigError, ServerError, ServerExited, ServerNotReady
from harness.gates.threshold import Gate
from harness.own_environment import changed_environment
from harness.redaction import redact_env, secret_values
from harness.servers.diagnosis import likely_cause
from harness.servers.embedded_model import is_embedded, model_folder
from harness.servers.server_log import ServerLog

TAIL_LINES = 40
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine:
    """A model that is ready to be asked."""

    causal: CausalModel
    model: str
    settings: BatchSettings
    startup_seconds: float | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """What it died of."""

    @property
    def death(self) -> Callable[[], str | None]:
        return lambda: next(iter(self.faults), None)

    def backend(self, config: ModelConfig) -> TransformersBackend:
        """Make what asks it."""
        details = {name: self.description[name] for name in ("left_out",) if name in self.description}
        return TransformersBackend(
            self.causal, model=self.model, settings=self.settings, details=details, faults=self.faults
        )

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]:
        """Raise ServerError where methods are to be called: there are no workers."""
        if methods:
            raise ServerError(f"startup_rpc_checks: backend {ENGINE} has no workers to call {methods[0]} on")
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loading:
    """How a model comes into memory."""

    source: str
    arguments: Mapping[str, Any]
    trust_remote_code: bool
    revision: str | None
    device: str | None
    """None where `device_map` says."""

    def load(self) -> tuple[Any, Any]:
        """Return model and tokenizer."""
        # Not as a from-import: transformers makes its names when they are asked for, and says why it cannot.
        transformers = import_module("transformers")
        hub = {"trust_remote_code": self.trust_remote_code, "revision": self.revision}
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.source, **hub)
        model = transformers.AutoModelForCausalLM.from_pretrained(self.source, **hub, **self.arguments)
        return (model if self.device is None else model.to(self.device)), tokenizer


@contextmanager
def transformers_engine(
    config: ModelConfig,
    log_path: Path,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = float("inf"),
    dtype: str = "auto",
    device: str | None = None,
    device_map: Any = None,
    revision: str | None = None,
    max_model_len: int | None = None,
    batch_size: int | None = None,
    compile: bool | str = False,
    seed: int | None = None,
    trust_remote_code: bool | None = None,
    from_pretrained: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[TransformersEngine]:
    """Load a config's model into this process until the block is left.

    `env` says which GPUs it may use, `within` bounds the loading in seconds beside the config's own limit, and
    `from_pretrained` holds further keywords of that. `device_map` spreads the model over all GPUs ("auto"); `compile`
    is True or a backend of torch.compile. Raises ConfigError for what cannot be loaded here, ModelUnavailable for an
    embedded model that cannot be made, and ServerError where the model does not come up.
    """
    seconds = max(0.0, min(config.startup_max_wait_seconds, within))
    log = ServerLog(_own(log_path), secret_values({**os.environ, **config.env}))
    began = time.monotonic()
    with changed_environment(config.env):
        place = None if device_map is not None else device or _device(env)
        loading = _Loading(
            source=str(model_folder(config.model_name)) if is_embedded(config.model_name) else config.model_name,
            arguments={
                "dtype": dtype,
                **({"device_map": device_map, "max_memory": _memory(env)} if device_map is not None else {}),
                **from_pretrained,
            },
            trust_remote_code=config.trust_remote_code if trust_remote_code is None else trust_remote_code,
            revision=revision,
            device=place,
        )
        try:
            causal, left_out = _loaded(config, loading, log, max_model_len)
            took = time.monotonic() - began
            try:
                if took > seconds:
                    raise ServerNotReady(
                        _report(config, f"the model took {took:.1f} s to load, allowed {seconds:.1f}", log)
                    )
                yield TransformersEngine(
                    causal=causal,
                    model=config.model_name,
                    settings=BatchSettings(batch_size=batch_size, compile=compile, seed=seed),
                    startup_seconds=took,
                    description=_description(config, loading, causal, left_out),
                )
            finally:
                causal.release()
        finally:
            release_memory()
            log.redact()


def _description(
    config: ModelConfig, loading: _Loading, causal: CausalModel, left_out: Sequence[str]
) -> dict[str, Any]:
    return {
        "started_by": "this run",
        "engine": ENGINE,
        "arguments": {name: str(value) for name, value in loading.arguments.items()},
        "device": str(causal.device),
        "revision": loading.revision or "unknown",
        "left_out": list(left_out),
        "env": redact_env(config.env),
    }


def _loaded(
    config: ModelConfig, loading: _Loading, log: ServerLog, max_model_len: int | None
) -> tuple[CausalModel, tuple[str, ...]]:
    """Load; what transformers prints meanwhile goes to the log."""
    try:
        with printing_to(log.path):
            (model, tokenizer), left_out = without_misfits(loading.load)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in {"torch", "transformers"}:
            remedy = "pip install 'accuracy-gate[transformers]'"
            raise ConfigError(f"backend {ENGINE} needs {error.name} in this environment: {remedy}") from error
        said = "\n".join([f"the model did not load: {type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        raise ServerExited(_report(config, said, log)) from error
    return CausalModel(model, tokenizer, max_model_len=max_model_len), left_out


def _own(path: Path) -> Path:
    """Give each of several processes its own log; the main one's bears the name that was asked for."""
    rank = os.environ.get("RANK", "0") if launched_several() else "0"
    return path if rank == "0" else path.with_name(f"{path.stem}.{rank}{path.suffix}")


def _report(config: ModelConfig, headline: str, log: ServerLog) -> str:
    tail = "\n".join(log.lines(TAIL_LINES))
    cause = likely_cause(f"{log.text()}\n{headline}")
    lines = [f"{config.model_name}: {headline}"]
    lines += [f"likely cause: {cause}"] if cause else []
    lines += [f"the end of {log.path}:", tail] if tail else []
    return "\n".join(lines)


def _device(env: Mapping[str, str]) -> str:
    """Choose where the model goes: this process's GPU of several, the first that the config was given, or the CPU."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    if launched_several():
        join_launched()
        return f"{kind.type}:{os.environ.get('LOCAL_RANK', '0')}"
    return f"{kind.type}:{_places(env)[0]}"


def _memory(env: Mapping[str, str]) -> dict[int | str, int] | None:
    """Say how much a model that is spread out may take of the GPUs that the config was given."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {place: torch.cuda.mem_get_info(place)[0] for place in _places(env)}


def _places(env: Mapping[str, str]) -> list[int]:
    """Find the GPUs that `env` names among those that this process sees, where they are counted from 0.

    CUDA reads its variable once in a process's life, so that setting it for each config would do nothing.
    """
    import torch

    name = next((each for each in VISIBLE if each in env), None)
    count = torch.accelerator.device_count()
    if name is None:
        return list(range(count))
    seen = [each for each in os.environ.get(name, "").split(",") if each] or [str(place) for place in range(count)]
    wanted = [seen.index(each) for each in env[name].split(",") if each in seen]
    if not wanted or max(wanted) >= count:
        raise ConfigError(
            f"{name}={env[name]}: this process sees {','.join(seen)}: start it with all GPUs it is to use"
        )
    return wanted
