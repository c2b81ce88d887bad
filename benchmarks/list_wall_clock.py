"""How long a list of configs takes against the least it could take, one after another, spread over GPUs, and ahead.

    python benchmarks/list_wall_clock.py                  the stand-in, once each way
    python benchmarks/list_wall_clock.py --rounds 20 --how alone competing killed
                                                          the last way, again and again, and disturbed
    python benchmarks/list_wall_clock.py --start 3        real vLLM: starts made ahead and plain ones
    python benchmarks/list_wall_clock.py --real           real vLLM: two configs, each way

Two ratios are printed. "On the GPUs": to the seconds for which the list needs a GPU over the GPUs there are. "Least":
to that and the imports of the first servers, before which no GPU has anything to do: no order of work takes less. Where
a run is killed both count what it had used of the GPUs by then. All is measured in one call.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from standin_server import OWNER, WRONG, Times, install

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.ahead import Ahead  # noqa: E402
from harness.config import ModelConfig, load_config  # noqa: E402
from harness.gpus.tickets import VARIABLE as LEASES  # noqa: E402
from harness.records import read_samples  # noqa: E402
from harness.servers.leftovers import VARIABLE as MARK  # noqa: E402
from harness.servers.vllm import vllm_server  # noqa: E402

CONFIG = "model_name: {name}\ntask: smoke\naccuracy_threshold: 0.9\ntolerance: 0.0\nmax_concurrency: 64\n"
PLAIN = ("--prefetch=0",)
"""The stand-in has no weights."""
PATIENCE = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the list."""

    seconds: float
    exit_code: int
    records: Mapping[str, Any]
    """Verdict, counts and every sample, by config."""


class Bench:
    """A folder with a suite, a list and a machine of its own."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = {
            **env,
            LEASES: str(folder / "leases"),
            "STANDIN_RUN": str(folder),
            # What this project's own tests are made with is no part of a user's environment.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        (folder / "tests").mkdir()
        (folder / "configs").mkdir()
        shutil.copy(ROOT / "conftest.py", folder)
        shutil.copy(ROOT / "tests/test_accuracy.py", folder / "tests")
        (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
        self._runs = 0

    def write(self, configs: Mapping[str, str]) -> None:
        for name, text in configs.items():
            (self.folder / "configs" / f"{name}.yaml").write_text(text)
        (self.folder / "configs/list.txt").write_text("".join(f"{name}.yaml\n" for name in configs))

    def start(self, *options: str) -> tuple[Path, float, subprocess.Popen[bytes]]:
        self._runs += 1
        results = self.folder / f"results-{self._runs}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin"]
        with (self.folder / f"pytest-{self._runs}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--config-list-file=list.txt", f"--results-dir={results}", *options],
                cwd=self.folder,
                env={**self.env, OWNER: results.name},
                stdout=log,
                stderr=log,
            )
        return results, time.monotonic(), process

    def finish(self, started: tuple[Path, float, subprocess.Popen[bytes]]) -> Run:
        results, began, process = started
        code = process.wait(PATIENCE)
        seconds = time.monotonic() - began
        return Run(seconds=seconds, exit_code=code, records=records(results))

    def run(self, *options: str) -> Run:
        return self.finish(self.start(*options))

    def seconds_on_gpus(self, results: Path, *, each: float, until: float) -> float:
        """Sum up for how long the servers of a run had a GPU, `each` at most, until a moment of the monotonic clock."""
        lines = [line for gpu in (self.folder / "gpus").iterdir() for line in gpu.read_text().splitlines()]
        began: list[float] = [entry["began"] for entry in map(json.loads, lines) if entry["owner"] == results.name]
        return sum(max(0.0, min(each, until - moment)) for moment in began)

    def servers(self) -> list[int]:
        """The processes of servers that this bench's runs left."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                if MARK in env and env.get("STANDIN_RUN") == str(self.folder) and process.status() != "zombie":
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found


