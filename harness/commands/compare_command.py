"""`accuracy-gate compare`: what changed between two runs, and whether it may have."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.comparison import compare
from harness.errors import ConfigError
from harness.fail_conditions import NAMES, Judged, Outcome, judge_conditions, parse_condition
from harness.recordings import read_recordings
from harness.records import write_text
from harness.reports.comparison import render_json, render_markdown, render_text
from harness.reports.untrusted import escaped
from harness.suite import EXIT_INFRASTRUCTURE


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate compare` takes."""
    what = "a run's folder, one config's folder in it, a result.json, or a baseline"
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help=f"before: {what}")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="after: likewise")
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit 1 where it holds, as in 'accuracy < -0.01' or 'tokens_per_second < -5%%' (a change, B - A, or with "
        f"%% one relative to A); may be given again; known: {', '.join(NAMES)}",
    )
    parser.add_argument("--format", choices=["text", "markdown", "json"], default="text", help="(%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of printing")
    parser.add_argument(
        "--flips",
        type=_count,
        default=5,
        metavar="N",
        help="flips that the text shows of each config (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare and report; 1 where a condition holds, else 75 where one cannot be judged, else 0.

    Raises ConfigError for a condition or a path that makes no sense, DataUnavailable for a damaged record.
    """
    conditions = tuple(parse_condition(text) for text in arguments.fail_on)
    output: Path | None = arguments.output
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}")
    comparison = compare(read_recordings(arguments.run_a), read_recordings(arguments.run_b))
    judged = judge_conditions(conditions, comparison)
    if arguments.format == "json":
        report = render_json(comparison, judged)
    elif arguments.format == "markdown":
        report = render_markdown(comparison, judged)
    else:
        report = render_text(comparison, judged, flips=arguments.flips)
    if output is not None:
        write_text(output, report)
    else:
        _print(report)
    return _status(judged)


def _status(judged: Sequence[Judged]) -> int:
    """Name what is wrong on stderr, whatever the report's format, and say how to exit."""
    outcomes = [one.outcome for one in judged]
    for one in judged:
        if one.outcome is not Outcome.DOES_NOT_HOLD:
            print(f"{'FAILED' if one.outcome is Outcome.HOLDS else 'ERROR'}: {escaped(str(one))}", file=sys.stderr)
    if Outcome.HOLDS in outcomes:
        return 1
    return EXIT_INFRASTRUCTURE if Outcome.NOT_JUDGED in outcomes else 0


def _print(report: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(ValueError):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of few letters shows the rest as escapes
    print(report, end="")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of flips: 0 or more")
    return int(text)
