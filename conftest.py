"""Pytest wiring of the accuracy suite: options, collection, fixtures, reports."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config_lists import ListedConfig
from harness.durations import Durations
from harness.errors import ConfigError
from harness.pytest_options import add_options, options_of
from harness.pytest_servers import KeptServers, MeasuredRuns, Pauses, end_with
from harness.records import EvalResult, RunRecord
from harness.reports.session import SessionReport, VerdictReports, facts_of, uncaptured_stderr
from harness.reports.terminal import LiveLine
from harness.serving import RunOptions
from harness.suite import RunInfo, Suite, prepare

ROOT = Path(__file__).resolve().parent
SUITE_FILE = ROOT / "tests" / "test_accuracy.py"

SUITE = pytest.StashKey[Suite]()
RECORD = pytest.StashKey[RunRecord]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if not _selected(config):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(SUITE_FILE)]
    signal.signal(signal.SIGTERM, _interrupt)
    # The project's tests turn warnings into errors; a gate must not go red over a dependency's deprecation.
    config.addinivalue_line("filterwarnings", "default")
    collecting = config.option.collectonly
    cwd = config.invocation_params.dir
    try:
        config.stash[SUITE] = prepare(
            config.option.config_list_file,
            suite_root=ROOT,
            cwd=cwd,
            options=options_of(config.option, cwd=cwd, suite_root=ROOT),
            starting=not collecting,
        )
        if not collecting:
            _make_record(config)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


def _selected(config: pytest.Config) -> bool:
    """Plain `pytest` runs the project's own tests; the suite wants its list or its file named."""
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return bool(config.option.config_list_file) or any(path.resolve() == SUITE_FILE for path in named)


def _make_record(config: pytest.Config) -> None:
    config.pluginmanager.register(KeptServers(config.stash[SUITE]), "accuracy-gate-servers")
    config.pluginmanager.register(VerdictReports(SUITE_FILE), "accuracy-gate-verdicts")
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[RECORD] = RunRecord(Path(worker["accuracy_gate_run"]))
        config.pluginmanager.register(Pauses(), "accuracy-gate-pauses")
        end_with(os.getppid())
        return
    record = RunRecord.create(config.invocation_params.dir / config.option.results_dir)
    config.stash[RECORD] = record
    config.pluginmanager.register(SessionReport(RunInfo(record, config.stash[SUITE])), "accuracy-gate-session")
    measured = MeasuredRuns(config.stash[SUITE], record, Durations(ROOT / ".accuracy-gate" / "durations.json"))
    config.pluginmanager.register(measured, "accuracy-gate-durations")


def _interrupt(signum: int, frame: object) -> None:
    # A cancelled job gets SIGTERM, which kills pytest without teardown: the server would be orphaned.
    raise KeyboardInterrupt(signal.Signals(signum).name)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    record = node.config.stash.get(RECORD, None)
    if record is not None:
        node.workerinput["accuracy_gate_run"] = str(record.folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path == SUITE_FILE and SUITE not in config.stash else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "listed" in metafunc.fixturenames:
        listed = metafunc.config.stash[SUITE].listed
        metafunc.parametrize("listed", listed, ids=[entry.id for entry in listed])


@pytest.fixture
def run_record(pytestconfig: pytest.Config) -> RunRecord:
    return pytestconfig.stash[RECORD]


@pytest.fixture
def run_options(pytestconfig: pytest.Config) -> RunOptions:
    return pytestconfig.stash[SUITE].options


@pytest.fixture
def live_line(listed: ListedConfig, pytestconfig: pytest.Config) -> Iterator[LiveLine]:
    with uncaptured_stderr(pytestconfig) as stream:
        line = LiveLine(listed.id, stream)
        yield line
        line.close()


@pytest.fixture
def record_result(request: pytest.FixtureRequest) -> Callable[[EvalResult], None]:
    def record(result: EvalResult) -> None:
        # Not record_property, which warns about the default JUnit family.
        request.node.user_properties.extend(facts_of(result))

    return record
