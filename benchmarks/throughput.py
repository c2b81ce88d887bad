"""The harness against a plain loop of aiohttp posts, on one running server: `throughput.py --base-url URL --out FILE`.

The plain loop sends all questions at once and leaves the queue to the library's connection limit, 100 by default, as
evaluation scripts do; it keeps nothing but the replies. After an unmeasured pass that fills the server's prefix cache
both are tried at every concurrency, then in rounds: harness, loop at its best, loop at its default, and the first two
again the other way round, so that a server that drifts meets both alike. FILE is written after every run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from harness.backends.base import GenerateRequest
from harness.backends.openai_http import body_of
from harness.config import ModelConfig
from harness.standalone import api_key, only_model
from harness.tasks.build import build_task

LIBRARY_DEFAULT = 100
"""Connections of an aiohttp session that is told nothing."""
RUN_SECONDS = 120.0
Who = Literal["harness", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over the questions."""

    who: Who
    concurrency: int
    questions: int
    asking: float
    """Seconds from the first request to the last reply."""
    answered: int
    accuracy: float | None
    wall: float
    """Seconds of the whole process."""
    cpu: float
    """Seconds of processor time of the whole process."""
    peak_memory: int
    """Bytes."""

    @property
    def per_second(self) -> float:
        return self.answered / self.asking


@dataclass(kw_only=True)
class Report:
    """What is on disk."""

    path: Path
    facts: dict[str, Any]
    empty: list[Run] = field(default_factory=list)
    """The harness asking one question: what it needs before it asks."""
    sweep: list[Run] = field(default_factory=list)
    rounds: list[list[Run]] = field(default_factory=list)
    """Of five runs: harness, plain at its best, plain at its default, plain at its best, harness."""

    def write(self) -> None:
        def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
            return [{**asdict(run), "per_second": run.per_second} for run in runs]

        document = {
            **self.facts,
            "empty": rows(self.empty),
            "sweep": rows(self.sweep),
            "rounds": [rows(one) for one in self.rounds],
        }
        self.path.write_text(json.dumps(document, indent=2), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The server and what it is asked."""

    base_url: str
    model: str
    questions: int
    max_tokens: int
    data_dir: Path | None

    def run(self, who: Who, concurrency: int, questions: int | None = None) -> Run:
        """Ask everything in a process of its own, whose times and memory the kernel adds up."""
        asked = questions or self.questions
        with tempfile.TemporaryDirectory(prefix="throughput-") as scratch:
            out = Path(scratch) / "figures.json"
            began = time.perf_counter()
            child = subprocess.Popen(self._command(who, concurrency, asked, out), stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            wall = time.perf_counter() - began
            if child.returncode != 0:
                raise RuntimeError(f"{who} at {concurrency}: exit {child.returncode}")
            figures = json.loads(out.read_text(encoding="utf-8"))
        run = Run(
            who=who,
            concurrency=concurrency,
            questions=asked,
            asking=figures["latency"],
            answered=figures["num_questions"] - figures["errors"],
            accuracy=figures.get("accuracy"),
            wall=wall,
            cpu=usage.ru_utime + usage.ru_stime,
            peak_memory=usage.ru_maxrss * 1024,
        )
        print(f"{who:8} {concurrency:5} {run.per_second:8.2f} questions/s, cpu {run.cpu:.1f} s", flush=True)
        return run

    def _command(self, who: Who, concurrency: int, questions: int, out: Path) -> list[str]:
        where = ["--base-url", self.base_url, "--model", self.model, "--max-tokens", str(self.max_tokens)]
        where += ["--data-dir", str(self.data_dir)] if self.data_dir else []
        if who == "plain":
            more = ["--plain", str(concurrency), "--questions", str(questions), "--out", str(out)]
            return [sys.executable, __file__, *where, *more]
        more = ["--max-concurrency", str(concurrency), "--num-questions", str(questions), "--save-results", str(out)]
        return [sys.executable, "-m", "harness.cli", "eval", *where, *more]


def measure(bench: Bench, report: Report, sweep: Sequence[int], default: int, rounds: int, within: float) -> None:
    """Run everything that fits into `within` seconds, the sweep first."""
    deadline = time.monotonic() + within
    print("unmeasured:", end=" ")
    bench.run("plain", default)
    report.empty.append(bench.run("harness", default, 1))
    for place, concurrency in enumerate(sweep):
        order: tuple[Who, Who] = ("plain", "harness") if place % 2 else ("harness", "plain")
        for who in order:
            if time.monotonic() < deadline:
                report.sweep.append(bench.run(who, concurrency))
                report.write()
    plain = [run for run in report.sweep if run.who == "plain"]
    best = max(plain, key=lambda run: run.per_second).concurrency
    report.facts |= {"plain_best": best, "plain_default": LIBRARY_DEFAULT, "harness_default": default}
    ours: tuple[Who, int] = ("harness", default)
    theirs: tuple[Who, int] = ("plain", best)
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        report.rounds.append([bench.run(*each) for each in (ours, theirs, ("plain", LIBRARY_DEFAULT), theirs, ours)])
        report.write()


async def plain_loop(bench: Bench, connections: int) -> dict[str, Any]:
    """Send everything at once through one session."""
    config = ModelConfig(
        model_name=bench.model,
        accuracy_threshold=0.0,
        num_questions=bench.questions,
        max_tokens=bench.max_tokens,
    )
    task = build_task(config, folder=Path.cwd(), data_dir=bench.data_dir)
    key = api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = None if connections == LIBRARY_DEFAULT else aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=600)
    ) as session:

        async def ask(request: GenerateRequest) -> str:
            async with session.post(f"{bench.base_url}/v1/completions", json=body_of(request, bench.model)) as reply:
                text: str = (await reply.json())["choices"][0]["text"]
                return text

        asked = [ask(request) for request in task.requests if isinstance(request, GenerateRequest)]
        began = time.perf_counter()
        replies = await asyncio.gather(*asked, return_exceptions=True)
        latency = time.perf_counter() - began
    errors = [reply for reply in replies if isinstance(reply, BaseException)]
    if errors:
        print(f"plain: {len(errors)} errors, the first {errors[0]!r}", file=sys.stderr)
    return {"latency": latency, "num_questions": len(replies), "errors": len(errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", help="(the only one that the server lists)")
    parser.add_argument("--data-dir", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=1319, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--concurrency", default="256,100,512,1319,64", help="(%(default)s)")
    parser.add_argument("--default", type=int, default=256, help="the harness's own concurrency (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--within", type=float, default=400.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    bench = Bench(
        base_url=arguments.base_url,
        model=arguments.model or asyncio.run(only_model(arguments.base_url, api_key())),
        questions=arguments.questions,
        max_tokens=arguments.max_tokens,
        data_dir=arguments.data_dir,
    )
    if arguments.plain is not None:
        figures = asyncio.run(plain_loop(bench, arguments.plain))
        arguments.out.write_text(json.dumps(figures), encoding="utf-8")
        return
    sweep = [int(one) for one in arguments.concurrency.split(",")]
    report = Report(path=arguments.out, facts={"questions": bench.questions, "model": bench.model})
    measure(bench, report, sweep, arguments.default, arguments.rounds, arguments.within)


if __name__ == "__main__":
    main()
