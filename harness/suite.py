"""What the pytest suite needs before its first test: configs read and checked, the run folder made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.against_baseline import check_baselines
from harness.backends.llm_arguments import check_offline
from harness.backends.server import root_url
from harness.config import BackendName
from harness.config_lists import ListedConfig, find_list, load_lists
from harness.config_types import check_serve_command
from harness.errors import AccuracyGateError, ConfigError
from harness.gpu_tools import discover
from harness.placement import Placement, find_placement
from harness.records import Row, RunRecord, environment, now
from harness.servers.embedded_model import check_embedded, is_embedded
from harness.servers.vllm import check_command
from harness.serving import RunOptions
from harness.tasks.build import check_own_data

DEFAULT_LIST = "configs/models-small.txt"
EXIT_INFRASTRUCTURE = 75
"""EX_TEMPFAIL of sysexits.h: nothing failed but the machinery, so the same job may succeed when run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The configs of a run and how they are run."""

    lists: tuple[Path, ...]
    listed: tuple[ListedConfig, ...]
    options: RunOptions
    placements: tuple[Placement, ...] = ()
    """This machine, once as our own vLLM uses it and once as what `serve_command` starts does, where both are used."""


def prepare(lists: Sequence[str], *, suite_root: Path, cwd: Path, options: RunOptions, starting: bool) -> Suite:
    """Read and check everything that a run depends on, before anything expensive starts.

    `starting` is false where tests are only collected: then nothing need be installed. Raises ConfigError.
    """
    paths = tuple(find_list(name, suite_root=suite_root, cwd=cwd) for name in lists or [DEFAULT_LIST])
    listed = load_lists(paths)
    _check_options(options)
    placements: tuple[Placement, ...] = ()
    if starting and options.base_url is None:
        listed, placements = _place(listed, options)
        options = replace(options, gpus=max((p.gpus for p in placements), key=len, default=()))
    faults = [fault for entry in listed for fault in _faults(entry, options, starting=starting)]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return Suite(lists=paths, listed=listed, options=options, placements=placements)


def _check_options(options: RunOptions) -> None:
    try:
        if options.base_url is not None:
            root_url(options.base_url)
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}") from error
    try:
        if options.serve_command is not None:
            check_serve_command(options.serve_command)
    except ValueError as error:
        raise ConfigError(f"--serve-command: {error}") from error


def _place(
    listed: Sequence[ListedConfig], options: RunOptions
) -> tuple[tuple[ListedConfig, ...], tuple[Placement, ...]]:
    """Put each config where it runs: our own vLLM may be its CPU build, which leaves the GPUs to other builds."""
    found = discover()
    placements: dict[bool, Placement] = {}
    placed: list[ListedConfig] = []
    for entry in listed:
        template = entry.config.serve_command or options.serve_command
        own = template is None
        if own not in placements:
            placements[own] = find_placement(options.gpu_choice, serve_command=template, found=found)
        placed.append(placements[own].place(entry))
    return tuple(placed), tuple(placements.values())


def _faults(entry: ListedConfig, options: RunOptions, *, starting: bool) -> Sequence[str]:
    try:
        check_own_data(entry.config, folder=entry.path.parent)
        if is_embedded(entry.config.model_name):
            check_embedded(entry.config.model_name, installed=starting and options.base_url is None)
        if starting:
            check_baselines(entry, data_dir=options.data_dir, save_to=options.save_baseline)
        offline = entry.config.backend is BackendName.VLLM_OFFLINE
        if offline:
            check_offline(entry.config)
        if starting and options.base_url is None and entry.skip is None and entry.unmet is None and not offline:
            check_command(entry.config.serve_command or options.serve_command)
        if offline and options.base_url is not None:
            return [f"{entry.path}: backend: vllm-offline asks no server: leave out --base-url"]
    except ConfigError as error:
        return error.faults
    except AccuracyGateError as error:
        return [f"{entry.path}: {error}"]
    return []


class RunInfo:
    """What `run.json` says of the whole run, written at its start and again at its end."""

    def __init__(self, record: RunRecord, suite: Suite) -> None:
        self.record = record
        self.lists = suite.lists
        self._info = {
            "started": now(),
            "finished": None,
            "lists": [str(path) for path in suite.lists],
            "listed": [entry.id for entry in suite.listed],
            "environment": environment(),
            "platform": ", ".join(sorted({str(p.platform) for p in suite.placements})) or "unknown",
            "gpus": [asdict(gpu) for gpu in suite.options.gpus],
        }
        record.write_run(self._info)

    def finish(self, exit_code: int) -> list[Row]:
        return self.record.write_run({**self._info, "finished": now(), "exit_code": exit_code})
