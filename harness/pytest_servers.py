"""Pytest plugins: one server for all tasks of a config while their tests follow each other, on one worker or more."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.ahead import Ahead, worker, workers
from harness.config import ModelConfig
from harness.config_lists import ListedConfig
from harness.durations import Durations, MeasuredRun, key_of
from harness.gates.threshold import Counts, Verdict
from harness.placement import gpus_for
from harness.records import EvalResult, RunRecord, now
from harness.reports.live import LiveLine
from harness.reports.session import CONFIG_ID, FAULT
from harness.serving import RunOptions, Serving
from harness.suite import Suite

if TYPE_CHECKING:
    from harness.scheduling import ConfigScheduling


INTERRUPTED_SECONDS = 6.0
"""Stopping a server takes less; CI kills 8 s after its signal."""


class KeptServers:
    """Gives each test the server of its config, and stops it unless the next test asks the same one."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._serving: Serving | None = None
        self._id: str | None = None
        self._next_id: str | None = None
        self._kept: list[str] = []
        self._ahead: Ahead | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Let a server's imports begin while tests are collected and other workers come up."""
        options = self._suite.options
        runs_tests = session.config.getoption("dist", "no") == "no"  # and not the process that deals them out
        servers = {entry.server_id: entry.config for entry in self._suite.listed if entry.runs}
        if options.ahead is None or options.base_url is not None or not runs_tests or not servers:
            return
        self._ahead = options.ahead
        first = list(servers.values())[worker() % len(servers)]
        candidates = gpus_for(first, options.gpus, serve_command=options.serve_command)
        self._ahead.ready_for(first, serve_command=options.serve_command, gpus=candidates)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> None:
        callspec = getattr(nextitem, "callspec", None)
        self._next_id = callspec.params["listed"].server_id if callspec and "listed" in callspec.params else None

    @pytest.fixture
    def serving(
        self,
        listed: ListedConfig,
        run_record: RunRecord,
        run_options: RunOptions,
        live_line: LiveLine,
        request: pytest.FixtureRequest,
    ) -> Iterator[Serving]:
        """The config's server, not yet started where its task is the first."""
        self._ahead = run_options.ahead
        if self._ahead is not None:
            following = _following(request.session.items, listed)
            # A worker of pytest-xdist is told its next config late: what it runs is in all likelihood past the others'.
            self._ahead.follow(following[workers() - 1 :], more=bool(following) or workers() > 1)
        if self._serving is None or self._id != listed.server_id:
            self.stop()
            log_path = run_record.folder / listed.server_id / "server.log"
            self._serving, self._id = Serving(listed.config, log_path, run_options), listed.server_id
        self._serving.say = live_line.stage
        yield self._serving
        if self._next_id != self._id:
            self.stop()

    def pytest_unconfigure(self) -> None:
        # After -x or an interruption the next test that was announced does not come.
        try:
            self.stop()
        finally:
            if self._ahead is not None:
                self._ahead.stop()

    def stop(self) -> None:
        """Stop whatever is kept."""
        serving, self._serving, self._id = self._serving, None, None
        if serving is None:
            return
        serving.stop()
        if serving.kept is not None:
            self._kept.append(serving.kept)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._kept:
            terminalreporter.write_line(f"kept: {line}")


def _following(items: Sequence[pytest.Item], listed: ListedConfig) -> list[ModelConfig]:
    """List the configs of the servers that come after one's own, in the list's order."""
    found = (getattr(item, "callspec", None) for item in items)
    entries: list[ListedConfig] = [spec.params["listed"] for spec in found if spec and "listed" in spec.params]
    servers = {entry.server_id: entry.config for entry in entries if entry.runs}
    ids = list(servers)
    place = ids.index(listed.server_id) if listed.server_id in servers else len(ids)
    return [servers[each] for each in ids[place + 1 :]]


class Pause(pytest.Item):
    """What a worker of pytest-xdist knows as its next test while none is given to it."""

    def runtest(self) -> None: ...


