"""`report.md`, and what CI systems take of the same Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import RecordUnwritable
from harness.records import write_text
from harness.reports import buildkite, github
from harness.reports.documents import RunDocument, read_run
from harness.reports.markdown import render_markdown

NAME = "report.md"


def write_reports(run_folder: Path) -> Path:
    """Render `report.md` again from the record alone, and return where it is.

    Raises DataUnavailable for a missing or damaged record, RecordUnwritable.
    """
    path = run_folder / NAME
    write_text(path, render_markdown(read_run(run_folder)))
    return path


def publish(run: RunDocument, run_folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Write `report.md` and hand the run to the CI system that `env` tells of; yield a line for whatever failed."""
    try:
        write_text(run_folder / NAME, render_markdown(run))
    except RecordUnwritable as error:
        yield str(error)
    said = (
        github.write_summary(run, env) if github.on_github(env) else None,
        buildkite.annotate(run, env) if buildkite.on_buildkite(env) else None,
    )
    yield from (fault for fault in said if fault is not None)
