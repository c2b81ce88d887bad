"""Who gets which GPU: `several_gpus.py CONFIGS WHOLE FOLDER`, as much of it as this host has GPUs for.

CONFIGS and WHOLE are folders that prepare_configs.py made, the second with --whole-gpu. FOLDER/several-gpus.json is
written after every check.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from checks import Checks
from gpu_watch import GpuWatch
from leftovers import poll
from prepare_configs import without_baseline
from suite_process import SuiteProcess

from harness.gpus.inventory import Gpu

QUESTIONS = 200
RUN_SECONDS = 240.0


class SeveralGpus:
    """The checks, on the GPUs that there are."""

    def __init__(self, shared: Path, whole: Path, folder: Path, watch: GpuWatch) -> None:
        self.checks = Checks(path=folder / "several-gpus.json", facts={"gpus": [gpu.uuid for gpu in watch.gpus]})
        self._shared = shared
        self._whole = whole
        self._folder = folder
        self._watch = watch

    def suite(self, name: str, configs: Path, config: str, *more: str, visible: str | None = None) -> SuiteProcess:
        """Start a suite on one config, with fewer questions, under a name of its own."""
        text = (configs / "gpu-kit" / f"{config}.yaml").read_text(encoding="utf-8")
        text = without_baseline(text)
        if "num_questions" not in text:
            text = re.sub(r"^(tolerance:.*)$", rf"\g<1>\nnum_questions: {QUESTIONS}", text, count=1, flags=re.MULTILINE)
        (configs / f"{name}.yaml").write_text(text, encoding="utf-8")
        listed = configs / f"{name}.txt"
        listed.write_text(f"{name}.yaml\n", encoding="utf-8")
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return SuiteProcess(listed, self._folder / name, *more, env=env)

    def too_few(self) -> None:
        """One GPU and a config that wants two."""
        with self.suite("refused", self._whole, "two-gpus", "--require-gpus") as suite:
            code = suite.wait(90)
            said = next((line for line in suite.output.splitlines() if "needs 2 GPUs" in line), "nothing")
            self.checks.check("two GPUs wanted, --require-gpus: refused", code not in (0, None), f"exit {code}: {said}")
        with self.suite("skipped", self._whole, "two-gpus") as suite:
            code = suite.wait(90)
            skips = re.findall(r"\d+ skipped", suite.output)
            self.checks.check("two GPUs wanted: skipped", code == 0 and bool(skips), f"exit {code}: {skips}")

    def in_line(self) -> None:
        """Two runs of one GPU each side by side; one that wants both, before a fourth that wants one."""
        with ExitStack() as stack:

            def start(name: str, config: str) -> SuiteProcess:
                return stack.enter_context(self.suite(name, self._whole, config))

            first, second = start("first", "eager"), start("second", "eager")
            poll(lambda: first.servers() and second.servers(), 60)
            both = start("both", "two-gpus")
            waits = poll(lambda: "waiting for GPUs" in _logs(both), 60, both) is not None
            late = start("late", "eager")
            waits_too = poll(lambda: "is before it in line" in _logs(late), 60, late) is not None
            self.checks.check("two GPUs wanted, both taken: waits", waits, _waiting(both))
            self.checks.check("one GPU wanted after it: waits behind it", waits_too, _waiting(late))
            codes = first.wait(RUN_SECONDS), second.wait(RUN_SECONDS)
            taken = [_leased(first), _leased(second)]
            apart = all(len(one) == 1 for one in taken) and taken[0] != taken[1]
            self.checks.check("two runs at once: a GPU each, told apart by UUID", apart, f"{taken}, exits {codes}")
            got = poll(both.servers, 60, both)
            starved = bool(late.servers())
            self.checks.check(
                "two GPUs wanted: not starved", got is not None and not starved, f"{got or -1:.1f} s later"
            )
            late.process.send_signal(signal.SIGTERM)
            code = both.wait(RUN_SECONDS)
            all_gpus = {gpu.uuid for gpu in self._watch.gpus[:2]}
            self.checks.check("tensor-parallel-size 2: takes both", set(_leased(both)) == all_gpus, f"exit {code}")

    def kept_to_one(self, gpu: Gpu) -> None:
        """`--gpus 1`, and CUDA_VISIBLE_DEVICES=1, side by side on that GPU."""
        untouched = [other.uuid for other in self._watch.gpus if other.uuid != gpu.uuid]
        before = self._watch.used()
        with (
            self.suite("chosen", self._shared, "eager", "--gpus", "1") as chosen,
            self.suite("visible", self._shared, "eager", visible="1") as visible,
        ):
            answering = chosen.await_samples(1, RUN_SECONDS)
            now = self._watch.used()
            grown = {uuid: now[uuid] - before[uuid] for uuid in untouched if uuid in now}
            for suite, how in ((chosen, "--gpus 1"), (visible, "CUDA_VISIBLE_DEVICES=1")):
                code = suite.wait(RUN_SECONDS)
                leased = _leased(suite)
                self.checks.check(f"{how}: keeps to that GPU", leased == [gpu.uuid], f"{leased}, exit {code}")
        quiet = answering and bool(grown) and all(size < 2**29 for size in grown.values())
        self.checks.check("the other GPUs: nothing is held there", quiet, f"{grown}")


def _logs(suite: SuiteProcess) -> str:
    paths = suite.results.rglob("server.log")
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def _waiting(suite: SuiteProcess) -> str:
    return next((line for line in _logs(suite).splitlines() if "waiting for GPUs" in line), "nothing")


def _leased(suite: SuiteProcess) -> list[str]:
    for path in suite.results.rglob("result.json"):
        found: list[str] = json.loads(path.read_text(encoding="utf-8"))["server"].get("lease", {}).get("gpus", [])
        return found
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shared", type=Path)
    parser.add_argument("whole", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with GpuWatch() as watch:
        tries = SeveralGpus(arguments.shared, arguments.whole, arguments.folder, watch)
        if len(watch.gpus) == 1:
            tries.too_few()
        elif len(watch.gpus) > 1:
            tries.in_line()
            tries.kept_to_one(watch.gpus[1])
        else:
            print("no GPU here: nothing to check")
    return min(tries.checks.failed, 1)


if __name__ == "__main__":
    sys.exit(main())
