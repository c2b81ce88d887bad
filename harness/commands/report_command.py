"""`accuracy-gate report`: renders a run's report.md and report.html again, from its record alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from harness.errors import ConfigError
from harness.history import runs_before
from harness.records import SCHEMA_VERSION
from harness.reports.page import write_page
from harness.reports.write import write_reports

LATEST = "latest"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate report` takes."""
    add_run(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add a run, by its folder, by its id or as the latest."""
    parser.add_argument("run_folder", metavar="RUN", help=f"a run's folder, its id in --results-dir, or {LATEST}")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), metavar="DIR", help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Write both reports and print where they are.

    Raises ConfigError for a run that is not there or is of a newer version, DataUnavailable for a damaged one.
    """
    for path in render(find_run_folder(arguments.run_folder, arguments.results_dir)):
        print(path)
    return 0


def render(folder: Path) -> tuple[Path, Path]:
    """Write `report.md` and `report.html`, the latter with the earlier runs of the same results folder."""
    check_versions(folder)
    return write_reports(folder), write_page(folder, history=runs_before(folder))


def find_run_folder(name: str, results_dir: Path) -> Path:
    """Find the run that a folder, an id or `latest` names; raises ConfigError saying what was looked for."""
    if name == LATEST:
        runs = sorted((path.parent for path in results_dir.glob("*/run.json")), key=lambda folder: folder.name)
        if not runs:
            raise ConfigError(f"{results_dir}: holds no run: give the run's folder, or --results-dir")
        return runs[-1]
    places = [Path(name), results_dir / name]
    for place in places:
        if (place / "run.json").is_file():
            return place
    raise ConfigError(f"{name}: is no run: there is no {' and no '.join(str(place / 'run.json') for place in places)}")


def check_versions(folder: Path) -> None:
    """Raise ConfigError where a part of a record is newer than this can read; what is damaged is told elsewhere."""
    newer = [
        f"{path}: is of version {version}; this reads up to {SCHEMA_VERSION}: use a later accuracy-gate"
        for path, version in _versions(folder)
        if version > SCHEMA_VERSION
    ]
    if newer:
        raise ConfigError(*newer)


def _versions(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in (folder / "run.json", *sorted(folder.rglob("result.json"))):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        version = document.get("schema") if isinstance(document, dict) else None
        if isinstance(version, int):
            yield path, version
