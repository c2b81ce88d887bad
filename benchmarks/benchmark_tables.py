"""Write docs/benchmarks.md from what `gpu_host.sh` brought back: `benchmark_tables.py VISIT…`, a folder for each visit.

A visit's folder holds packed records, or `records/` itself, and perhaps a `note.txt`. Every number, version and command
comes from them; what they hold nothing of is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).with_name("gpu_host")))

from host_records import HostRecords, by_server  # noqa: E402
from paired_runs import judged  # noqa: E402
from start_phases import starts_below  # noqa: E402

WAYS = {
    "list": "one after another",
    "cold": "one after another, nothing compiled before",
    "ahead": "one after another, the next one's process started ahead",
    "shared": "side by side, sharing the GPU",
}
ALONE = ("list", "cold")
"""What other ways are held against, the first that there is."""
OF_BEST, SHARED_PART = 0.98, 1 / 3
"""What is asked for: the plain loop's questions/s at its best in each round, the wall clock of one after another."""
GIB = 1024**3
INTRO = """\
# Benchmarks

Written by `benchmarks/benchmark_tables.py` from the records of `benchmarks/gpu_host.sh`; nothing in a table is
typed by hand.
"""


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield ""
    for cells in (heads, ["---"] * len(heads), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    yield ""


def number(value: float | None, spec: str = ".1f") -> str:
    return "-" if value is None else format(value, spec)


def hosts(visits: Sequence[HostRecords]) -> Iterator[str]:
    """What they ran on."""
    columns = [dict(_host(facts)) if (facts := visit.document("host")) else {} for visit in visits]
    if not any(columns):
        return
    names = list(dict.fromkeys(name for column in columns for name in column))
    numbered = [f"visit {count}" for count in range(1, len(columns) + 1)] if len(columns) > 1 else ["which"]
    yield "## Host"
    yield from table(["what", *numbered], [[name, *(column.get(name, "-") for column in columns)] for name in names])
    yield from (f"Visit {count}, as told by who ran it: {v.note}\n" for count, v in enumerate(visits, 1) if v.note)


def _host(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    gpus = [f"{gpu['name']}, {gpu['memory'] / GIB:.0f} GiB, compute capability {gpu['arch']}" for gpu in facts["gpus"]]
    yield "GPUs", "; ".join(gpus) or "none"
    yield "driver", facts["driver"]
    yield "processor", f"{facts['processor']}, {facts['cores']} cores, {facts['memory'] / GIB:.0f} GiB"
    yield "Python", facts["python"]
    yield from facts["versions"].items()
    yield "commit", facts["commit"]


def throughput(records: HostRecords) -> Iterator[str]:
    """The harness against a plain loop."""
    found = records.document("throughput")
    if not found:
        return
    yield "## Asking, against a plain loop of posts"
    yield ""
    yield (
        f"{found['questions']} questions of one server, {found['model']}, its prefix cache warm. The plain loop is "
        f"aiohttp with as many connections; {found.get('plain_default', 100)} is the library's default."
    )
    speeds = {(run["who"], run["concurrency"]): run["per_second"] for run in found["sweep"]}
    rows = []
    for concurrency in sorted({run["concurrency"] for run in found["sweep"]}):
        plain, harness = speeds.get(("plain", concurrency)), speeds.get(("harness", concurrency))
        ratio = harness / plain if plain and harness else None
        rows.append([concurrency, number(plain), number(harness), number(ratio, ".3f")])
    yield from table(["at once", "plain, questions/s", "harness, questions/s", "ratio"], rows)
    if found["rounds"]:
        yield from rounds(found)


def rounds(found: dict[str, Any]) -> Iterator[str]:
    """The harness at its default against the loop at its best and at its default, round by round."""
    best, default, own = found["plain_best"], found["plain_default"], found["harness_default"]
    rows, to_best, to_default = [], [], []
    for count, runs in enumerate(found["rounds"], 1):
        harness, plain_best, plain_default = (
            harmonic_mean([run["per_second"] for run in runs if (run["who"], run["concurrency"]) == kind])
            for kind in (("harness", own), ("plain", best), ("plain", default))
        )
        to_best.append(harness / plain_best)
        to_default.append(harness / plain_default)
        speeds = (number(speed) for speed in (harness, plain_best, plain_default))
        rows.append([count, *speeds, number(to_best[-1], ".3f"), number(to_default[-1], ".3f")])
    heads = ["round", f"harness at {own}", f"plain at {best}", f"plain at {default}", "to its best", "to its default"]
    yield from table(heads, rows)
    faster = sum(ratio > 1 for ratio in to_default)
    yield (
        f"Mean ratio to the plain loop's best {fmean(to_best):.3f}, the least {min(to_best):.3f} "
        f"({_met(min(to_best) >= OF_BEST)}: {OF_BEST:g} in each); faster than at its default in {faster} of "
        f"{len(rows)} rounds."
    )
    runs, empty = [one[0] for one in found["rounds"]], found["empty"][0]
    share = fmean((run["cpu"] - empty["cpu"]) / run["asking"] for run in runs)
    plain_cpu = fmean(one[1]["cpu"] for one in found["rounds"])
    peak = max(run["peak_memory"] for run in runs) / 1024**2
    yield (
        f"The harness used {share:.0%} of a core while it asked ({fmean(run['cpu'] for run in runs):.1f} s of "
        f"processor time in all, {empty['cpu']:.1f} s of them to get going; the plain loop {plain_cpu:.1f} s) and "
        f"{peak:.0f} MiB."
    )
    yield ""


def ways(records: HostRecords) -> Iterator[str]:
    """The list run in different ways."""
    found = {name: suite for name in WAYS if (suite := records.suite(name))}
    if not found:
        return
    yield "## The list of configs, run in different ways"
    base = next((found[name] for name in ALONE if name in found), None)
    alone = _verdicts(base) if base else None
    rows = []
    for name, suite in found.items():
        wall = suite["wall_seconds"]
        ratio = wall / base["wall_seconds"] if base and alone and set(_verdicts(suite)) == set(alone) else None
        same = "-" if alone is None else "yes" if _same(_verdicts(suite), alone) else "NO"
        left = "nothing" if not suite["left"] else ", ".join(suite["left"])
        back = {True: "yes", False: "NO", None: "-"}[suite["memory_is_back"]]
        took = f"{wall:.0f}" if suite["exit_code"] is not None else f"{wall:.0f}, then cut off"
        gpu = number(suite["gpu_seconds"], ".0f")
        rows.append([WAYS[name], len(suite["configs"]), took, number(ratio, ".2f"), gpu, same, left, back])
    heads = ["way", "tasks", "wall clock, s", "of the first", "GPU-seconds", "same verdicts", "left", "GPU memory back"]
    yield from table(heads, rows)
    if base and (shared := found.get("shared")) and _verdicts(shared).keys() == _verdicts(base).keys():
        part = shared["wall_seconds"] / base["wall_seconds"]
        yield f"Sharing the GPU takes {part:.2f} of the wall clock ({_met(part <= SHARED_PART)}: {SHARED_PART:.2f})."
    yield from per_config({name: by_server(suite["configs"]) for name, suite in found.items()})
    for name, suite in found.items():
        for config in suite["configs"]:
            if config["verdict"] != "pass":
                yield f"- {WAYS[name]}, {config['id']}: {config['verdict']}: {config['reason'].splitlines()[0][:300]}"
        yield from (f"- {WAYS[name]}, {config}: skipped: {why}" for config, why in suite["skipped"].items())
    yield ""


def per_config(found: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """From nothing to the verdict, config by config."""
    rows = []
    for server in sorted({server for way in found.values() for server in way}):
        for name, way in found.items():
            if row := way.get(server):
                figures = (number(row[key], spec) for key, spec in (("accuracy", ".4f"), ("acceptance_length", ".2f")))
                rows.append([server, name, *figures, *(number(row[key]) for key in ("startup", "asking", "seconds"))])
    yield from table(["config", "way", "accuracy", "accepted", "start, s", "asking, s", "to the verdict, s"], rows)


def starts(records: HostRecords) -> Iterator[str]:
    """Where the time of each start went."""
    found = [(name, start) for name, start in starts_below(records.records) if start.total is not None]
    if not found:
        return
    yield "## Where a start's time goes"
    yield ""
    yield "Seconds; compile and graphs are part of the engine's. Compiled before: found in an earlier start's cache."
    rows = [
        [
            _server(name),
            *map(number, (s.total, s.imports, s.weights, s.engine, s.compile, s.graphs, s.server)),
            "yes" if s.compiled_before else "no",
        ]
        for name, s in found
    ]
    heads = ["server", "start", "imports", "weights", "engine", "compile", "graphs", "server", "compiled before"]
    yield from table(heads, rows)


def repeats(records: HostRecords) -> Iterator[str]:
    """Noise, what calibrate proposes, and whether the paired gate tells configs from bf16."""
    folder = records.records / "calibrate"
    found = judged(folder) if folder.is_dir() else {}
    if not found:
        return
    yield "## The same questions again and again"
    rows = []
    for name, facts in found.items():
        own = facts["noise"]
        accuracies = ", ".join(f"{accuracy:.4f}" for accuracy in own["accuracies"])
        deviations = f"{own['deviation']:.4f}", f"{own['deviation_by_chance']:.4f}"
        proposed = own["threshold"], own["tolerance"], f"{own['drop_seen_paired']:.4f}"
        flips = f"{own['flips_between_runs']:.1f}"
        rows.append([name, own["questions"], accuracies, *deviations, flips, *proposed])
    heads = ["config", "questions", "accuracy of each run", "deviation", "by chance", "flips between runs"]
    yield from table([*heads, "threshold", "tolerance", "loss the paired gate sees"], rows)
    rows = []
    for name, facts in found.items():
        for place, one in enumerate(facts.get("against_bf16", ()), 1):
            rows.append([name, place, f"{one['flips']:.1f}", number(one["expected"]), one["changed"]])
            rows[-1] += [f"{100 * one['loss']:+.2f}", f"{one['p_value']:.2g}", one["verdict"]]
    if rows:
        yield "Each run against the runs of bf16, itself left out:"
        yield from table(["config", "run", "flips", "expected", "changed", "loss, points", "p", "verdict"], rows)
    for name, facts in found.items():
        if gate := facts.get("gate"):
            yield f"- the paired gate on {name}: {gate['verdict']} after {gate['passes']} of 3 passes"
    yield ""


def red(records: HostRecords) -> Iterator[str]:
    """The model that must go red."""
    suite = records.suite("red")
    if not suite:
        return
    yield "## A damaged model"
    yield ""
    yield f"{records.log('damage').strip()}; exit code {suite['exit_code']}."
    rows = [
        [config["id"], number(config["accuracy"], ".4f"), number(config["floor"], ".4f"), config["verdict"]]
        for config in suite["configs"]
    ]
    yield from table(["config", "accuracy", "floor", "verdict"], rows)


def checks(title: str, name: str) -> Callable[[HostRecords], Iterator[str]]:
    def section(records: HostRecords) -> Iterator[str]:
        found = records.suite(name).get("checks", [])
        if found:
            yield f"## {title}"
            yield from table(
                ["check", "holds", "seen"], [[c["what"], "yes" if c["held"] else "NO", c["seen"]] for c in found]
            )

    return section


def steps(visits: Sequence[HostRecords]) -> Iterator[str]:
    """What was run."""
    found = [(count, step) for count, visit in enumerate(visits, 1) for step in visit.steps()]
    if not found:
        return
    yield "## Steps"
    rows = []
    for count, step in found:
        outcome = (
            "left out" if step["exit"] == -1 else "ran out of time" if step["exit"] in (124, 137) else step["exit"]
        )
        # Where the script lay and where its files went is that host's own.
        command = re.sub(r"\S*/(benchmarks/gpu_host\.sh(?: --cpu-rehearsal)?) \S+", r"\1 OUT", step["command"])
        visit = [count] if len(visits) > 1 else []
        rows.append([*visit, step["name"], f"{step['seconds']:.0f}", outcome, f"`{command}`"])
    yield from table([*(["visit"] if len(visits) > 1 else []), "step", "seconds", "exit code", "command"], rows)


SECTIONS = (
    throughput,
    ways,
    starts,
    repeats,
    red,
    checks("Nothing is left", "leftovers"),
    checks("Who gets which GPU", "several-gpus"),
)
"""But for hosts and steps, which are told of every visit."""


def _met(holds: bool) -> str:
    return "meets the target" if holds else "MISSES the target"


def _verdicts(suite: dict[str, Any]) -> dict[str, str]:
    return {config["id"]: config["verdict"] for config in suite["configs"]}


def _same(some: dict[str, str], all_of_them: dict[str, str]) -> bool:
    """Whether what ran in both came to the same."""
    return bool(some) and all(all_of_them.get(config, verdict) == verdict for config, verdict in some.items())


def _server(path: str) -> str:
    """Name a server by what was run and its config, without the run's own folder."""
    return re.sub(r"/\d{8}T\d{6}Z-\w+", "", path.removeprefix("suites/"))


def render(visits: Sequence[HostRecords]) -> str:
    """Render the whole page."""
    return _page([INTRO, *hosts(visits), *sections(visits), *steps(visits)])


def sections(visits: Sequence[HostRecords]) -> Iterator[str]:
    """Give each section with what every visit has of it."""
    for section in SECTIONS:
        found = {count: lines for count, visit in enumerate(visits, 1) if (lines := list(section(visit)))}
        for place, (count, (title, *lines)) in enumerate(found.items()):
            yield from [title] * (place == 0)
            yield from ["", f"### Visit {count}", ""] * (len(visits) > 1)
            yield from lines


def _page(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("visits", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "benchmarks.md", help="(%(default)s)")
    parser.add_argument("--short", action="store_true", help="print it, without hosts and commands, and write nothing")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-"))) for _ in arguments.visits
        )
        visits = [HostRecords.of(folder, each) for folder, each in zip(arguments.visits, scratch, strict=True)]
        if arguments.short:
            print(_page(list(sections(visits))))
            for step in (step for visit in visits for step in visit.steps()):
                print(f"{step['name']:24} {step['seconds']:7.1f} s of {step['limit']:4}, exit {step['exit']}")
            return
        arguments.to.write_text(render(visits), encoding="utf-8")
        print(f"{arguments.to}: written")


if __name__ == "__main__":
    main()
