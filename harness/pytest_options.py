"""The suite's options: how pytest is told, and what a run makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.ahead import Ahead
from harness.backends.cached import CacheMode
from harness.errors import ConfigError
from harness.resuming import find_run
from harness.serving import RunOptions
from harness.standalone import api_key


def add_options(parser: pytest.Parser) -> None:
    """Add the options of the suite, in a group of their own."""
    add = parser.getgroup("accuracy-gate").addoption
    lists = "list of model configs; may be given again (configs/models-small.txt)"
    add("--config-list-file", action="append", metavar="PATH", help=lists)
    add("--configs", metavar="ID,ID", help="run these configs of the lists alone")
    add("--shard", metavar="K/N", help="run the K-th of N parts of about the same length")
    add("--results-dir", type=Path, default=Path("results"), metavar="DIR", help="where run records go (results)")
    add("--backend", metavar="NAME", help="what answers, whatever the configs say: vllm, vllm-offline, transformers, …")
    add("--base-url", metavar="URL", help="ask a server that already runs; nothing is started")
    command = "how servers are started: {model}, {host}, {port}, {args} are filled in"
    add("--serve-command", metavar="LINE", help=command)
    add("--save-baseline", metavar="NAME", help="add each config that passes to the baselines in baselines/NAME")
    add("--cache", choices=[mode.value for mode in CacheMode], help="use the sample cache; off by default")
    add("--resume", metavar="RUN_ID", help="finish an interrupted run of --results-dir from its own samples")
    add("--gpus", metavar="LIST", help="which of the visible GPUs to use: positions or UUIDs")
    add("--require-gpus", action="store_true", help="too few GPUs for a config is a failure, not a skip")
    add("--keep-server", action="store_true", help="leave servers running and say how to reach and stop them")
    ahead = "for how many configs ahead weights are fetched and read into memory; 0 turns it off (1)"
    add("--prefetch", type=int, default=1, metavar="N", help=ahead)
    prestart = "let the next vLLM server pay its imports while the present one is asked"
    add("--prestart", action="store_true", help=prestart)
    add("--data-dir", type=Path, metavar="DIR", help="folder with GSM8K's train.jsonl and test.jsonl")


def options_of(option: Any, *, cwd: Path, suite_root: Path) -> RunOptions:
    """Read the options that hold for all configs.

    Raises ConfigError for what does not fit together, and for a run to be resumed that is not there.
    """
    if option.keep_server and getattr(option, "numprocesses", None):
        raise ConfigError("--keep-server needs one process: leave out -n")
    if option.prefetch < 0:
        raise ConfigError(f"--prefetch {option.prefetch}: so many configs ahead, from 0")
    return RunOptions(
        ahead=Ahead(prefetch=option.prefetch, prestart=option.prestart),
        api_key=api_key(),
        backend=option.backend,
        base_url=option.base_url,
        cache=CacheMode(option.cache) if option.cache else None,
        configs=option.configs,
        data_dir=option.data_dir,
        gpu_choice=option.gpus,
        keep_server=option.keep_server,
        require_gpus=option.require_gpus,
        resume=find_run(cwd / option.results_dir, option.resume) if option.resume else None,
        save_baseline=suite_root / "baselines" / option.save_baseline if option.save_baseline else None,
        serve_command=option.serve_command,
        shard=option.shard,
    )
