"""Where a run takes place: the platform, the GPUs it may use, which configs do not fit, and who gets which."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from harness.config import ModelConfig
from harness.config_lists import ListedConfig
from harness.errors import ConfigError
from harness.gpus.inventory import Gpu, Inventory, target_gpus, visible_environment
from harness.gpus.leases import GpuLeases, Lease
from harness.gpus.shares import check_share
from harness.gpus.tools import discover
from harness.parallelism import read_parallelism
from harness.platforms import Platform, PlatformKind, current_platform, skip_reason
from harness.servers.leftovers import VARIABLE, Marker
from harness.servers.vllm import is_cpu_build

DYING_SECONDS = 10.0
"""A supervisor ends its server within less; one that was left running on purpose is not waited for any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """This machine, as a run may use it."""

    platform: Platform | None = None
    """None where somebody else's server is asked: nothing is known of its machine."""
    gpus: tuple[Gpu, ...] = ()
    counts: bool = False
    """Whether configs must fit into these GPUs."""
    faults: tuple[str, ...] = ()

    def place(self, entry: ListedConfig) -> ListedConfig:
        """Apply a config's overrides, and say why it does not run here where that is so.

        Raises ConfigError where a requirement cannot be decided on this machine, or it cannot keep to its `gpu_share`.
        """
        if self.platform is None:
            return entry
        try:
            config = entry.file.on(self.platform, entry.task)
            skip = skip_reason(self.platform, config.platforms, config.skip)
        except ConfigError as error:
            raise ConfigError(*(f"{entry.path}: {fault}" for fault in error.faults)) from error
        placed = replace(entry, config=config, skip=skip)
        if skip or not self.counts:
            return placed
        placed = replace(placed, unmet=self._unmet(placed))
        if placed.unmet is None:
            self._check_share(placed)
        return placed

    def _check_share(self, entry: ListedConfig) -> None:
        try:
            check_share(entry.config, self.gpus)
        except ConfigError as error:
            raise ConfigError(*(f"{entry.path}: {fault}" for fault in error.faults)) from error

    def _unmet(self, entry: ListedConfig) -> str | None:
        config = entry.config
        elsewhere = read_parallelism(config.arguments).gpus_elsewhere if config.num_gpus is None else 0
        if elsewhere:
            return f"needs {elsewhere} GPUs of other machines: a server over several nodes is not started here"
        if config.gpus <= len(self.gpus):
            return None
        return "; ".join((f"needs {config.gpus} GPUs, {len(self.gpus)} here", *self.faults))


def find_placement(option: str | None, *, serve_command: str | None, found: Inventory | None = None) -> Placement:
    """Look at this machine as a server started so would use it; `option` is --gpus, `found` its GPUs where known.

    Where a template starts servers and no GPU is seen, they may run anywhere, so that none is counted. Raises
    ConfigError for GPUs that are not there.
    """
    found = discover() if found is None else found
    cpu = serve_command is None and is_cpu_build()
    platform = current_platform(os.environ, found.gpus, cpu_build=cpu)
    if platform.kind.counts_gpus:
        targets = target_gpus(option, os.environ, found)
        platform = current_platform(os.environ, found.gpus, targets, cpu_build=cpu)
        return Placement(platform=platform, gpus=targets, counts=True, faults=found.faults)
    if option is not None:
        target_gpus(option, os.environ, found)
    counts = platform.kind is PlatformKind.CPU and not cpu and serve_command is None
    return Placement(platform=platform, counts=counts, faults=found.faults)


def gpus_for(config: ModelConfig, gpus: tuple[Gpu, ...], *, serve_command: str | None) -> tuple[Gpu, ...]:
    """List the GPUs of a run that a config's server can use: none where that is our own vLLM, built for the CPU."""
    own = config.serve_command is None and serve_command is None
    return () if own and is_cpu_build() else gpus


class ServerGpus:
    """The GPUs of one server, from the lease to its end."""

    def __init__(self, config: ModelConfig, candidates: Sequence[Gpu], what: str) -> None:
        """`what` tells others who holds them."""
        self.lease = Lease()
        self.waited = 0.0
        """Seconds."""
        self._config = config
        self._candidates = candidates
        self._what = what
        self._neighbours: dict[tuple[str, float | None], None] = {}
        self._stack = ExitStack()

    @property
    def shared(self) -> bool:
        return self.lease.share is not None

    def take(self, waiting: Callable[[str], None]) -> None:
        """Wait for them; `waiting` is told for whom. Raises ConfigError where the machine has too few."""
        if not self._candidates:
            return
        began = time.monotonic()
        lease = GpuLeases().lease(
            self._candidates,
            count=self._config.gpus,
            share=self._config.gpu_share,
            what=self._what,
            waiting=waiting,
        )
        self.lease = self._stack.enter_context(lease)
        _await_servers_of_dead_runs(visible_environment(self.lease.gpus))
        self.waited = time.monotonic() - began

    def give_back(self) -> None:
        """Let others have them; again costs nothing."""
        self._stack.close()

    def facts(self) -> dict[str, Any]:
        """Say for the record which GPUs they are and who shared them so far; nothing where none was leased."""
        if not self.lease.gpus:
            return {}
        self._look_around()
        return {
            "gpus": [gpu.uuid for gpu in self.lease.gpus],
            "share": self.lease.share,
            "seconds_waited": round(self.waited, 3),
            "neighbours": [{"what": what, "share": share} for what, share in self._neighbours],
        }

    def _look_around(self) -> None:
        if not self.shared:
            return
        (uuid,) = (gpu.uuid for gpu in self.lease.gpus)
        for one in GpuLeases().table():
            granted = one.ticket.granted
            # No other place on this GPU bears the same number.
            if granted is not None and uuid in granted.gpus and granted.place != self.lease.place:
                self._neighbours[one.what, one.ticket.share] = None


def _await_servers_of_dead_runs(visible: Mapping[str, str]) -> None:
    """Wait until nothing is left on these GPUs of runs that were killed: a lease ends before its server does then."""
    deadline = time.monotonic() + DYING_SECONDS
    while any(_dies_on(process, visible) for process in psutil.process_iter()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _dies_on(process: psutil.Process, visible: Mapping[str, str]) -> bool:
    """Whether a process is a server's whose harness is dead, and sees one of the GPUs."""
    try:
        env = process.environ()
        marker = Marker.parse(env.get(VARIABLE, ""))
        if marker is None or marker.harness_lives():
            return False
        # In another container the harness' pid means another process.
        if Path(f"/proc/{process.pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink():
            return False
    except (psutil.Error, OSError):
        return False
    named = [name for name in visible if name.endswith(("_VISIBLE_DEVICES", "_AFFINITY_MASK"))]
    return any(set(env.get(name, "").split(",")) & set(visible[name].split(",")) for name in named)
