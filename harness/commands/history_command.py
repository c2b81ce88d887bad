"""`accuracy-gate history`: each config over its runs, and the first run where it got worse."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.history import History, update
from harness.reports.untrusted import escaped
from harness.trends import BITS, Judged, Trend

FORMAT_VERSION = 1
SHORT_COMMIT = 10
RULE = (
    "worse: the run's whole 95% interval lies below the band of the runs before it since the level last changed; the "
    "band is Student's 95% prediction interval of three runs or more, the span of the intervals of fewer"
)
FIELDS = (
    "config_id",
    "task",
    "backend",
    "run_id",
    "started",
    "commit",
    "verdict",
    "graded",
    "accuracy",
    "low",
    "high",
    BITS,
    "band_low",
    "band_high",
    "band_runs",
    "change",
    "tokens_per_second",
    "acceptance_length",
    "startup",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate history` takes."""
    add = parser.add_argument
    what = "folder with run folders, at any depth; its history.jsonl is kept up to date"
    add("--results", type=Path, default=Path("results"), metavar="DIR", help=f"{what} (%(default)s)")
    add("--config", action="append", default=[], metavar="ID", help="these configs alone; may be given again")
    add("--format", choices=["text", "csv", "json"], default="text", help="(%(default)s)")
    add("--rebuild", action="store_true", help="write history.jsonl anew, from the run folders that are there")


def run(arguments: argparse.Namespace) -> int:
    """Print the trends and name on stderr what could not be read; raises ConfigError for a config that never ran."""
    history = update(arguments.results, rebuild=arguments.rebuild)
    trends = _chosen(history, arguments.config)
    match arguments.format:
        case "csv":
            text = render_csv(trends)
        case "json":
            text = render_json(trends, history.notes)
        case _:
            text = render_text(trends)
    print(text, end="")
    for note in history.notes:
        print(f"WARNING: {escaped(note)}", file=sys.stderr)
    return 0


def _chosen(history: History, wanted: Sequence[str]) -> tuple[Trend, ...]:
    trends = history.trends()
    known = dict.fromkeys(trend.key.config_id for trend in trends)
    unknown = [config_id for config_id in wanted if config_id not in known]
    if unknown:
        raise ConfigError(*(f"--config {name}: never ran; known: {', '.join(known) or 'none'}" for name in unknown))
    return tuple(trend for trend in trends if not wanted or trend.key.config_id in wanted)


def render_text(trends: Sequence[Trend]) -> str:
    """Render a block for each config; bits per byte, where lower is better, stand for accuracy where there is none."""
    lines = [line for trend in trends for line in (*_block(trend), "")]
    return "\n".join([*lines, f"({RULE})"] if trends else ["no finished run yet"]) + "\n"


def _block(trend: Trend) -> Iterator[str]:
    yield escaped(str(trend.key))
    for judged in trend.runs:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(_cells(judged), WIDTHS, strict=True)).rstrip()
    if trend.worse:
        first = trend.worse[0].point
        commit = escaped(first.past.commit[:SHORT_COMMIT])
        yield f"  first got worse in {escaped(first.past.run_id)}, {_value(trend.worse[0])}, commit {commit}"


WIDTHS = (22, SHORT_COMMIT, 14, 8, 15, 24, 5)


def _cells(judged: Judged) -> tuple[str, ...]:
    past, band = judged.point.past, judged.band
    interval = f"{past.low:.4f}-{past.high:.4f}" if past.low is not None and past.high is not None else "-"
    between = "" if band is None else f"band {_bounds(judged)} of {band.runs}"
    texts = (past.run_id, past.commit[:SHORT_COMMIT], past.verdict, _value(judged), interval, between)
    return (*map(escaped, texts), {"worse": "WORSE", None: ""}.get(judged.change, judged.change or ""))


def _value(judged: Judged) -> str:
    value = judged.point.value
    return "-" if value is None else f"{abs(value):.4f}"


def _band(judged: Judged) -> tuple[float, float] | None:
    """Bits per byte are negated in trends, where higher is better; here they stand as measured."""
    if judged.band is None:
        return None
    low, high = judged.band.low, judged.band.high
    return (low, high) if judged.point.past.accuracy is not None else (-high, -low)


def _bounds(judged: Judged) -> str:
    band = _band(judged)
    return "-" if band is None else f"{band[0]:.4f}-{band[1]:.4f}"


def _record(trend: Trend, judged: Judged) -> dict[str, Any]:
    past, band = judged.point.past, _band(judged)
    return {
        "config_id": trend.key.config_id,
        "task": trend.key.task,
        "backend": trend.key.backend,
        "run_id": past.run_id,
        "started": past.started,
        "commit": past.commit,
        "verdict": past.verdict.value,
        "graded": judged.point.graded,
        "accuracy": past.accuracy,
        "low": past.low,
        "high": past.high,
        BITS: past.measures.get(BITS),
        "band_low": band and band[0],
        "band_high": band and band[1],
        "band_runs": judged.band and judged.band.runs,
        "change": judged.change,
        "tokens_per_second": past.tokens_per_second,
        "acceptance_length": past.acceptance_length,
        "startup": past.startup,
    }


def render_csv(trends: Sequence[Trend]) -> str:
    """Render one line per run of a config, with a heading; what was not measured is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_record(trend, judged) for trend in trends for judged in trend.runs)
    return out.getvalue()


def render_json(trends: Sequence[Trend], notes: Sequence[str]) -> str:
    """Render everything, for programs."""
    document = {
        "schema": FORMAT_VERSION,
        "rule": RULE,
        "trends": [
            {
                "config_id": trend.key.config_id,
                "task": trend.key.task,
                "backend": trend.key.backend,
                "first_worse": trend.worse[0].point.past.run_id if trend.worse else None,
                "runs": [_record(trend, judged) for judged in trend.runs],
            }
            for trend in trends
        ],
        "notes": list(notes),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
