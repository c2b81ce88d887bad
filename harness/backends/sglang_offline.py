"""The life of an `sglang.Engine` made from a config: its environment, its log, its start and its certain end.

Written to SGLang 0.5.16, whose engine's replies were recorded; not run against the package itself.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

import psutil

from harness.backends.engine_loop import EngineLoop
from harness.backends.engine_processes import deadline, ended, environment, killed_with_us, printing_to
from harness.backends.sglang_asking import ENGINE, SglangOfflineBackend
from harness.config import ModelConfig
from harness.errors import ConfigError, ServerError, ServerExited, ServerNotReady
from harness.gates.threshold import Gate
from harness.redaction import redact_argv, redact_env, secret_values
from harness.servers.diagnosis import likely_cause
from harness.servers.launching import flag_value, model_path, revision, served_model
from harness.servers.leftovers import Marker
from harness.servers.ports import PortBlock
from harness.servers.server_log import ServerLog

TAIL_LINES = 40
FOR_CHAT_SERVERS = ("--chat-template", "--reasoning-parser", "--tool-call-parser")
"""Flags that only SGLang's server acts on, and whose loss would change the answers of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOfflineEngine:
    """An engine that is ready to be asked."""

    engine: Any
    loop: EngineLoop
    model: str
    """The name that the config gives it."""
    death: Callable[[], str | None]
    """How its processes ended, with the log's tail, or None while they live."""
    version: str = "unknown"
    startup_seconds: float | None = None
    description: Mapping[str, Any] = field(default_factory=dict)

    def backend(self, config: ModelConfig) -> SglangOfflineBackend:
        """Make what asks it as the config says."""
        return SglangOfflineBackend(
            self.engine,
            self.loop,
            model=self.model,
            version=self.version,
            concurrency=config.max_concurrency,
            timeout=config.request_timeout_seconds,
            death=self.death,
        )

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]:
        """Call nothing; raises ServerError where a method is named, for SGLang's workers cannot be asked."""
        if methods:
            raise ServerError(f"startup_rpc_checks: {methods[0]}: SGLang's workers have none: use backend vllm")
        return ()


