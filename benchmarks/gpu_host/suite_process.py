"""One pytest of the suite as a user starts it, and every process that it or its servers leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from harness.servers.leftovers import SUPERVISOR_NAME, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
MARK = "ACCURACY_GATE_BENCHMARK"
POLL_SECONDS = 0.1


class SuiteProcess:
    """Started at once; a context manager that ends it and whatever it left."""

    def __init__(self, config_list: Path, results: Path, *more: str, env: Mapping[str, str] | None = None) -> None:
        self.results = results
        self.command = [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"),
            *(f"--config-list-file={config_list}", f"--results-dir={results}", *more),
        ]
        self._mark = uuid.uuid4().hex
        self._log = results.with_suffix(".log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, **(env or {}), MARK: self._mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C or a limit of ours must not reach it beside the signal that is tried.
                start_new_session=True,
            )

    def __enter__(self) -> SuiteProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        for left in self.left():
            with contextlib.suppress(psutil.Error):
                left.kill()

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def record(self) -> Path | None:
        """The run's folder, once there is one."""
        return next(iter(sorted(self.results.glob("*/run.json"))), Path()).parent if self._has_record() else None

    def _has_record(self) -> bool:
        return any(self.results.glob("*/run.json"))

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; None where it is still running."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def await_samples(self, count: int, seconds: float) -> bool:
        """Wait until so many questions are answered; False where it ended or took too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            lines = sum(path.read_bytes().count(b"\n") for path in self.results.rglob("samples.jsonl"))
            if lines >= count:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def servers(self) -> list[psutil.Process]:
        """List the living processes of its servers: supervisors, API servers, engines."""
        return [process for process in self.left() if VARIABLE in _environment(process)]

    def api_server(self) -> psutil.Process | None:
        """Find the process that a supervisor of its own started."""
        for process in self.servers():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and SUPERVISOR_NAME in " ".join(parent.cmdline()):
                    return process
        return None

    def left(self) -> list[psutil.Process]:
        """List every living process that came from it, itself left out."""
        return [
            process
            for process in psutil.process_iter()
            if process.pid != self.process.pid and _environment(process).get(MARK) == self._mark
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Read the results there are, by config id."""
        results = [json.loads(path.read_text(encoding="utf-8")) for path in self.results.rglob("result.json")]
        return sorted(results, key=lambda result: str(result["config_id"]))


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return {}
        found: Mapping[str, str] = process.environ()
    except psutil.Error:
        return {}
    return found