def records(results: Path) -> dict[str, Any]:
    """Read what a run says of each config, less what may differ from run to run: times, ports, GPUs."""
    found: dict[str, Any] = {}
    for path in results.glob("*/**/result.json"):
        result = json.loads(path.read_text())
        samples = sorted(read_samples(path.with_name("samples.jsonl")), key=lambda sample: sample["index"])
        answers = [(sample["index"], sample["status"], sample.get("correct"), sample.get("text")) for sample in samples]
        found[result["config_id"]] = (result["verdict"], result["counts"], answers)
    return found


def standin_configs(count: int) -> dict[str, str]:
    """Write configs that pass, but for one in the middle."""
    names = {f"config-{n:02}": f"stand-in-{n:02}{WRONG if n == count // 2 else ''}" for n in range(count)}
    return {name: CONFIG.format(name=model) for name, model in names.items()}


def check(what: str, run: Run, expected: Run) -> None:
    """Refuse a run that came to something else, which no speed makes up for."""
    if (run.exit_code, run.records) != (expected.exit_code, expected.records):
        differ = [name for name in expected.records if run.records.get(name) != expected.records[name]]
        sys.exit(f"{what}: exit {run.exit_code} for {expected.exit_code}; other records: {', '.join(differ) or 'none'}")


def standin(options: argparse.Namespace, bench: Bench, times: Times) -> None:
    bench.write(standin_configs(options.configs))
    least = options.configs * times.on_gpu / options.gpus
    workers = ("-n", str(options.workers))
    ways = {
        "one after another": PLAIN,
        f"-n {options.workers}": (*workers, *PLAIN),
        f"-n {options.workers} --prestart": ahead(options),
    }
    expected: Run | None = None
    for name, arguments in ways.items() if not options.rounds else ():
        run = bench.run(*arguments)
        expected = expected or run
        check(name, run, expected)
        tell(name, run.seconds, least, times)
    if options.rounds:
        expected = bench.run(*workers, *PLAIN)
        rounds(options, bench, times, expected)


def ahead(options: argparse.Namespace) -> tuple[str, ...]:
    return ("-n", str(options.workers), "--prestart", *PLAIN)


def tell(name: str, seconds: float, on_gpus: float, times: Times) -> None:
    least = on_gpus + times.imports
    say(f"{name}: {seconds:.1f} s, {seconds / on_gpus:.2f} of that on the GPUs, {seconds / least:.2f} of the least")


def rounds(options: argparse.Namespace, bench: Bench, times: Times, expected: Run) -> None:
    """Run the last way again and again, each time alone, against a second run, and against one that is killed."""
    arguments = ahead(options)
    alone = options.configs * times.on_gpu / options.gpus
    ratios: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, seconds: float, on_gpus: float) -> None:
        ratios.setdefault(name, []).append((seconds / on_gpus, seconds / (on_gpus + times.imports)))

    for number in range(1, options.rounds + 1):
        if "alone" in options.how:
            run = bench.run(*arguments)
            check(f"round {number}, alone", run, expected)
            note("alone", run.seconds, alone)
        if "competing" in options.how:
            began = time.monotonic()
            both = [bench.finish(started) for started in [bench.start(*arguments), bench.start(*arguments)]]
            for each in both:
                check(f"round {number}, competing", each, expected)
            note("competing", time.monotonic() - began, 2 * alone)
        if "killed" in options.how:
            note("one killed", *killed(number, options, bench, times, expected))
        say(f"round {number}: " + ", ".join(f"{name} {found[-1][1]:.2f}" for name, found in ratios.items()))
    for name, found in ratios.items():
        on_gpus, least = ([min(each), max(each)] for each in zip(*found, strict=True))
        say(
            f"{name}: {len(found)} rounds, {on_gpus[0]:.2f} to {on_gpus[1]:.2f} of that on the GPUs, "
            f"{least[0]:.2f} to {least[1]:.2f} of the least"
        )