def check_sglang_offline(config: ModelConfig) -> None:
    """Check, without loading SGLang, that a config can be asked without a server.

    Raises ConfigError.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(f"backend {ENGINE}: there is no sglang in {sys.executable}: pip install sglang")
    for flag in FOR_CHAT_SERVERS if config.use_chat_completions or config.task == "checks" else ():
        if flag_value(config.arguments, flag) is not None:
            raise ConfigError(f"server_args: {flag} has no meaning for backend {ENGINE}: use backend sglang")


@contextmanager
def sglang_engine(
    config: ModelConfig,
    log_path: Path,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = float("inf"),
) -> Iterator[SglangOfflineEngine]:
    """Run a config's engine in this process until the block is left, whatever happens in it.

    `env` says which GPUs it sees, and `within` bounds the start in seconds beside the config's own limit. Raises
    ConfigError for what no engine can be made of, ModelUnavailable for an embedded model that cannot be made, and
    ServerError where the engine does not become ready.
    """
    check_sglang_offline(config)
    seconds = max(0.0, min(config.startup_max_wait_seconds, within))
    model, variables = model_path(config), {**env, **config.env}
    marker, failed = Marker.new(log_path.parent.name), threading.Event()
    with ExitStack() as stack:
        ports = stack.enter_context(PortBlock.reserve())
        stack.enter_context(killed_with_us(marker))
        stack.enter_context(environment(variables, marker))
        log = ServerLog(log_path, secret_values(variables))
        stack.callback(log.redact)
        stack.enter_context(failures_noted(failed))
        loop = stack.enter_context(EngineLoop())
        stack.enter_context(ended(marker))
        began = time.monotonic()
        engine = _load(config, arguments(config, model, ports), loop, marker, log, seconds)
        stack.callback(_let_go, engine)
        yield SglangOfflineEngine(
            engine=engine,
            loop=loop,
            model=served_model(config),
            version=str(getattr(sys.modules.get("sglang"), "__version__", "unknown")),
            startup_seconds=time.monotonic() - began,
            death=lambda: _report(config, how, log) if (how := engine_death(engine, failed)) is not None else None,
            description={
                "started_by": "this run",
                "engine": ENGINE,
                "arguments": redact_argv(config.arguments),
                "env": redact_env(config.env),
                "revision": revision(config),
            },
        )


def arguments(config: ModelConfig, model: str, ports: PortBlock) -> list[str]:
    """Write what `sglang.launch_server` would be told, but for the HTTP side."""
    words = ["--model-path", model, *config.arguments]
    if config.trust_remote_code:
        words.append("--trust-remote-code")
    if flag_value(config.arguments, "--nccl-port") is None:
        words += ["--nccl-port", str(ports.engine_port)]
    return words


def server_args(words: Sequence[str]) -> Any:
    """Read arguments with SGLang's own parser, so that every flag keeps its meaning.

    Imports SGLang. Raises ConfigError for what its server would not have taken.
    """
    kind = import_module("sglang.srt.server_args").ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"server_args: {message}")

    parser = Parser(prog="sglang.launch_server", add_help=False)
    kind.add_cli_args(parser)
    try:
        return kind.from_cli_args(parser.parse_args(list(words)))
    except (ValueError, TypeError, AssertionError, SystemExit) as error:
        raise ConfigError(f"server_args: {error}") from error


def _load(
    config: ModelConfig, words: Sequence[str], loop: EngineLoop, marker: Marker, log: ServerLog, seconds: float
) -> Any:
    """Make the engine; what it and its processes print from now on goes to the log.

    Raises ConfigError for its arguments, ServerExited or ServerNotReady where it does not come up.
    """
    expired = threading.Event()
    try:
        with printing_to(log.path), deadline(seconds, marker, expired):
            engine = loop.do(lambda: import_module("sglang").Engine(server_args=server_args(words)))
    except ConfigError:
        raise
    except Exception as error:
        how = f"the engine did not start: {type(error).__name__}: {error}"
        if not expired.is_set():
            raise ServerExited(_report(config, how, log)) from error
        raise ServerNotReady(_report(config, f"not ready after {seconds:.1f} s: {how}", log)) from error
    if expired.is_set():
        _let_go(engine)
        raise ServerNotReady(_report(config, f"the engine was not ready after {seconds:.1f} s", log))
    return engine


def _let_go(engine: Any) -> None:
    """Keep SGLang from acting on its processes' end, which is our own doing.

    Its `shutdown` would kill every child of this process, be it the engine's or not, and its watchdog would send
    this process SIGQUIT.
    """
    atexit.unregister(engine.shutdown)
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()


@contextmanager
def failures_noted(failed: threading.Event) -> Iterator[None]:
    """Note SIGQUIT, which the engine's processes send this one when they fail: it would end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        failed.set()

    before = signal.signal(signal.SIGQUIT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)


def engine_death(engine: Any, failed: threading.Event) -> str | None:
    """Say that an engine's processes failed or are gone; None while they live."""
    if failed.is_set():
        return "a process of the engine failed"
    pids = engine.get_all_child_pids() if hasattr(engine, "get_all_child_pids") else []
    gone = [pid for pid in pids if not _runs(pid)]
    return f"process {gone[0]} of the engine is gone" if gone else None


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _report(config: ModelConfig, headline: str, log: ServerLog) -> str:
    tail = "\n".join(log.lines(TAIL_LINES))
    cause = likely_cause(f"{log.text()}\n{headline}")
    lines = [f"{served_model(config)}: {headline}"]
    lines += [f"likely cause: {cause}"] if cause else []
    lines += [f"the end of {log.path}:", tail] if tail else [f"{log.path} is empty"]
    return "\n".join(lines)
