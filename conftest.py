"""Pytest wiring of the accuracy suite: options, collection, fixtures, reports."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config_lists import ListedConfig
from harness.errors import ConfigError
from harness.pytest_servers import KeptServers
from harness.records import EvalResult, RunRecord
from harness.reports.session import SessionReport, VerdictReports
from harness.reports.terminal import LiveLine
from harness.serving import RunOptions
from harness.standalone import api_key
from harness.suite import RunInfo, Suite, prepare

ROOT = Path(__file__).resolve().parent
SUITE_FILE = ROOT / "tests" / "test_accuracy.py"

SUITE = pytest.StashKey[Suite]()
RECORD = pytest.StashKey[RunRecord]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("accuracy-gate").addoption
    lists = "list of model configs; may be given again (configs/models-small.txt)"
    add("--config-list-file", action="append", metavar="PATH", help=lists)
    add("--results-dir", type=Path, default=Path("results"), metavar="DIR", help="where run records go (results)")
    add("--base-url", metavar="URL", help="ask a server that already runs; nothing is started")
    add(
        "--serve-command", metavar="LINE", help="how servers are started: {model}, {host}, {port}, {args} are filled in"
    )
    add("--save-baseline", metavar="NAME", help="add each config that passes to the baselines in baselines/NAME")
    add("--gpus", metavar="LIST", help="which of the visible GPUs to use: positions or UUIDs")
    add("--require-gpus", action="store_true", help="too few GPUs for a config is a failure, not a skip")
    add("--keep-server", action="store_true", help="leave servers running and say how to reach and stop them")
    add("--data-dir", type=Path, metavar="DIR", help="folder with GSM8K's train.jsonl and test.jsonl")


def pytest_configure(config: pytest.Config) -> None:
    if not _selected(config):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(SUITE_FILE)]
    signal.signal(signal.SIGTERM, _interrupt)
    # The project's tests turn warnings into errors; a gate must not go red over a dependency's deprecation.
    config.addinivalue_line("filterwarnings", "default")
    collecting = config.option.collectonly
    if config.option.keep_server and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--keep-server needs one process: leave out -n")
    options = RunOptions(
        base_url=config.option.base_url,
        api_key=api_key(),
        data_dir=config.option.data_dir,
        serve_command=config.option.serve_command,
        save_baseline=ROOT / "baselines" / config.option.save_baseline if config.option.save_baseline else None,
        keep_server=config.option.keep_server,
        gpu_choice=config.option.gpus,
        require_gpus=config.option.require_gpus,
    )
    try:
        config.stash[SUITE] = prepare(
            config.option.config_list_file,
            suite_root=ROOT,
            cwd=config.invocation_params.dir,
            options=options,
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
    config.pluginmanager.register(KeptServers(), "accuracy-gate-servers")
    config.pluginmanager.register(VerdictReports(SUITE_FILE), "accuracy-gate-verdicts")
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[RECORD] = RunRecord(Path(worker["accuracy_gate_run"]))
        return
    record = RunRecord.create(config.invocation_params.dir / config.option.results_dir)
    config.stash[RECORD] = record
    config.pluginmanager.register(SessionReport(RunInfo(record, config.stash[SUITE])), "accuracy-gate-session")


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
    capture: Any = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        yield LiveLine(listed.id)


@pytest.fixture
def record_result(request: pytest.FixtureRequest) -> Callable[[EvalResult], None]:
    def record(result: EvalResult) -> None:
        # Not record_property, which warns about the default JUnit family.
        facts = result.to_json()
        names = ("accuracy", "floor", "num_questions", "questions_per_second", "tokens_per_second")
        request.node.user_properties.extend((name, facts[name]) for name in names)

    return record
