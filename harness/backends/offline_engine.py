"""The life of a `vllm.LLM` made from a config: its environment, its log, its start and its certain end."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.backends.engine_processes import KILL_SECONDS, deadline, ended, environment, killed_with_us, printing_to
from harness.backends.llm_arguments import LlmArguments, check_offline, engine_args
from harness.backends.vllm_offline import ENGINE, VllmOfflineBackend, engine_death
from harness.config import ModelConfig
from harness.errors import ConfigError, ServerError, ServerExited, ServerNotReady
from harness.gates.threshold import Gate, Verdict
from harness.redaction import redact_argv, redact_env, secret_values
from harness.servers.diagnosis import likely_cause
from harness.servers.embedded_model import is_embedded, model_folder
from harness.servers.leftovers import Marker, kill_marked
from harness.servers.ports import PortBlock
from harness.servers.server_log import ServerLog
from harness.servers.vllm import cpu_environment, served_model

TAIL_LINES = 40
CONTEXT_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineEngine:
    """An LLM that is ready to be asked."""

    llm: Any
    model: str
    """The name that the config gives it."""
    death: Callable[[], str | None]
    """How its process ended, with the log's tail, or None while it lives."""
    startup_seconds: float | None = None
    """None where somebody else started it."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `LLM.chat` for every conversation."""
    description: Mapping[str, Any] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set once somebody stopped waiting for answers: then nobody has time for a polite end either."""

    def backend(self, config: ModelConfig) -> VllmOfflineBackend:
        """Make what asks it as the config says."""
        return VllmOfflineBackend(
            self.llm,
            model=self.model,
            concurrency=config.max_concurrency,
            timeout=config.request_timeout_seconds,
            chat=self.chat,
            death=self.death,
            cancelled=self.cancelled,
        )

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]:
        """Call each method of `startup_rpc_checks` on all workers; one answers nothing when all is well.

        Raises ServerError where a method cannot be called.
        """
        return tuple(self._check_workers(method) for method in methods)

    def _check_workers(self, method: str) -> Gate:
        try:
            wrong = [str(result) for result in self.llm.collective_rpc(method) if result]
        except Exception as error:
            raise ServerError(f"startup_rpc_checks: {method}: {error}") from error
        message = f"{method}: {'; '.join(dict.fromkeys(wrong)) or 'all workers are well'}"
        verdict = Verdict.REGRESSION if wrong else Verdict.PASS
        return Gate(name=f"startup check {method}", verdict=verdict, message=message)


def given_engine(llm: Any) -> OfflineEngine:
    """Wrap an LLM that somebody else started and will end."""
    return OfflineEngine(
        llm=llm,
        model=str(llm.model_config.model),
        death=lambda: engine_death(llm),
        description={"started_by": "somebody else", "engine": ENGINE},
    )


@contextmanager
def offline_engine(
    config: ModelConfig,
    log_path: Path,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = float("inf"),
) -> Iterator[OfflineEngine]:
    """Run a config's LLM in this process until the block is left, whatever happens in it.

    `env` says which GPUs it sees, and `within` bounds the start in seconds beside the config's own limit. Raises
    ConfigError for what no LLM can be made of, ModelUnavailable for an embedded model that cannot be made, and
    ServerError where the engine does not become ready.
    """
    check_offline(config)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"backend {ENGINE} needs vLLM in this environment: pip install 'accuracy-gate[vllm]'")
    seconds = max(0.0, min(config.startup_max_wait_seconds, within))
    model = str(model_folder(config.model_name)) if is_embedded(config.model_name) else config.model_name
    marker = Marker.new(log_path.parent.name)
    with ExitStack() as stack:
        ports = stack.enter_context(PortBlock.reserve())
        stack.enter_context(killed_with_us(marker))
        stack.enter_context(environment(_variables(config, env, ports, seconds), marker))
        log = ServerLog(log_path, secret_values(os.environ))
        stack.callback(log.redact)
        stack.enter_context(ended(marker))
        began = time.monotonic()
        arguments, llm = _load(config, model, marker, log, seconds)
        cancelled = threading.Event()
        stack.callback(_shut_down, llm, marker, cancelled)
        yield OfflineEngine(
            llm=llm,
            cancelled=cancelled,
            model=served_model(config),
            startup_seconds=time.monotonic() - began,
            chat=arguments.chat,
            death=lambda: _report(config, how, log) if (how := engine_death(llm)) is not None else None,
            description={
                "started_by": "this run",
                "engine": ENGINE,
                "arguments": redact_argv(config.arguments),
                "env": redact_env(config.env),
            },
        )


def _variables(config: ModelConfig, env: Mapping[str, str], ports: PortBlock, seconds: float) -> dict[str, str]:
    return {
        **cpu_environment(),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(seconds))),
        "VLLM_PORT": str(ports.engine_port),
        # A forked engine shows this process's environment in /proc, where the mark is not.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Workers end only when they are told to, for which vLLM waits 5 s: so long that it then kills the engine,
        # and shared memory is left behind.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        **env,
        **config.env,
    }


def _load(config: ModelConfig, model: str, marker: Marker, log: ServerLog, seconds: float) -> tuple[LlmArguments, Any]:
    """Make the LLM; what it and its processes print from now on goes to the log.

    Raises ConfigError for its arguments, ServerExited or ServerNotReady where it does not come up.
    """
    expired = threading.Event()
    try:
        with printing_to(log.path), deadline(seconds, marker, expired):
            arguments = engine_args(config.arguments, model, trust_remote_code=config.trust_remote_code)
            llm = import_module("vllm").LLM(**arguments.llm)
    except ConfigError:
        raise
    except Exception as error:
        how = f"the engine did not start: {type(error).__name__}: {error}"
        if not expired.is_set():
            raise ServerExited(_report(config, how, log)) from error
        raise ServerNotReady(_report(config, f"not ready after {seconds:.1f} s: {how}", log)) from error
    if expired.is_set():
        _shut_down(llm, marker, expired)
        raise ServerNotReady(_report(config, f"the engine was not ready after {seconds:.1f} s", log))
    return arguments, llm


def _report(config: ModelConfig, headline: str, log: ServerLog) -> str:
    tail = "\n".join(log.lines(TAIL_LINES))
    cause = likely_cause(f"{log.text()}\n{headline}")
    lines = [f"{served_model(config)}: {headline}"]
    lines += [f"likely cause: {cause}"] if cause else []
    lines += [f"the end of {log.path}:", tail] if tail else [f"{log.path} is empty"]
    return "\n".join(lines)


def _shut_down(llm: Any, marker: Marker, in_a_hurry: threading.Event) -> None:
    """End the engine's process as vLLM would at the end of this one: politely, and after 5 s not."""
    if in_a_hurry.is_set():
        kill_marked(marker, seconds=KILL_SECONDS)
    core = getattr(llm.llm_engine, "engine_core", None)
    shutdown = getattr(core, "shutdown", None)
    if shutdown is None:
        return
    shutdown()
    context = getattr(core, "ctx", None)
    if context is not None:
        # vLLM leaves its ZeroMQ context to the garbage collector, whose complaint fails whatever test runs then.
        # It ends when its last socket is closed, which another thread of vLLM's is about to do.
        ending = threading.Thread(target=context.term, name="accuracy-gate-zmq-term", daemon=True)
        ending.start()
        ending.join(CONTEXT_SECONDS)
