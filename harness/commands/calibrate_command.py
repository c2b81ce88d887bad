"""`accuracy-gate calibrate`: a config's noise measured, its baseline, threshold and tolerance written."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from harness.baselines import baseline_of, save
from harness.config import load_config_file
from harness.config_lists import ListedConfig, listed
from harness.errors import ConfigError, InfrastructureError, Position
from harness.gates.calibration import Calibration, calibrate
from harness.measuring import Measured, measure
from harness.records import RunRecord, write_text
from harness.serving import RunOptions
from harness.standalone import api_key
from harness.yaml_source import read_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="the YAML")
    parser.add_argument("--task", help="the row of `tasks`, where it has several")
    parser.add_argument("--runs", type=int, default=5, help="how often everything is asked (%(default)s)")
    parser.add_argument("--baseline", type=Path, help="where the baseline goes (baselines/NAME.json beside the YAML)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print; write neither YAML nor baseline")
    parser.add_argument("--base-url", help="a server that already runs; nothing is started")
    parser.add_argument("--serve-command", metavar="LINE", help="how the server is started")
    parser.add_argument("--gpus", metavar="LIST", help="which of the visible GPUs to use")
    parser.add_argument("--data-dir", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where the runs' records go")


def run(arguments: argparse.Namespace) -> int:
    """Measure, then write.

    Raises ConfigError before anything starts, InfrastructureError where nothing can be derived from the runs.
    """
    if arguments.runs < 2:
        raise ConfigError(f"--runs {arguments.runs}: noise shows from two runs on")
    entry = _entry(arguments.config, arguments.task)
    if entry.config.task == "perplexity":
        raise ConfigError("calibrate derives an accuracy: for task: perplexity store a baseline with --save-baseline")
    options = RunOptions(
        base_url=arguments.base_url,
        api_key=api_key(),
        data_dir=arguments.data_dir,
        serve_command=arguments.serve_command,
        gpu_choice=arguments.gpus,
    )
    measured = measure(entry, arguments.runs, options, RunRecord.create(arguments.results_dir).folder)
    if measured.refusals:
        raise InfrastructureError("\n".join(("nothing can be derived from these runs:", *measured.refusals)))
    found = calibrate(measured.answers, floor_before=float(entry.config.floor))
    _print(found, entry)
    if found.threshold > 0 and found.tolerance >= found.threshold:
        floor = f"{found.threshold} less {found.tolerance} is a floor that cannot fail"
        raise ConfigError(f"{floor}: {found.questions} questions are too few; nothing was written")
    if not arguments.dry_run:
        _write(arguments.baseline or _baseline_path(entry), entry, measured, found)
    return 0


def _entry(path: Path, task: str | None) -> ListedConfig:
    entries = listed(path.stem, load_config_file(path), Position(path=path))
    chosen = [entry for entry in entries if task is None or entry.task == task]
    if len(chosen) != 1:
        names = ", ".join(str(entry.task) for entry in entries)
        raise ConfigError(f"{path}: choose one of its tasks with --task: {names}")
    return chosen[0]


def _baseline_path(entry: ListedConfig) -> Path:
    return entry.path.parent / "baselines" / f"{entry.id.replace(':', '-')}.json"


def _print(found: Calibration, entry: ListedConfig) -> None:
    config = entry.config
    print(f"accuracy {found.accuracy:.4f} over {found.runs} runs of {found.questions} questions")
    print(f"run-to-run deviation {found.deviation:.4f}; {found.both_ways} questions came out both ways, which explains")
    print(f"{found.deviation_by_chance:.4f}")
    print(f"threshold {found.threshold} (was {config.accuracy_threshold})")
    print(f"tolerance {found.tolerance} (was {config.tolerance})")
    print("smallest loss that shows in 95 of 100 runs:")
    print(f"  the floor as it was  {found.drop_seen_before:.4f}")
    print(f"  this floor           {found.drop_seen_after:.4f}")
    print(f"  gate: paired         {found.drop_seen_paired:.4f}")


def _write(baseline: Path, entry: ListedConfig, measured: Measured, found: Calibration) -> None:
    save(baseline, baseline_of(measured.results[-1], measured.passes))
    print(f"{baseline}: written; `baseline:` in the YAML names it")
    gates = {"accuracy_threshold": str(found.threshold), "tolerance": str(found.tolerance)}
    if entry.task is None:
        write_text(entry.path, with_values(read_text(entry.path), gates))
        load_config_file(entry.path)
        print(f"{entry.path}: threshold and tolerance written")
    else:
        print(
            f"{entry.path}: write them into the row of {entry.task}: "
            + ", ".join(f"{k}: {v}" for k, v in gates.items())
        )


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Replace top-level scalars of a YAML, keeping comments and order; a key that is missing follows the one before."""
    previous = ""
    for key, value in values.items():
        pattern = re.compile(rf"^({re.escape(key)}\s*:[ \t]*)[^\s#]+", re.MULTILINE)
        if pattern.search(text):
            text = pattern.sub(rf"\g<1>{value}", text, count=1)
        else:
            after = re.compile(rf"^{re.escape(previous)}\s*:.*$", re.MULTILINE)
            text = after.sub(rf"\g<0>\n{key}: {value}", text, count=1)
        previous = key
    return text