class Pauses:
    """Ends each worker's list of tests with a pause that nobody else counts; see `harness.scheduling`."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # The list has been sent by now.
        session.items.append(Pause.from_parent(session, name="pause"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if isinstance(item, Pause) else None


def end_with(pid: int) -> None:
    """Have this process get SIGTERM once another is gone, where the system can tell.

    A worker of pytest-xdist whose pytest was killed goes on with its config for 5 s and more, and keeps GPUs from those
    who still have somebody to report to.
    """
    try:
        other = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return

    def wait() -> None:
        select.select([other], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="accuracy-gate-parent", daemon=True).start()


class MeasuredRuns:
    """In the process that the user started: deals configs to workers by what they took before, and notes it anew."""

    def __init__(self, suite: Suite, record: RunRecord, durations: Durations) -> None:
        self._suite = suite
        self._record = record
        self._durations = durations
        self._begun = now()
        self._workers: list[Any] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        self._workers.append(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ConfigScheduling | None:
        if config.getvalue("dist") == "each":
            return None
        from harness.scheduling import ConfigScheduling

        return ConfigScheduling(config, log, self._seconds())

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Call a worker's death what it is, and leave a row of the config that it was busy with."""
        report.user_properties.append((FAULT, Verdict.INFRASTRUCTURE.value))
        dying = [entry for entry in self._suite.listed if f"[{_parametrized(entry)}]" in crashitem]
        for entry in sorted(dying, key=lambda entry: len(entry.id))[-1:]:
            report.user_properties.append((CONFIG_ID, entry.id))
            # One that was only interrupted has written its own.
            if not (self._record.folder / entry.folder / "result.json").exists():
                result = _lost(entry, str(report.longrepr), self._begun)
                self._record.config(entry.folder).write_result(result)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            self._await_records()
        self._note_durations()

    def _await_records(self) -> None:
        """Let interrupted workers write what they know, before the run is summed up without it."""
        deadline = time.monotonic() + INTERRUPTED_SECONDS
        while time.monotonic() < deadline and any(_is_busy(worker) for worker in self._workers):
            time.sleep(0.05)

    def _note_durations(self) -> None:
        measured_start: set[str] = set()
        for entry in self._suite.listed if self._suite.options.base_url is None else ():
            result = _read(self._record.folder / entry.folder / "result.json")
            if result.get("started", "") < self._begun:
                continue  # an earlier run's that is resumed
            run = _measured(result, with_start=entry.server_id not in measured_start)
            if run is not None:
                measured_start.add(entry.server_id)
                self._durations.record(key_of(entry, self._gpu(entry)), run)

    def _seconds(self) -> Mapping[str, tuple[str, float]]:
        """Tell, by the names of its tests, each server and how long all of them take with one start."""
        seconds: dict[str, float] = {}
        for entry in self._suite.listed:
            if not entry.runs:
                continue
            took = self._durations.estimate(key_of(entry, self._gpu(entry)), entry.config)
            seconds[entry.server_id] = seconds.get(entry.server_id, took.startup) + took.asking
        return {
            _parametrized(entry): (entry.server_id, seconds.get(entry.server_id, 0.0)) for entry in self._suite.listed
        }

    def _gpu(self, entry: ListedConfig) -> str:
        options = self._suite.options
        gpus = gpus_for(entry.config, options.gpus, serve_command=options.serve_command)
        return gpus[0].name if gpus else "cpu"


def _is_busy(worker: Any) -> bool:
    """Whether pytest-xdist's handle of a worker has not heard of its end."""
    return not hasattr(worker, "workeroutput") and not worker.channel.isclosed()


def _parametrized(entry: ListedConfig) -> str:
    """Spell an id as pytest does in a test's name."""
    return entry.id.encode("unicode_escape").decode("ascii")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        read: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read


def _measured(result: Mapping[str, Any], *, with_start: bool) -> MeasuredRun | None:
    """Take what a finished evaluation says of its seconds; None where it was cut short or answered from a store."""
    counts, timings = result["counts"], result["timings"]
    asked = counts["asked"] > 0 and timings["asking"] is not None
    if result["verdict"] == Verdict.INFRASTRUCTURE or not asked or counts.get("reused"):
        return None
    startup = timings["startup"] if with_start else None
    return MeasuredRun(startup=startup, asking=timings["asking"], questions=counts["asked"])


def _lost(entry: ListedConfig, reason: str, started: str) -> EvalResult:
    config = entry.config
    scored: Sequence[float | None] = (config.accuracy_threshold, config.tolerance, float(config.floor))
    threshold, tolerance, floor = (None, None, None) if config.task == "perplexity" else scored
    return EvalResult(
        config_id=entry.id,
        model_name=config.model_name,
        task={"name": config.task},
        verdict=Verdict.INFRASTRUCTURE,
        reason=reason,
        counts=Counts(),
        threshold=threshold,
        tolerance=tolerance,
        floor=floor,
        server={"backend": config.backend},
        started=started,
        finished=now(),
    )