def killed(number: int, options: argparse.Namespace, bench: Bench, times: Times, expected: Run) -> tuple[float, float]:
    """Run two at once and kill one in the middle half of what they would take.

    Returns the seconds, all and on the GPUs.
    """
    began = time.monotonic()
    victim, survivor = bench.start(*ahead(options)), bench.start(*ahead(options))
    alone = options.configs * times.on_gpu / options.gpus
    time.sleep(random.uniform(0.25, 0.75) * 1.2 * (2 * alone + times.imports))
    victim[2].kill()
    used = bench.seconds_on_gpus(victim[0], each=times.on_gpu, until=time.monotonic())
    victim[2].wait(PATIENCE)
    run = bench.finish(survivor)
    check(f"round {number}, one killed", run, expected)
    seconds = time.monotonic() - began
    await_none(bench, number)
    return seconds, alone + used / options.gpus


def await_none(bench: Bench, number: int) -> None:
    deadline = time.monotonic() + 30
    while left := bench.servers():
        if time.monotonic() > deadline:
            sys.exit(f"round {number}: processes of servers are left: {left}")
        time.sleep(0.1)


def starts(pairs: int) -> None:
    """Time real vLLM from its lease until it is ready, plainly and made ahead, in pairs."""
    config = load_config(ROOT / "configs/cpu/smollm2-135m-smoke.yaml")
    ratios = []
    for number in range(1, pairs + 1):
        plain, ahead = start_seconds(config, prestart=False), start_seconds(config, prestart=True)
        ratios.append(ahead / plain)
        say(f"pair {number}: {plain:.1f} s plainly, {ahead:.1f} s made ahead, ratio {ratios[-1]:.2f}")
    say(f"median ratio {statistics.median(ratios):.2f}")


def start_seconds(config: ModelConfig, *, prestart: bool) -> float:
    with ExitStack() as stack:
        prepared = Ahead(prestart=prestart)
        stack.callback(prepared.stop)
        prepared.ready_for(config, serve_command=None, gpus=())
        if prestart and not prepared.await_imports(PATIENCE):
            sys.exit(f"nothing was started ahead: {prepared.facts()}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        began = time.monotonic()
        stack.enter_context(vllm_server(config, folder / "server.log", started_ahead=prepared.take))
        return time.monotonic() - began


def real(bench: Bench) -> None:
    """Run two configs of the CPU's on real vLLM, each way; the machine's cores are all that there is to share."""
    text = (ROOT / "configs/cpu/smollm2-135m-smoke.yaml").read_text()
    bench.write({"a": text, "b": text.replace("num_fewshot: 5", "num_fewshot: 4")})
    first = None
    for name, arguments in {"one after another": PLAIN, "--prestart": ("--prestart",), "-n 2": ("-n", "2")}.items():
        run = bench.run(*arguments)
        first = first or run
        verdicts = {config: found[0] for config, found in run.records.items()}
        say(f"{name}: {run.seconds:.1f} s, {run.seconds / first.seconds:.2f} of one after another, {verdicts}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {"configs": 12, "gpus": 4, "workers": 4, "rounds": 0, "start": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, seconds in {"imports": 4.0, "engine": 3.0, "answers": 2.0}.items():
        parser.add_argument(f"--{name}", type=float, default=seconds)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--how", nargs="+", choices=["alone", "competing", "killed"], default=["alone"])
    options = parser.parse_args(arguments)
    times = Times(imports=options.imports, engine=options.engine, answers=options.answers)
    if options.start:
        starts(options.start)
        return
    with tempfile.TemporaryDirectory(prefix="list-wall-clock-") as name:
        folder = Path(name)
        if options.real:
            real(Bench(folder, {**os.environ, "PYTHONPATH": str(ROOT)}))
        else:
            standin(options, Bench(folder, install(folder, times, options.gpus)), times)


if __name__ == "__main__":
    main()
