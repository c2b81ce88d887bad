"""`accuracy-gate list`: what lists would run, for a person or as jobs of GitHub or Buildkite; nothing is started."""

from __future__ import annotations

import argparse
import json
import shlex
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.commands import ROOT, positive
from harness.config_lists import find_list, load_lists
from harness.durations import Durations
from harness.errors import ConfigError
from harness.listing import SEPARATOR, Job, Limit, Planned, Queues, plan_configs, plan_jobs
from harness.platforms import Requirement
from harness.records import write_text
from harness.reports.untrusted import escaped
from harness.suite import EXIT_INFRASTRUCTURE

SCHEMA_VERSION = 1
GITHUB_JOBS = 256
"""A matrix may make so many jobs of a workflow run."""
BUILDKITE_STEPS = 500
"""An upload may hold so many steps."""
RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a list comes to."""

    lists: tuple[str, ...]
    """As they were named, since jobs read them in checkouts of their own."""
    configs: tuple[Planned, ...]
    jobs: tuple[Job, ...]
    limit: Limit

    def document(self) -> dict[str, Any]:
        """Flatten for `--format json`, which `accuracy-gate merge --expect` reads."""
        job_of = {config_id: job.id for job in self.jobs for config_id in job.ids}
        return {
            "schema": SCHEMA_VERSION,
            "lists": list(self.lists),
            "configs": [_json_of(planned, job_of[planned.entry.id]) for planned in self.configs],
            "jobs": [{**_json_of_job(job, self.limit), "configs": list(job.ids)} for job in self.jobs],
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate list` takes."""
    add = parser.add_argument
    add("lists", nargs="+", metavar="LIST", help="a list of configs, found as --config-list-file finds it")
    add("--format", choices=["text", "json", "github", "buildkite"], default="text", help="(%(default)s)")
    add("--shards", type=_count, metavar="N", help="jobs at most; one for each server where left out")
    add(
        "--queue",
        type=_template,
        default=Queues().template,
        metavar="TEMPLATE",
        help="agent queue or runner label, by the GPUs' {count} and {type} (%(default)s)",
    )
    add("--cpu-queue", default=Queues().cpu, metavar="NAME", help="the same for what needs no GPU (%(default)s)")
    add(
        "--gpu-type",
        type=_gpu_type,
        action="append",
        default=[],
        metavar="PLATFORM=NAME",
        help="{type} of configs whose platforms: names PLATFORM, as in 'cuda>=9.0=h200'; any=NAME for those without",
    )
    add("--timeout-factor", type=positive, default=Limit().factor, metavar="X", help="(%(default)g)")
    add(
        "--timeout-minimum",
        type=positive,
        default=Limit().minimum,
        metavar="MINUTES",
        help="a job may take this long and its expected duration --timeout-factor times (%(default)g)",
    )
    add("--command", default="pytest", metavar="LINE", help="what a Buildkite job runs; its options are added")
    add(
        "--durations",
        type=Path,
        default=ROOT / ".accuracy-gate" / "durations.json",
        metavar="FILE",
        help="what earlier runs measured (.accuracy-gate/durations.json)",
    )
    add("--plan", type=Path, metavar="FILE", help="also write --format json there, for accuracy-gate merge --expect")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; raises ConfigError for lists, configs or options that are wrong, before anything is printed."""
    plan = _plan(arguments)
    match arguments.format:
        case "json":
            text = json.dumps(plan.document(), indent=2) + "\n"
        case "github":
            text = render_github(plan)
        case "buildkite":
            text = render_buildkite(plan, arguments.command)
        case _:
            text = render_text(plan)
    if arguments.plan is not None:
        write_text(arguments.plan, json.dumps(plan.document(), indent=2) + "\n")
    print(text, end="")
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    try:
        paths = [find_list(name, suite_root=ROOT, cwd=Path.cwd()) for name in arguments.lists]
    except ConfigError as error:
        raise ConfigError(*(fault.removeprefix("--config-list-file ") for fault in error.faults)) from error
    queues = Queues(template=arguments.queue, cpu=arguments.cpu_queue, types=dict(arguments.gpu_type))
    configs = plan_configs(load_lists(paths), queues, Durations(arguments.durations))
    limit = Limit(factor=arguments.timeout_factor, minimum=arguments.timeout_minimum)
    return Plan(lists=tuple(arguments.lists), configs=configs, jobs=plan_jobs(configs, arguments.shards), limit=limit)


def _json_of(planned: Planned, job_id: str) -> dict[str, Any]:
    return {
        "id": planned.entry.id,
        "gpus": planned.gpus,
        "gpu_type": planned.gpu_type,
        "queue": planned.queue,
        "startup_seconds": round(planned.duration.startup, 1),
        "asking_seconds": round(planned.duration.asking, 1),
        "measured": planned.duration.measured,
        "job": job_id,
    }


def _json_of_job(job: Job, limit: Limit) -> dict[str, Any]:
    return {
        "id": job.id,
        "queue": job.queue,
        "gpus": job.gpus,
        "gpu_type": job.gpu_type,
        "seconds": round(job.seconds, 1),
        "measured": job.measured,
        "timeout_minutes": limit.minutes(job),
    }


def render_text(plan: Plan) -> str:
    """Render for a terminal: configs, then jobs; a duration that is a guess is marked with ~."""
    configs = [(p.entry.id, str(p.gpus), p.queue, _span(p.duration.seconds, p.duration.measured)) for p in plan.configs]
    jobs = [
        (job.id, str(job.gpus), job.queue, _span(job.seconds, job.measured), f"{plan.limit.minutes(job)}m", _few(job))
        for job in plan.jobs
    ]
    lines = [*_columns([("config", "gpus", "queue", "takes"), *configs]), ""]
    lines += [*_columns([("job", "gpus", "queue", "takes", "limit", "configs"), *jobs]), ""]
    longest = max(plan.jobs, key=lambda job: job.seconds)
    total = sum(job.seconds for job in plan.jobs)
    lines.append(
        f"{len(plan.configs)} configs, {len(plan.jobs)} jobs: {_span(total, True)} in all, the longest job "
        f"{_span(longest.seconds, True)}; limit {plan.limit.minimum:g}m and {plan.limit.factor:g} times as long"
    )
    if not all(planned.duration.measured for planned in plan.configs):
        lines.append("~ is a guess from the model's name, good to a factor of about three, until a run was measured")
    return "\n".join(lines) + "\n"


def _span(seconds: float, measured: bool) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{'' if measured else '~'}{minutes}m{rest:02}s"


def _few(job: Job) -> str:
    shown = ", ".join(job.ids[:3])
    return shown if len(job.ids) <= 3 else f"{shown} and {len(job.ids) - 3} more"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(escaped(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(escaped(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def render_github(plan: Plan) -> str:
    """Render a matrix for `strategy: matrix: ${{ fromJSON(…) }}`, on one line as `$GITHUB_OUTPUT` wants it.

    Two attempts and the set-up fit into `job_timeout_minutes`. Raises ConfigError for more jobs than a matrix may have.
    """
    _check_number(plan, GITHUB_JOBS, "a GitHub matrix")
    include = [
        {
            **_json_of_job(job, plan.limit),
            "job_timeout_minutes": 2 * plan.limit.minutes(job) + 15,
            "configs": SEPARATOR.join(job.ids),
        }
        for job in plan.jobs
    ]
    return json.dumps({"include": include}, separators=(",", ":")) + "\n"


def render_buildkite(plan: Plan, command: str) -> str:
    """Render steps for `buildkite-agent pipeline upload`; raises ConfigError for more of them than it takes."""
    _check_number(plan, BUILDKITE_STEPS, "a Buildkite upload")
    steps = [_buildkite_step(job, plan, command) for job in plan.jobs]
    return yaml.safe_dump(_uninterpolated({"steps": steps}), sort_keys=False, allow_unicode=True, width=4096)


def _buildkite_step(job: Job, plan: Plan, command: str) -> dict[str, Any]:
    options = [f"--config-list-file={name}" for name in plan.lists] + [f"--configs={SEPARATOR.join(job.ids)}"]
    return {
        "label": f"accuracy {job.id} ({_few(job)})",
        "key": f"accuracy-{job.id}",
        "command": f"{command} {shlex.join(options)}",
        "agents": {"queue": job.queue},
        "timeout_in_minutes": plan.limit.minutes(job),
        "artifact_paths": ["results/**/*"],
        "retry": {"automatic": [{"exit_status": EXIT_INFRASTRUCTURE, "limit": RETRIES}]},
    }


def _uninterpolated(value: Any) -> Any:
    """Write $ as $$: an upload fills in variables, of the agent that uploads."""
    match value:
        case str():
            return value.replace("$", "$$")
        case dict():
            return {key: _uninterpolated(inner) for key, inner in value.items()}
        case list():
            return [_uninterpolated(inner) for inner in value]
    return value


def _check_number(plan: Plan, most: int, what: str) -> None:
    if len(plan.jobs) > most:
        raise ConfigError(
            f"{len(plan.jobs)} jobs: {what} holds {most}: put several configs in a job with --shards {most}"
        )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of jobs: 1 or more")
    return int(text)


def _template(text: str) -> str:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        text.format(count=1, type="t")
    except (ValueError, LookupError, AttributeError):
        names = {"?"}
    if not names <= {"count", "type"} or not text:
        raise argparse.ArgumentTypeError(f"{text!r} may name {{count}} and {{type}} alone")
    return text


def _gpu_type(text: str) -> tuple[str, str]:
    platform, _, name = text.rpartition("=")
    try:
        if platform != "any":
            Requirement.parse(platform)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; then = and a name") from error
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} must be PLATFORM=NAME, as in 'cuda>=9.0=h200'")
    return platform, name
