"""What is done for the configs that follow while one is asked: their weights fetched, one server's imports paid."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from harness.backends.registry import build_backend
from harness.config import ModelConfig
from harness.gpus.inventory import Gpu
from harness.prefetch import GIB, Fetched, Prefetch, Weights, memory_for_cache
from harness.servers.child import Child
from harness.servers.launching import flag_value
from harness.servers.prestart import Prestarted, own_vllm, why_not
from harness.servers.process import ServerSpec
from harness.servers.vllm import base_environment, environment

SPARE_BYTES = 2 * GIB
"""A process past vLLM's imports holds 0.6 GiB on a CPU build; those for CUDA load larger libraries."""


class Ahead:
    """Fetches weights and keeps at most one process ready to be a server; nothing of it can fail a run."""

    def __init__(self, *, prefetch: int = 0, prestart: bool = False) -> None:
        """`prefetch` is how many configs ahead weights are fetched."""
        self._configs_ahead = max(0, prefetch)
        self._prestart = prestart
        self._spare: Prestarted | None = None
        self._fetching: Prefetch | None = None
        self._fetched: list[Fetched] = []
        self._notes: list[str] = []
        self._following: tuple[ModelConfig, ...] = ()
        self._more = False
        self._for_next: Callable[[], None] | None = None

    def follow(self, following: Sequence[ModelConfig], *, more: bool) -> None:
        """Say what comes after the present config, as far as that is known, and whether anything does."""
        self._following, self._more = tuple(following), more

    def ready_for(self, config: ModelConfig, *, serve_command: str | None, gpus: Sequence[Gpu]) -> None:
        """Have a process for a config that is about to wait for its GPUs; where it need not wait that costs nothing."""
        if self._prestart:
            following = self._following[0] if self._following else config
            self._for_next = partial(
                self._have_spare, following, why_not(following, serve_command=serve_command, gpus=gpus)
            )
            self._have_spare(config, why_not(config, serve_command=serve_command, gpus=gpus))

    def asking(self, config: ModelConfig, *, serve_command: str | None, gpus: Sequence[Gpu]) -> None:
        """Prepare what follows, now that a config's server is ready; what is not known is expected to be alike."""
        if self._prestart and self._more:
            self.ready_for(self._following[0] if self._following else config, serve_command=serve_command, gpus=gpus)
        if self._configs_ahead and serve_command is None:
            self._fetch(self._following[: self._configs_ahead])

    def take(self, spec: ServerSpec) -> Child | None:
        """Give the process that waits to a server, where it suits it."""
        spare = self._spare
        if spare is None or not spare.suits(spec.env):
            return None
        self._spare = None
        child = spare.take(spec)
        if spare.note is not None:
            self._notes.append(spare.note)
        # Its imports are over, and so the next one's may begin: longer than the asking, they would be waited for.
        if self._more and self._for_next is not None:
            self._for_next()
        return child

    def await_imports(self, seconds: float) -> bool:
        """Wait until a process is ready to be a server; False where none is by then."""
        return self._spare is not None and self._spare.wait(seconds)

    def facts(self) -> Mapping[str, Any]:
        """Tell, once, what was done and what was not, for the record; empty where there is nothing to tell."""
        fetched, self._fetched = self._fetched, []
        notes, self._notes = self._notes, []
        notes += [f"{each.model}: {each.note}" for each in fetched if each.note is not None]
        read = {each.model: each.read_bytes for each in fetched}
        return {
            **({"read_ahead_bytes": read} if read else {}),
            **({"notes": list(dict.fromkeys(notes))} if notes else {}),
        }

    def stop(self) -> None:
        """End what was started and not used; again costs nothing.

        Raises ServerError where not even SIGKILL ended it.
        """
        self._end_fetching()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()

    def _have_spare(self, config: ModelConfig, reason: str | None) -> None:
        env = environment(config, base_environment(), api_key="", engine_port=0)
        if self._spare is not None and (reason is not None or self._spare.suits(env)):
            return
        free = memory_for_cache()
        if reason is None and free < SPARE_BYTES:
            reason = f"{free / GIB:.1f} GiB of memory may be used"
        command = own_vllm()
        if reason is not None or command is None:
            self._notes.append(f"no server was started ahead: {reason}")
            return
        if self._spare is not None:
            self._spare.discard()
        try:
            self._spare = Prestarted(command, env, run_id="ahead")
        except OSError as error:
            self._notes.append(f"no server was started ahead: {error}")

    def _fetch(self, configs: Sequence[ModelConfig]) -> None:
        self._end_fetching()
        weights = [found for config in configs if (found := weights_of(config)) is not None]
        if not weights:
            return
        try:
            self._fetching = Prefetch(weights, env=configs[0].env)
        except OSError as error:
            self._notes.append(f"nothing was fetched ahead: {error}")

    def _end_fetching(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            self._fetched += fetching.stop()


def weights_of(config: ModelConfig) -> Weights | None:
    """Name what a config's server will load; None where it loads nothing, or nothing of ours, on this machine."""
    if config.serve_command is not None or not build_backend(config.backend).local:
        return None
    revision, folder = (flag_value(config.arguments, flag) for flag in ("--revision", "--download-dir"))
    return Weights(model=config.model_name, revision=revision, download_dir=folder)


def workers() -> int:
    """Return how many processes of pytest-xdist share the list."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def worker() -> int:
    """Return which of them this process is, from 0; 0 as well for one whose user gave it a name of its own."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    return int(number) if number.isdecimal() else 0
