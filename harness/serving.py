"""The server of one config, started when it is first asked for and kept for all of the config's tasks."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from harness.ahead import Ahead
from harness.backends.cached import CacheMode
from harness.backends.registry import Start, build_backend
from harness.config import ModelConfig
from harness.errors import InfrastructureError, ServerExited
from harness.gates.threshold import Gate
from harness.gpus.inventory import Gpu, visible_environment
from harness.gpus.memory import GpuMemory
from harness.gpus.shares import share_arguments
from harness.placement import ServerGpus, gpus_for
from harness.records import write_json
from harness.servers.diagnosis import disturbed_by_neighbours
from harness.servers.endpoint import Endpoint, Engine
from harness.servers.server_log import ServerLog


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line says for all configs of a run."""

    base_url: str | None = None
    """A server that already runs; nothing is started."""
    api_key: str | None = None
    """For `base_url` alone; a server of our own gets a random key."""
    data_dir: Path | None = None
    configs: str | None = None
    """--configs: ids, separated by commas; those alone are run."""
    shard: str | None = None
    """--shard K/N: the K-th of N parts of about the same length."""
    backend: str | None = None
    """--backend: what answers for every config, whatever it says itself."""
    serve_command: str | None = None
    """How servers are started where a config does not say."""
    gpu_choice: str | None = None
    """--gpus: which of the visible GPUs servers may use."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that servers may use."""
    require_gpus: bool = False
    """A config that needs more GPUs than there are fails instead of being skipped."""
    memory: GpuMemory = field(default_factory=GpuMemory)
    save_baseline: Path | None = None
    """A folder of baselines that each config that passes is added to."""
    cache: CacheMode | None = None
    """--cache: what the sample cache may be used for."""
    resume: Path | None = None
    """--resume: the folder of an interrupted run that is finished."""
    keep_server: bool = False
    """Leave the server running at the end, and say how to reach and stop it."""
    ahead: Ahead | None = None
    """What is done for the configs that follow; None where nothing is."""


