"""The suite run as a user runs it: a pytest of its own on a list made for one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.records import read_samples

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class SuiteRun:
    """The suite run as a user runs it, in a process of its own, on a list made for one test."""

    folder: Path
    mark: str
    process: subprocess.Popen[str]

    @property
    def record(self) -> Path:
        """The run's folder; StopIteration until there is one."""
        return next((self.folder / "results").glob("*/run.json")).parent

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

    def verdict(self) -> str:
        try:
            return str(self.result()["verdict"])
        except (OSError, ValueError, StopIteration):
            return f"exit {self.process.returncode}"

    def servers_go_away(self) -> bool:
        """Tell whether no server is left within 15 s."""
        deadline = time.monotonic() + 15
        while left := self.servers():
            if time.monotonic() > deadline:
                return not left
            time.sleep(0.05)
        return True

    def assert_nothing_is_left(self) -> None:
        """No process of a server, and every file of the record whole."""
        assert not self.servers()
        for path in self.record.rglob("*.json"):
            json.loads(path.read_text())
        for path in self.record.rglob("samples.jsonl"):
            assert path.read_bytes().endswith(b"\n")
        assert self.result()["counts"]["asked"] == len(self.samples())
        assert json.loads((self.record / "run.json").read_text())["finished"]
        assert not list(self.record.rglob(".*")), "a temporary file is left"
        assert (self.folder / "junit.xml").is_file()

    def kill(self) -> None:
        """End the run and whatever it left."""
        self.process.kill()
        self.process.wait()
        for left in self.servers():
            left.kill()

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


def start_suite(
    folder: Path, config: str, *more: str, env: Mapping[str, str] | None = None, wrap: tuple[str, ...] = ()
) -> SuiteRun:
    """Start the suite on one config of the given text; `wrap` is put before the command."""
    (folder / "config.yaml").write_text(config)
    (folder / "list.txt").write_text("config.yaml\n")
    mark = uuid.uuid4().hex
    command = [
        *wrap,
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--config-list-file={folder / 'list.txt'}",
    ]
    process = subprocess.Popen(
        [*command, f"--results-dir={folder / 'results'}", f"--junitxml={folder / 'junit.xml'}", *more],
        cwd=ROOT,
        env={**os.environ, **(env or {}), "ACCURACY_GATE_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return SuiteRun(folder=folder, mark=mark, process=process)
