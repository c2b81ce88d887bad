"""`accuracy-gate merge`: the run folders of all shards as one run, with one report and one exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands import ROOT
from harness.commands.report_command import render
from harness.config_lists import find_list, load_lists
from harness.errors import ConfigError
from harness.merging import Expected, find_runs, merge, read_part, read_plan, write_merged
from harness.records import RunRecord
from harness.reports.documents import read_run
from harness.reports.terminal import run_lines
from harness.reports.untrusted import escaped
from harness.reports.write import publish


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate merge` takes."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one with runs anywhere in it"
    )
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="LIST",
        help="the list, or the plan of `accuracy-gate list --plan`: a config of it that never reported is an outage",
    )
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="for the merged run (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Merge, print, and report, to CI too; 1 where a model got worse, 75 where something is missing or out, else 0.

    Raises ConfigError for paths, lists or versions that make no sense, before anything is written.
    """
    expected = _expected(arguments.expect)
    folders = find_runs(arguments.runs)
    if not folders and expected is None:
        raise ConfigError(f"{', '.join(map(str, arguments.runs))}: no run.json in it or below: is it a run's folder?")
    merged = merge([read_part(folder) for folder in folders], expected)
    record = RunRecord.create(arguments.results_dir)
    write_merged(merged, record)
    reports = render(record.folder)
    document = read_run(record.folder)
    for line in run_lines(document):
        print(line)
    for note in (*publish(document, record.folder, os.environ), *merged.notes()):
        print(f"WARNING: {escaped(note)}", file=sys.stderr)
    print(f"{len(merged.parts)} runs merged: {record.folder}, reports: {', '.join(path.name for path in reports)}")
    return merged.exit_code


def _expected(names: Sequence[str]) -> Expected | None:
    """Read lists, told by their suffix, and plans."""
    if not names:
        return None
    plans = [read_plan(Path(name)) for name in names if name.endswith(".json")]
    lists = [_list(name) for name in names if not name.endswith(".json")]
    ids = [config_id for plan in plans for config_id in plan.ids]
    ids += [entry.id for entry in load_lists(lists)] if lists else []
    jobs = {job: ids for plan in plans for job, ids in plan.jobs.items()}
    return Expected(ids=tuple(dict.fromkeys(ids)), jobs=jobs)


def _list(name: str) -> Path:
    try:
        return find_list(name, suite_root=ROOT, cwd=Path.cwd())
    except ConfigError as error:
        raise ConfigError(*(fault.replace("--config-list-file", "--expect", 1) for fault in error.faults)) from error