class Serving:
    """A context manager whose server is started by the first `engine()` and stopped when the context is left."""

    def __init__(
        self, config: ModelConfig, log_path: Path, options: RunOptions, *, given: Engine | None = None
    ) -> None:
        """`given` is an engine that somebody else started and will end."""
        self.rpc_gates: tuple[Gate, ...] = ()
        self.kept: str | None = None
        """How to reach and stop the server that was left running; holds its key, so it belongs on a terminal alone."""
        self._stopping: float | None = None
        self.say: Callable[[str], None] = lambda text: None
        """Told what takes long."""
        self._gpu_memory: dict[str, Mapping[str, int]] = {}
        self._config = config
        self._log_path = log_path
        self._options = options
        candidates = gpus_for(config, options.gpus, serve_command=options.serve_command)
        self._candidates = candidates
        self._gpus = ServerGpus(config, candidates, f"{config.model_name}, {log_path.parent}")
        self._started_again: list[str] = []
        self._deadline = float("inf")
        self._engine: Engine | None = None
        self._fault: InfrastructureError | None = None
        self._given = given
        self._stack = ExitStack()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def gpu_names(self) -> list[str]:
        """The names of the GPUs that the server takes; empty where they are not known."""
        return [gpu.name for gpu in self._gpus.lease.gpus]

    @property
    def gpu_facts(self) -> dict[str, Any]:
        """The lease for the record: GPUs by UUID, share, seconds waited, and who had shares beside it by now."""
        lease = self._gpus.facts()
        return {
            **({"lease": lease} if lease else {}),
            **({"started_again": self._started_again} if self._started_again else {}),
        }

    def engine(self) -> Engine:
        """Start the server, once; a start that failed is not tried again.

        Raises InfrastructureError, the same one each time.
        """
        if self._fault is not None:
            raise self._fault
        if self._engine is None:
            try:
                self._engine = self._start_with_gpus()
                self.rpc_gates = self._engine.check_workers(self._config.startup_rpc_checks)
            except InfrastructureError as error:
                self._fault = error
                raise
        return self._engine

    def seconds_left(self) -> float:
        """Seconds of the config's `max_seconds` that are left; infinite where it has none.

        They run from when the config has its GPUs.
        """
        return self._deadline - time.monotonic()

    def stop(self) -> None:
        """Stop what was started, then let others have its GPUs; again costs nothing.

        Raises ServerError where a process is left that even SIGKILL did not end.
        """
        try:
            self._stop_server()
        finally:
            self._gpus.give_back()

    def _stop_server(self) -> None:
        if self._engine is None or self._given is not None:
            return
        if self._options.base_url is not None:
            self._stack.close()
            return
        began = time.perf_counter()
        server = self._engine if isinstance(self._engine, Endpoint) else None
        if self._options.keep_server and server is not None and server.keep is not None:
            self.kept = f"{server.base_url} serves {server.model}, key {server.api_key}: {server.keep()}"
        self._stack.close()
        if self._stopping is None:
            self._stopping = time.perf_counter() - began
            gpus = self._gpus.lease.gpus
            memory = self._options.memory
            alone = self.kept is None and not self._gpus.shared
            self._gpu_memory["after"] = memory.settled(gpus) if alone else memory.used(gpus)
            self._write_record(self._engine)

    def _write_record(self, engine: Engine) -> None:
        ahead = self._options.ahead.facts() if self._options.ahead is not None else {}
        facts = {
            **engine.description,
            **self.gpu_facts,
            **({"ahead": ahead} if ahead else {}),
            "startup_seconds": engine.startup_seconds,
            "stopping_seconds": self._stopping,
            "gpu_memory_bytes": self._gpu_memory,
        }
        write_json(self._log_path.with_name("server.json"), facts)

    def _start_with_gpus(self) -> Engine:
        """Start on GPUs of its own, which are given back at once where that fails."""
        config, options = self._config, self._options
        local = self._given is None and options.base_url is None and build_backend(config.backend).local
        try:
            if local:
                if options.ahead is not None:
                    options.ahead.ready_for(config, serve_command=options.serve_command, gpus=self._candidates)
                self._take_gpus()
            if config.max_seconds is not None:
                self._deadline = time.monotonic() + config.max_seconds
            if self._given is not None:
                return self._given
            if local:
                gpus = self._gpus.lease.gpus
                self._gpu_memory["before"] = (options.memory.used if self._gpus.shared else options.memory.ready)(gpus)
            engine = self._described(self._start())
            if local and options.ahead is not None:
                options.ahead.asking(config, serve_command=options.serve_command, gpus=self._candidates)
            return engine
        except BaseException:
            self._stack.close()
            self._gpus.give_back()
            raise

    def _start(self) -> Engine:
        config, options, lease = self._config, self._options, self._gpus.lease
        if lease.share is not None:
            added = shlex.join(share_arguments(config, lease.share, lease.gpus[0]))
            config = config.model_copy(update={"server_args": f"{config.server_args} {added}".strip()})
        kind = build_backend(config.backend)
        start = Start(
            log_path=self._log_path,
            serve_command=options.serve_command,
            env=visible_environment(lease.gpus),
            within=self.seconds_left(),
            base_url=options.base_url,
            api_key=options.api_key,
            started_ahead=options.ahead.take if options.ahead is not None else None,
        )
        log = ServerLog(self._log_path, ())
        try:
            return self._stack.enter_context(kind.start(config, start))
        except ServerExited:
            disturbed = disturbed_by_neighbours(log.text()) if self._gpus.shared else None
            if disturbed is None:
                raise
        self._started_again.append(disturbed)
        self._note(f"started again: {disturbed}")
        return self._stack.enter_context(kind.start(config, replace(start, within=self.seconds_left())))

    def _described(self, engine: Engine) -> Engine:
        """Add the lease to what every task's record holds about the engine, where it is one of our records."""
        facts = self.gpu_facts
        if not facts or not is_dataclass(engine):
            return engine
        described: Engine = replace(engine, description={**engine.description, **facts})
        return described

    def _take_gpus(self) -> None:
        waits = False

        def waiting(whom: str) -> None:
            nonlocal waits
            waits = True
            self.say(f"waiting for GPUs: {whom}")
            self._note(f"waiting for GPUs: {whom}")

        self._gpus.take(waiting)
        if waits:
            self.say("starting")

    def _note(self, text: str) -> None:
        """Write into the server's log, the one file that people look at while nothing seems to happen."""
        with suppress(OSError):
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("a", encoding="utf-8") as log:
                log.write(f"accuracy-gate: {text}\n")
