"""`accuracy-gate new`: a config for a model, with a threshold and a tolerance that were measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from harness.config import ModelConfig, load_config_file
from harness.config_lists import find_list, listed, load_lists
from harness.errors import ConfigError, InfrastructureError, Position
from harness.gates.calibration import Calibration, calibrate
from harness.measuring import Measured, measure
from harness.records import RunRecord, write_text
from harness.serving import RunOptions

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="what `vllm serve` is told to serve")
    parser.add_argument("--server-args", default="", metavar="ARGS", help="further arguments of `vllm serve`")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the server")
    parser.add_argument("--task", choices=["gsm8k", "smoke"], default="gsm8k", help="which questions (%(default)s)")
    parser.add_argument("--num-questions", type=int, help="the first N questions (all of them)")
    parser.add_argument("--num-fewshot", type=int, default=5, help="worked examples before each (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest reply (%(default)s)")
    parser.add_argument("--use-chat-completions", action="store_true", help="ask /v1/chat/completions")
    parser.add_argument("--runs", type=int, default=3, help="how often everything is asked (%(default)s)")
    parser.add_argument("--list", dest="list_file", metavar="LIST", help="append the config's name to this list")
    parser.add_argument("--name", help="the YAML's name without suffix (the last part of MODEL)")
    parser.add_argument("--serve-command", metavar="LINE", help="how the server is started")
    parser.add_argument("--gpus", metavar="LIST", help="which of the visible GPUs to use")
    parser.add_argument("--data-dir", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where the runs' records go")


def run(arguments: argparse.Namespace) -> int:
    """Serve, measure, write the YAML and extend the list.

    Raises ConfigError before anything starts where a file is in the way, InfrastructureError where the runs say
    nothing.
    """
    list_path = (
        find_list(arguments.list_file, suite_root=CONFIGS.parent, cwd=Path.cwd()) if arguments.list_file else None
    )
    if list_path is not None:
        load_lists([list_path])
    folder = list_path.parent if list_path else CONFIGS if CONFIGS.is_dir() else Path.cwd()
    path = folder / f"{arguments.name or arguments.model.rstrip('/').rsplit('/', 1)[-1].replace(':', '-')}.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists: choose another --name")
    if arguments.runs < 2:
        raise ConfigError(f"--runs {arguments.runs}: noise shows from two runs on")
    keys = _keys(arguments)
    draft = RunRecord.create(arguments.results_dir).folder / path.name
    write_text(draft, _render(keys | {"accuracy_threshold": 0.0}, [], draft.parent))
    (entry,) = listed(path.stem, load_config_file(draft), Position(path=draft))
    measured = measure(entry, arguments.runs, _options(arguments), draft.parent)
    if measured.refusals:
        raise InfrastructureError("\n".join(("nothing can be derived from these runs:", *measured.refusals)))
    found = calibrate(measured.answers, floor_before=_default_floor(measured))
    write_text(path, _render(keys | _gates(found), _reasons(found, measured, entry.config), path.parent))
    load_config_file(path)
    print(f"{path}: accuracy_threshold {found.threshold}, tolerance {found.tolerance}")
    if list_path is not None:
        _append(list_path, path.name)
        print(f"{list_path}: {path.name} added")
    return 0


def _options(arguments: argparse.Namespace) -> RunOptions:
    return RunOptions(data_dir=arguments.data_dir, gpu_choice=arguments.gpus)


def _keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the YAML says beside its gates; what is a default is left out."""
    env = dict(_variable(text) for text in arguments.env)
    keys = {
        "model_name": arguments.model,
        "task": arguments.task if arguments.task != "gsm8k" else None,
        "num_questions": arguments.num_questions,
        "num_fewshot": arguments.num_fewshot,
        "max_tokens": arguments.max_tokens if arguments.max_tokens != 256 else None,
        "use_chat_completions": arguments.use_chat_completions or None,
        "server_args": arguments.server_args or None,
        "serve_command": arguments.serve_command,
        "env": env or None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--env {text}: must be NAME=VALUE")
    return name, value


def _gates(found: Calibration) -> dict[str, Any]:
    return {"accuracy_threshold": found.threshold, "tolerance": found.tolerance}


def _default_floor(measured: Measured) -> float:
    accuracies = [result.counts.accuracy or 0.0 for result in measured.results]
    return sum(accuracies) / len(accuracies) - float(ModelConfig.model_fields["tolerance"].default)


def _reasons(found: Calibration, measured: Measured, config: ModelConfig) -> list[str]:
    server = measured.results[0].server
    each = ", ".join(f"{result.counts.accuracy:.4f}" for result in measured.results)
    return [
        f"Measured {datetime.now(UTC):%Y-%m-%d}, server {server.get('version', 'unknown')}: {each} over "
        f"{found.questions} questions, {config.num_fewshot} shots.",
        f"Tolerance: 3.5 times the run-to-run deviation ({found.deviation:.4f}; {found.both_ways} questions came out "
        f"both ways, which explains {found.deviation_by_chance:.4f}).",
        f"It shows a loss of {found.drop_seen_after:.4f} in 95 of 100 runs, where a tolerance of 0.08 shows "
        f"{found.drop_seen_before:.4f}.",
    ]


def _render(keys: dict[str, Any], comments: Sequence[str], folder: Path) -> str:
    order = ["model_name", "task", "accuracy_threshold", "tolerance"]
    ordered = {key: keys[key] for key in [*order, *keys] if key in keys}
    schema = os.path.relpath(CONFIGS / "schema.json", folder) if (CONFIGS / "schema.json").is_file() else None
    lines = [f"# yaml-language-server: $schema={schema}"] if schema else []
    lines += [f"# {comment}" for comment in comments]
    return "\n".join([*lines, yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=100)])


def _append(list_path: Path, name: str) -> None:
    text = list_path.read_bytes().decode("utf-8")
    newline = "\r\n" if "\r\n" in text else "\n"
    write_text(list_path, text + ("" if text.endswith("\n") or not text else newline) + name + newline)
