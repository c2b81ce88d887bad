"""Pytest plugins: a verdict on each report, the exit code of the session, `run.json`, the table at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import psutil
import pytest

from harness.errors import AccuracyGateError, GateFailed, InfrastructureError
from harness.gates.threshold import Verdict
from harness.records import Row
from harness.reports.terminal import reading_notes, table
from harness.servers.leftovers import sweep_dead_runs
from harness.suite import EXIT_INFRASTRUCTURE, RunInfo

VERDICT = "verdict"


class VerdictReports:
    """Says on each failed report of the suite whether the model or the machinery failed; runs where tests run."""

    def __init__(self, suite_file: Path) -> None:
        self._suite_file = suite_file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if item.path == self._suite_file and call.excinfo is not None:
            fault = call.excinfo.value
            if isinstance(fault, AccuracyGateError):
                report.longrepr = f"{type(fault).__name__}: {fault}"
            verdict = _verdict(fault)
            if verdict is not None:
                report.user_properties.append((VERDICT, verdict.value))
        return report


def _verdict(fault: BaseException) -> Verdict | None:
    """Classify what ended a test; None for a fault of the harness itself, which must stay loud."""
    if isinstance(fault, GateFailed):
        return Verdict.REGRESSION
    # pytest-timeout ends a test with pytest.fail: a config that hung says nothing about its model.
    return Verdict.INFRASTRUCTURE if isinstance(fault, InfrastructureError | pytest.fail.Exception) else None


class SessionReport:
    """Sums a session up; runs once, in the controlling process under pytest-xdist."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._failures: list[object] = []
        self._rows: Sequence[Row] = ()
        self._distributed = False

    def pytest_report_header(self) -> list[str]:
        lines = [f"accuracy-gate: {', '.join(map(str, self._info.lists))}; record: {self._info.record.folder}"]
        swept = sweep_dead_runs()
        lines += [f"left by a dead run, killed now: {left}" for left in swept.killed]
        lines += [f"left by a dead run, not to be killed: {left}" for left in swept.survivors]
        return lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self) -> None:
        self._distributed = True

    def pytest_keyboard_interrupt(self) -> None:
        # pytest-xdist kills its workers only 10 s later, by when CI has killed us. Where there are workers, they are
        # the only children: servers are started where tests run.
        for child in psutil.Process().children() if self._distributed else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(dict(report.user_properties).get(VERDICT))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        outages_alone = bool(self._failures) and set(self._failures) == {Verdict.INFRASTRUCTURE.value}
        if exitstatus == pytest.ExitCode.TESTS_FAILED and outages_alone:
            session.exitstatus = EXIT_INFRASTRUCTURE
        self._rows = self._info.finish(int(session.exitstatus))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("accuracy")
        for line in [*table(self._rows), *reading_notes(self._rows)]:
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"record: {self._info.record.folder}")
