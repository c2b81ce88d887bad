"""What the pytest suite needs before its first test: configs read and checked, the run folder made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.against_baseline import check_baselines
from harness.backends.cached import check_cacheable
from harness.backends.registry import Start, build_backend
from harness.backends.server import root_url
from harness.config_lists import ListedConfig, find_list, load_lists
from harness.config_types import check_serve_command
from harness.errors import AccuracyGateError, ConfigError
from harness.gpus.tools import discover
from harness.listing import chosen, parse_shard, shard_of
from harness.placement import Placement, find_placement
from harness.records import Row, RunRecord, environment, now
from harness.reports.pointers import options_given, places
from harness.servers.embedded_model import check_embedded, is_embedded
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
    listed = _selected(load_lists(paths), options)
    _check_options(options)
    if options.backend is not None:
        listed = tuple(_answered_by(options.backend, entry) for entry in listed)
    placements: tuple[Placement, ...] = ()
    if starting and options.base_url is None:
        listed, placements = _place(listed, options)
        options = replace(options, gpus=max((p.gpus for p in placements), key=len, default=()))
    faults = [fault for entry in listed for fault in _faults(entry, options, starting=starting)]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return Suite(lists=paths, listed=listed, options=options, placements=placements)


def _selected(listed: tuple[ListedConfig, ...], options: RunOptions) -> tuple[ListedConfig, ...]:
    if options.configs is not None and options.shard is not None:
        raise ConfigError("--configs and --shard both choose configs: give one")
    if options.configs is not None:
        return chosen(listed, options.configs)
    return shard_of(listed, *parse_shard(options.shard)) if options.shard is not None else listed


def _answered_by(backend: str, entry: ListedConfig) -> ListedConfig:
    file = replace(entry.file, raw={**entry.file.raw, "backend": backend})
    try:
        return replace(entry, file=file, config=file.on(None, entry.task))
    except ConfigError as error:
        raise ConfigError(*(f"--backend {backend}: {fault}" for fault in error.faults)) from error


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
        if options.cache is not None:
            check_cacheable(entry.config, options.cache, saves_baseline=options.save_baseline is not None)
        if starting:
            check_baselines(entry, data_dir=options.data_dir, save_to=options.save_baseline)
        _check_backend(entry, options, starting=starting)
    except ConfigError as error:
        return error.faults
    except AccuracyGateError as error:
        return [f"{entry.path}: {error}"]
    return []


def _check_backend(entry: ListedConfig, options: RunOptions, *, starting: bool) -> None:
    config = entry.config
    kind = build_backend(config.backend)
    if options.base_url is not None and not kind.attaches:
        raise ConfigError(f"{entry.path}: backend: {kind.name} asks no server: leave out --base-url")
    if starting and entry.runs:
        start = Start(
            log_path=Path(),
            serve_command=options.serve_command,
            base_url=options.base_url,
            api_key=options.api_key,
        )
        kind.check(config, start)


class RunInfo:
    """What `run.json` says of the whole run, written at its start and again at its end."""

    def __init__(self, record: RunRecord, suite: Suite) -> None:
        self.record = record
        self.suite = suite
        self.facts: dict[str, Any] = {
            "started": now(),
            "finished": None,
            "lists": [str(path) for path in suite.lists],
            "listed": [entry.id for entry in suite.listed],
            "environment": environment(),
            "platform": ", ".join(sorted({str(p.platform) for p in suite.placements})) or "unknown",
            "gpus": [asdict(gpu) for gpu in suite.options.gpus],
            "options": options_given(suite.options),
            "written_at": {entry.id: places(entry) for entry in suite.listed},
        }
        record.write_run(self.facts)

    def finish(self, exit_code: int, skipped: Mapping[str, str]) -> list[Row]:
        """Write `run.json` for the last time; `skipped` says why configs did not run, by id."""
        ended = {"finished": now(), "exit_code": exit_code, "skipped": dict(skipped)}
        return self.record.write_run({**self.facts, **ended})
