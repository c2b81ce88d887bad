"""What is left after a normal stop, a killed API server and a cancelled job: `leftovers.py CONFIGS FOLDER`.

Three suites share the GPU; a fourth, which wants all of it, waits in line for them and is cancelled while its server
starts. FOLDER/leftovers.json is written after every check.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks import Checks
from gpu_watch import GpuWatch
from prepare_configs import whole_gpu, without_baseline
from suite_process import SuiteProcess

START_SECONDS = 240.0
"""For a start with three neighbours."""
STOP_SECONDS = 8.0
"""What CI gives a cancelled job before it kills it."""
GONE_SECONDS = 15.0
ANSWERS = 1
"""So many replies, and the server is in the middle of its work."""


def poll(holds: Callable[[], Any], seconds: float, suite: SuiteProcess | None = None) -> float | None:
    """Wait for something that a suite does; return how long it took, None where it did not come about."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if holds():
            return time.monotonic() - began
        if suite is not None and suite.process.poll() is not None:
            return None
        time.sleep(0.1)
    return None


class Leftovers:
    """The suites and what is tried with each."""

    def __init__(self, configs: Path, folder: Path, watch: GpuWatch) -> None:
        self.checks = Checks(path=folder / "leftovers.json")
        self._configs = configs
        self._folder = folder
        self._watch = watch

    def suite(self, name: str, *, whole: bool = False) -> SuiteProcess:
        """Start a suite on the eager config under a name of its own, so that its lease can be told from others."""
        text = (self._configs / "gpu-kit" / "eager.yaml").read_text(encoding="utf-8")
        if name != "normal":  # a rehearsal asks so few that it would be over before it is disturbed
            text = re.sub(r"^num_questions:.*$", "num_questions: 60", text, flags=re.MULTILINE)
        text = without_baseline(whole_gpu(text) if whole else text)
        (self._configs / f"{name}.yaml").write_text(text, encoding="utf-8")
        listed = self._configs / f"{name}.txt"
        listed.write_text(f"{name}.yaml\n", encoding="utf-8")
        return SuiteProcess(listed, self._folder / name)

    def normal_stop(self, suite: SuiteProcess) -> None:
        """A run that ends by itself."""
        code = suite.wait(START_SECONDS + 120)
        self.checks.check("a normal end: exit code 0", code == 0, f"exit {code}")
        self._nothing_left("a normal end", suite)

    def killed_server(self, suite: SuiteProcess) -> None:
        """SIGKILL to the API server alone, which leaves its engine without a parent."""
        asking = suite.await_samples(ANSWERS, START_SECONDS)
        server, servers = suite.api_server(), suite.servers()
        names = ", ".join(sorted(process.name() for process in servers if process.is_running()))
        self.checks.check("SIGKILL of the API server: while it is asked", bool(asking and server), names)
        if server is None:
            return
        server.kill()
        killed = time.monotonic()
        code = suite.wait(60)
        seconds = time.monotonic() - killed
        self.checks.check(
            "SIGKILL of the API server: an outage, exit code 75", code == 75, f"exit {code} {seconds:.1f} s later"
        )
        self._nothing_left("SIGKILL of the API server", suite, {process.pid for process in servers})

    def cancelled(self, suite: SuiteProcess) -> None:
        """SIGTERM to pytest while it asks."""
        asking = suite.await_samples(ANSWERS, START_SECONDS)
        self.checks.check("SIGTERM to pytest: while it asks", asking, f"{ANSWERS} answers")
        self._cancel("SIGTERM to pytest", suite)

    def waits_in_line(self, suite: SuiteProcess, others: list[SuiteProcess]) -> None:
        """A config that wants the whole GPU waits for the shares, then is cancelled while its server starts."""

        def log() -> str:
            paths = list(suite.results.rglob("server.log"))
            return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)

        if self._watch.gpus:
            waited = poll(lambda: "waiting for GPUs" in log(), 60, suite)
            said = next((line for line in log().splitlines() if "waiting for GPUs" in line), "nothing")
            self.checks.check("a whole GPU: waits for those who share it", waited is not None, said)
            early = any(one.process.poll() is None for one in others) and bool(suite.servers())
            self.checks.check(
                "a whole GPU: no server before they are done", not early, f"{len(suite.servers())} processes"
            )
        for one in others:
            one.process.wait(START_SECONDS + 180)
        took = poll(suite.servers, 60, suite)
        self.checks.check("a whole GPU: starts once they are done", took is not None, f"{took or -1:.1f} s later")
        poll(lambda: "Initializing a V1 LLM engine" in log(), 90, suite)
        self._cancel("SIGTERM to pytest while a server starts", suite)

    def _cancel(self, what: str, suite: SuiteProcess) -> None:
        pids = {process.pid for process in suite.servers()}
        began = time.monotonic()
        suite.process.send_signal(signal.SIGTERM)
        code = suite.wait(30)
        seconds = time.monotonic() - began
        self.checks.check(f"{what}: exit code 2", code == 2, f"exit {code}")
        self.checks.check(f"{what}: within {STOP_SECONDS:g} s", seconds < STOP_SECONDS, f"{seconds:.1f} s")
        record = suite.record
        finished = record is not None and '"finished": null' not in (record / "run.json").read_text(encoding="utf-8")
        self.checks.check(f"{what}: its record is written", finished, str(record and record.name))
        self._nothing_left(what, suite, pids)

    def _nothing_left(self, what: str, suite: SuiteProcess, pids: Set[int] = frozenset()) -> None:
        poll(lambda: not suite.left(), GONE_SECONDS)
        left = [f"{process.pid} {process.name()}" for process in suite.left()]
        self.checks.check(f"{what}: no process left", not left, ", ".join(left) or "none")
        if self._watch.gpus:
            held = poll(lambda: not pids & self._watch.pids(), GONE_SECONDS)
            self.checks.check(
                f"{what}: none of them holds GPU memory", held is not None, str(pids & self._watch.pids())
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path, help="the folder that prepare_configs.py made")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--one-by-one", action="store_true", help="for a CPU, where there is nothing to share")
    arguments = parser.parse_args()
    watch = GpuWatch()
    tries = Leftovers(arguments.configs, arguments.folder, watch)
    cases = {"normal": tries.normal_stop, "killed": tries.killed_server, "cancelled": tries.cancelled}
    with watch:
        if arguments.one_by_one:
            for name, case in cases.items():
                with tries.suite(name) as suite:
                    case(suite)
        else:
            side_by_side(tries, cases)
    for uuid, before in watch.before.items():
        after = watch.after[uuid]
        seen = (
            f"{before / 2**20:.0f} MiB before, {watch.peak.get(uuid, 0) / 2**20:.0f} at most, {after / 2**20:.0f} after"
        )
        tries.checks.check("the GPU's memory is back", watch.is_back, seen)
    return min(tries.checks.failed, 1)


def side_by_side(tries: Leftovers, cases: Mapping[str, Callable[[SuiteProcess], None]]) -> None:
    with ThreadPoolExecutor(max_workers=4) as pool:
        suites = {name: tries.suite(name) for name in cases}
        try:
            done = [pool.submit(case, suites[name]) for name, case in cases.items()]
            # The shares must be taken before the one who wants it all stands in line.
            poll(lambda: all(suite.servers() or suite.process.poll() is not None for suite in suites.values()), 60)
            with tries.suite("waiter", whole=True) as waiter:
                tries.waits_in_line(waiter, list(suites.values()))
            for one in done:
                one.result()
        finally:
            for suite in suites.values():
                suite.__exit__()


if __name__ == "__main__":
    sys.exit(main())
