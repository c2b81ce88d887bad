"""`accuracy-gate run`: configs one after the other on this machine, or side by side on a Ray cluster."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import IO

from harness.against_baseline import check_baselines
from harness.commands import ROOT, positive
from harness.errors import AccuracyGateError, ConfigError
from harness.gates.threshold import Verdict
from harness.history import runs_before, update
from harness.on_ray.jobs import refuse_several_nodes
from harness.on_ray.runner import RayOutcome, RaySettings, ray_module, run_on_ray
from harness.records import Row, RunRecord
from harness.reports import github
from harness.reports.documents import read_run
from harness.reports.page import write_page
from harness.reports.terminal import run_lines
from harness.reports.untrusted import escaped
from harness.reports.write import publish
from harness.serving import RunOptions
from harness.suite import EXIT_INFRASTRUCTURE, RunInfo, Suite, prepare

SUITE_FILE = ROOT / "tests" / "test_accuracy.py"
EXIT_INTERRUPTED = 2
"""As pytest says it."""
WIDTH = 100
say = partial(print, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate run` takes."""
    add = parser.add_argument
    add("lists", nargs="+", metavar="LIST", help="a list of configs, found as --config-list-file finds it")
    add("--on", choices=["local", "ray"], required=True, help="this machine, through pytest, or a Ray cluster")
    add("--address", metavar="HOST:PORT", help="ray: the cluster ($RAY_ADDRESS, or the one this machine is in)")
    add("--cpus", type=positive, default=1.0, metavar="N", help="ray: CPUs that each server takes (%(default)g)")
    add("--results-dir", type=Path, default=Path("results"), metavar="DIR", help="(%(default)s)")
    add("--backend", metavar="NAME", help="what answers, whatever the configs say")
    add("--serve-command", metavar="LINE", help="how servers are started")
    add("--data-dir", type=Path, metavar="DIR", help="folder with GSM8K's train.jsonl and test.jsonl")
    add("--require-gpus", action="store_true", help="too few GPUs for a config is a failure, not a skip")


def run(arguments: argparse.Namespace) -> int:
    """Run, print one line for each change of a config's state, then the report.

    0 where all passed, 1 where a model got worse, 2 after an interruption, 75 for an outage alone. Raises ConfigError,
    before anything starts, InfrastructureError where there is no cluster.
    """
    if arguments.on == "local":
        if arguments.address is not None:
            raise ConfigError("--address: goes with --on ray")
        sys.stdout.flush()
        # In this process' place: a parent would have signals to hand on, and its own Ctrl-C kills the child too soon.
        os.execv(sys.executable, _pytest_command(arguments))
    return _run_on_ray(arguments)


def _pytest_command(arguments: argparse.Namespace) -> list[str]:
    options = {
        "--results-dir": arguments.results_dir.absolute(),
        "--backend": arguments.backend,
        "--serve-command": arguments.serve_command,
        "--data-dir": arguments.data_dir.absolute() if arguments.data_dir else None,
    }
    return [
        sys.executable,
        "-m",
        "pytest",
        str(SUITE_FILE),
        f"--rootdir={ROOT}",
        *(f"--config-list-file={name}" for name in arguments.lists),
        *(f"{name}={value}" for name, value in options.items() if value is not None),
        *(["--require-gpus"] if arguments.require_gpus else []),
    ]


def _run_on_ray(arguments: argparse.Namespace) -> int:
    ray_version = str(ray_module().__version__)
    suite = _prepared(arguments)
    record = RunRecord.create(arguments.results_dir.absolute())
    info = RunInfo(record, suite)
    settings = RaySettings(address=arguments.address, cpus=arguments.cpus)
    outcome = RayOutcome(faults=["the run broke off"])
    out = sys.stdout
    say(f"accuracy-gate: {', '.join(map(str, suite.lists))}; record: {record.folder}")
    try:
        # Ray prints what its nodes complain of: beside our lines, not among them.
        with redirect_stdout(sys.stderr):
            outcome = run_on_ray(suite.listed, record, suite.options, settings, partial(_say_state, out))
    finally:
        info.facts["platform"] = ", ".join(sorted(outcome.platforms)) or "unknown"
        info.facts["gpus"] = outcome.gpus
        info.facts["ray"] = {"version": ray_version, "address": arguments.address, "faults": outcome.faults}
        code = _exit_code(record.rows(), outcome)
        info.finish(code, outcome.skipped)
    _report(record.folder, outcome)
    return code


def _prepared(arguments: argparse.Namespace) -> Suite:
    """Read and check what the driver can; GPUs and platforms are those of the nodes, and checked there."""
    options = RunOptions(
        backend=arguments.backend,
        serve_command=arguments.serve_command,
        data_dir=arguments.data_dir.absolute() if arguments.data_dir else None,
        require_gpus=arguments.require_gpus,
    )
    suite = prepare(arguments.lists, suite_root=ROOT, cwd=Path.cwd(), options=options, starting=False)
    refuse_several_nodes(suite.listed)
    faults: list[str] = []
    for entry in suite.listed:
        try:
            check_baselines(entry, data_dir=options.data_dir, save_to=None)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return suite


def _say_state(out: IO[str], config_id: str, text: str) -> None:
    say(f"{escaped(config_id)}: {escaped(text)}", file=out)


def _exit_code(rows: Sequence[Row], outcome: RayOutcome) -> int:
    verdicts = {row.verdict for row in rows}
    if outcome.interrupted is not None:
        return EXIT_INTERRUPTED
    if Verdict.REGRESSION in verdicts:
        return 1
    return EXIT_INFRASTRUCTURE if Verdict.INFRASTRUCTURE in verdicts or outcome.faults else 0


def _report(folder: Path, outcome: RayOutcome) -> None:
    """Print and write what the pytest suite does at its end."""
    warnings = list(outcome.faults)
    try:
        document = read_run(folder)
        for line in run_lines(document, columns=shutil.get_terminal_size((WIDTH, 24)).columns):
            say(github.defused_here(line))
        warnings += publish(document, folder, os.environ)
        if outcome.interrupted is None:  # else there are seconds left, and the record is whole
            update(folder.parent)
            write_page(folder, history=runs_before(folder))
        if github.on_github(os.environ):
            for line in (*github.log_groups(document), *github.commands(document, os.environ)):
                say(line)
    except (AccuracyGateError, OSError) as error:
        warnings.append(f"no report: {error}")
    for warning in warnings:
        say(f"WARNING: {escaped(warning)}")
    say(f"record: {folder}")
