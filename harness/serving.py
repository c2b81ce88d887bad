"""The server of one config, started when it is first asked for and kept for all of the config's tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.backends.offline_engine import offline_engine
from harness.backends.server import root_url
from harness.config import BackendName, ModelConfig
from harness.errors import InfrastructureError
from harness.gates.threshold import Gate
from harness.gpu_memory import GpuMemory
from harness.gpus import Gpu, visible_environment
from harness.placement import chosen_gpus
from harness.records import write_json
from harness.servers.endpoint import Endpoint, Engine
from harness.servers.vllm import revision, served_model, vllm_server


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line says for all configs of a run."""

    base_url: str | None = None
    """A server that already runs; nothing is started."""
    api_key: str | None = None
    """For `base_url` alone; a server of our own gets a random key."""
    data_dir: Path | None = None
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
    keep_server: bool = False
    """Leave the server running at the end, and say how to reach and stop it."""


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
        self._gpu_memory: dict[str, Mapping[str, int]] = {}
        self._config = config
        self._log_path = log_path
        self._options = options
        self._gpus = chosen_gpus(options.gpus, config.gpus)
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
        return [gpu.name for gpu in self._gpus]

    def engine(self) -> Engine:
        """Start the server, once; a start that failed is not tried again.

        Raises InfrastructureError, the same one each time.
        """
        if self._fault is not None:
            raise self._fault
        if self._engine is None:
            try:
                self._engine = self._start()
                self.rpc_gates = self._engine.check_workers(self._config.startup_rpc_checks)
            except InfrastructureError as error:
                self._fault = error
                raise
        return self._engine

    def seconds_left(self) -> float:
        """Seconds of the config's `max_seconds` that are left; infinite where it has none."""
        return self._deadline - time.monotonic()

    def stop(self) -> None:
        """Stop what was started; again costs nothing.

        Raises ServerError where a process is left that even SIGKILL did not end.
        """
        if self._engine is None or self._given is not None or self._options.base_url is not None:
            return
        began = time.perf_counter()
        server = self._engine if isinstance(self._engine, Endpoint) else None
        if self._options.keep_server and server is not None and server.keep is not None:
            self.kept = f"{server.base_url} serves {server.model}, key {server.api_key}: {server.keep()}"
        self._stack.close()
        if self._stopping is None:
            self._stopping = time.perf_counter() - began
            self._gpu_memory["after"] = self._options.memory.used(self._gpus)
            self._write_record(self._engine)

    def _write_record(self, engine: Engine) -> None:
        facts = {
            **engine.description,
            "startup_seconds": engine.startup_seconds,
            "stopping_seconds": self._stopping,
            "gpu_memory_bytes": self._gpu_memory,
        }
        write_json(self._log_path.with_name("server.json"), facts)

    def _start(self) -> Engine:
        config, options = self._config, self._options
        if config.max_seconds is not None:
            self._deadline = time.monotonic() + config.max_seconds
        if self._given is not None:
            return self._given
        if options.base_url is not None:
            root = root_url(options.base_url)
            described: dict[str, Any] = {"base_url": root, "started_by": "somebody else", "revision": revision(config)}
            return Endpoint(base_url=root, model=served_model(config), api_key=options.api_key, description=described)
        self._gpu_memory["before"] = options.memory.ready(self._gpus)
        visible = visible_environment(self._gpus) if options.gpu_choice is not None else {}
        if config.backend is BackendName.VLLM_OFFLINE:
            offline = offline_engine(config, self._log_path, env=visible, within=self.seconds_left())
            return self._stack.enter_context(offline)
        return self._stack.enter_context(
            vllm_server(
                config,
                self._log_path,
                serve_command=options.serve_command,
                env=visible,
                within=self.seconds_left(),
            )
        )
