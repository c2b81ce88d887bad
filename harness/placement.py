"""Where a run takes place: the platform, the GPUs it may use, and which configs do not fit there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.config_lists import ListedConfig
from harness.errors import ConfigError
from harness.gpu_tools import discover
from harness.gpus import Gpu, Inventory, target_gpus
from harness.parallelism import read_parallelism
from harness.platforms import Platform, PlatformKind, current_platform, skip_reason
from harness.servers.vllm import is_cpu_build


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

        Raises ConfigError where a requirement cannot be decided on this machine.
        """
        if self.platform is None:
            return entry
        try:
            config = entry.file.on(self.platform, entry.task)
            skip = skip_reason(self.platform, config.platforms, config.skip)
        except ConfigError as error:
            raise ConfigError(*(f"{entry.path}: {fault}" for fault in error.faults)) from error
        placed = replace(entry, config=config, skip=skip)
        return placed if skip or not self.counts else replace(placed, unmet=self._unmet(placed))

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


def chosen_gpus(gpus: Sequence[Gpu], needed: int) -> tuple[Gpu, ...]:
    """Take the first GPUs that a config may use."""
    return tuple(gpus[:needed])
