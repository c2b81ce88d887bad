"""The command `accuracy-gate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from harness import __version__, datasets
from harness.config import schema
from harness.errors import AccuracyGateError, ConfigError

COMMANDS = {
    "eval": ("standalone", "evaluate a running server"),
    "smoke": ("commands.smoke_command", "40 easy questions: is something obviously broken?"),
    "new": ("new_config", "write a config with a measured threshold"),
    "calibrate": ("commands.calibrate_command", "measure a config's noise; write baseline and tolerance"),
    "check": ("commands.check_command", "check lists and YAMLs without running them"),
    "compare": ("commands.compare_command", "what changed between two runs"),
    "show": ("commands.show_command", "a run, a config or a sample in the terminal"),
    "report": ("commands.report_command", "render a run's reports again from its record"),
    "history": ("commands.history_command", "how configs fared over many runs"),
    "list": ("commands.list_command", "what would run, and as which CI jobs"),
    "merge": ("commands.merge_command", "the records of several jobs as one run"),
    "run": ("commands.run_command", "run lists here, or on a Ray cluster"),
    "gpus": ("commands.gpus_command", "the GPUs of this machine and who holds them"),
    "cache": ("commands.cache_command", "the sample cache: list, prune, clear"),
}
"""What each is called: the module that holds it, with add_options and run, and what it does."""
SCHEMA_PATH = Path(__file__).resolve().parent.parent / "configs" / "schema.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is good, 1 is bad news, 4 a mistake in what was asked, 75 an outage."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 4
    except AccuracyGateError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 75
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accuracy-gate", description=__doc__)
    parser.add_argument("--version", action="version", version=f"accuracy-gate {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    data = commands.add_parser("data", help="GSM8K's files").add_subparsers(required=True, metavar="COMMAND")
    fetch = data.add_parser("fetch", help="fill the cache ahead of time")
    fetch.add_argument("--force", action="store_true", help="download again what is already there")
    fetch.set_defaults(run=_data_fetch)
    verify = data.add_parser("verify", help="check the files that a run would use")
    verify.add_argument("--data-dir", type=Path, help="check this folder instead of the cache")
    verify.set_defaults(run=_data_verify)

    for name, (module, said) in COMMANDS.items():
        command = import_module(f"harness.{module}")
        one = commands.add_parser(name, help=said, description=command.__doc__)
        command.add_options(one)
        one.set_defaults(run=command.run)

    schemas = commands.add_parser("schema", help="write configs/schema.json from the config model")
    schemas.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is stale")
    schemas.add_argument("--path", type=Path, default=SCHEMA_PATH)
    schemas.set_defaults(run=_schema)
    return parser


def _data_fetch(arguments: argparse.Namespace) -> int:
    for path in datasets.fetch(force=arguments.force):
        print(path)
    return 0


def _data_verify(arguments: argparse.Namespace) -> int:
    checks = datasets.verify(arguments.data_dir)
    for check in checks:
        print(f"{check.path}: {'ok' if check.ok else check.difference}")
    return 0 if all(check.ok for check in checks) else 1


def _schema(arguments: argparse.Namespace) -> int:
    path: Path = arguments.path
    if not arguments.check:
        path.write_text(schema(), encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == schema():
        return 0
    print(f"{path} is stale: run `accuracy-gate schema`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
