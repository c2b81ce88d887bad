"""Every fault that a server, a network or a CI system was seen to have, through the whole suite, with its verdict.

Each row is a pytest of its own and a real server process; none may leave a process or a torn record.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from loopback import completion, loopback_server
from suite_run import SuiteRun, start_suite

STAND_IN = Path(__file__).with_name("faulty_vllm.py")
CONFIG = """\
model_name: stand-in
task: smoke
accuracy_threshold: 0.9
tolerance: 0.0
startup_max_wait_seconds: {startup}
request_timeout_seconds: 3
max_concurrency: 4
serve_command: {python} {script} {fault} {{model}} --port {{port}} {{args}}
{more}
"""
PASS, REGRESSION, INFRASTRUCTURE, INTERRUPTED = "pass", "regression", "infrastructure", "interrupted"
EXIT = {PASS: 0, REGRESSION: 1, INFRASTRUCTURE: 75, INTERRUPTED: 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault, the verdict it must give, and words its message must hold."""

    fault: str
    verdict: str
    says: str = ""
    more: str = ""
    startup: int = 20
    env: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


SPECULATING = "min_acceptance_length: 1.5\n"
PROXIES = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY")}
ROWS = [
    Row(fault="none", verdict=PASS),
    Row(fault="wrong-answers", verdict=REGRESSION, says="accuracy 0.0000 (0 of 20"),
    # The server's start.
    Row(fault="exits-0", verdict=INFRASTRUCTURE, says="exited with code 0"),
    Row(fault="traceback", verdict=INFRASTRUCTURE, says="CUDA out of memory. Tried to allocate 2 GiB"),
    Row(fault="never-ready", verdict=INFRASTRUCTURE, says="Loading weights", startup=3),
    Row(fault="503-for-ever", verdict=INFRASTRUCTURE, says="503", startup=3),
    Row(fault="another-model", verdict=INFRASTRUCTURE, says="another"),
    Row(fault="port-taken-once", verdict=PASS),
    Row(fault="log-flood", verdict=PASS),
    Row(fault="proxies-set", verdict=PASS, env=PROXIES),
    Row(fault="context-too-small", verdict=INFRASTRUCTURE, says="raise --max-model-len"),
    # The server's end.
    Row(fault="ignores-sigterm", verdict=PASS),
    Row(fault="setsid-grandchild", verdict=PASS),
    Row(fault="dies-half-way", verdict=INFRASTRUCTURE, says="engine core died"),
    Row(fault="hangs-half-way", verdict=INFRASTRUCTURE, says="requests got no answer"),
    # The replies.
    Row(fault="400-for-all", verdict=INFRASTRUCTURE, says="all rejected: HTTP 400: seed is not supported"),
    Row(fault="429-then-well", verdict=PASS),
    Row(fault="429-for-ever", verdict=INFRASTRUCTURE, says="20 of 20 requests got no answer"),
    Row(fault="500-one-in-ten", verdict=INFRASTRUCTURE, says="requests got no answer"),
    Row(fault="500-one-in-ten", verdict=PASS, more="max_error_rate: 0.15\n"),
    Row(fault="503-now-and-then", verdict=PASS),
    Row(fault="reset-mid-body-once", verdict=PASS),
    Row(fault="reset-mid-body", verdict=INFRASTRUCTURE, says="20 of 20 requests got no answer"),
    Row(fault="slow-loris", verdict=INFRASTRUCTURE, says="1 of 20 requests got no answer"),
    Row(fault="truncated-json", verdict=INFRASTRUCTURE, says="1 of 20 requests got no answer"),
    Row(fault="html-200", verdict=INFRASTRUCTURE, says="1 of 20 requests got no answer"),
    Row(fault="empty-choices", verdict=INFRASTRUCTURE, says="1 of 20 requests got no answer"),
    Row(fault="aborted", verdict=INFRASTRUCTURE, says="1 of 20 requests got no answer"),
    Row(fault="null-content", verdict=REGRESSION, says="accuracy 0.0000", more="use_chat_completions: true\n"),
    Row(fault="cut-off", verdict=REGRESSION, says="accuracy 0.0000"),
    # The counters.
    Row(fault="drafts", verdict=PASS, more=SPECULATING),
    Row(fault="few-accepted", verdict=REGRESSION, says="acceptance length 1.100 is below", more=SPECULATING),
    Row(fault="no-drafts", verdict=REGRESSION, says="no draft at all", more=SPECULATING),
    Row(fault="no-series", verdict=INFRASTRUCTURE, says="has no vllm:spec_decode", more=SPECULATING),
    Row(fault="empty-metrics", verdict=INFRASTRUCTURE, says="answered with nothing", more=SPECULATING),
    Row(fault="nan-metrics", verdict=INFRASTRUCTURE, says="as nan", more=SPECULATING),
    Row(fault="metrics-500", verdict=INFRASTRUCTURE, says="HTTP 500", more=SPECULATING),
    Row(fault="metrics-500", verdict=PASS),
    Row(fault="metrics-restart", verdict=INFRASTRUCTURE, says="went backwards", more=SPECULATING),
    # The clock.
    Row(fault="slow", verdict=INFRASTRUCTURE, says="max_seconds: 2 s were over", more="max_seconds: 2\n"),
    Row(fault="slow", verdict=INFRASTRUCTURE, says="Timeout", arguments=("--timeout=2", "--timeout-method=signal")),
]


def ids(rows: list[Row]) -> list[str]:
    seen: list[str] = []
    for row in rows:
        seen.append(f"{row.fault}-{sum(name.startswith(row.fault) for name in seen) + 1}")
    return seen


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SuiteRun]]:
    """Start the suite on the stand-in with one fault; whatever is left at the end is killed."""
    runs: list[SuiteRun] = []

    def begin(row: Row, wrap: tuple[str, ...] = ()) -> SuiteRun:
        config = CONFIG.format(
            python=sys.executable, script=STAND_IN, fault=row.fault, more=row.more, startup=row.startup
        )
        env = {**row.env, "ACCURACY_GATE_FAULT_FOLDER": str(tmp_path)}
        runs.append(start_suite(tmp_path, config, *row.arguments, env=env, wrap=wrap))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_a_fault_gets_its_verdict(row: Row, start: Callable[..., SuiteRun], record: Callable[..., None]) -> None:
    """The verdict is the stated one, its message says why, and neither a process nor a torn record remains."""
    record(row.fault, row.verdict)
    run = start(row)
    output = run.output()
    record(measured=run.verdict())
    assert run.process.returncode == EXIT[row.verdict], output
    assert row.says in output
    run.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "xdist"])
def test_a_cancelled_job_stops_its_server(
    number: signal.Signals, workers: tuple[str, ...], start: Callable[..., SuiteRun], record: Callable[..., None]
) -> None:
    """Within 8 s of the signal pytest, the server and its stubborn grandchild are gone and the records are written."""
    record(f"pytest gets {number.name}{', under xdist' if workers else ''}", INTERRUPTED)
    run = start(Row(fault="slow", verdict=INTERRUPTED, arguments=workers))
    run.await_samples(3)
    run.process.send_signal(number)
    sent = time.monotonic()
    output = run.output()
    assert time.monotonic() - sent < 8
    record(measured=INTERRUPTED if run.process.returncode == 2 else str(run.process.returncode))
    assert run.process.returncode == 2, output
    assert run.result()["verdict"] == INFRASTRUCTURE
    run.assert_nothing_is_left()


def test_a_killed_pytest_takes_its_server_along(start: Callable[..., SuiteRun], record: Callable[..., None]) -> None:
    """SIGKILL leaves no time for anything, and yet no server: what is answered is on disk."""
    record("pytest gets SIGKILL", "server gone")
    run = start(Row(fault="slow", verdict=INTERRUPTED))
    run.await_samples(3)
    assert run.servers()
    run.process.kill()
    run.output()
    gone = run.servers_go_away()
    record(measured="server gone" if gone else "server left")
    assert gone
    assert len(run.samples()) >= 3


def test_a_hard_timeout_takes_the_server_along(start: Callable[..., SuiteRun], record: Callable[..., None]) -> None:
    """pytest-timeout's thread method ends pytest without teardown, and yet no server is left."""
    record("pytest-timeout ends pytest at once", "server gone")
    run = start(Row(fault="slow", verdict=INTERRUPTED, arguments=("--timeout=3", "--timeout-method=thread")))
    output = run.output()
    gone = run.servers_go_away()
    record(measured="server gone" if gone else "server left")
    assert "Timeout" in output
    assert run.process.returncode == 1
    assert gone


def test_a_full_disk_is_an_outage(start: Callable[..., SuiteRun], record: Callable[..., None]) -> None:
    """A record that cannot be written says nothing about the model; what was written is whole, line by line."""
    record("disk full", INFRASTRUCTURE)
    limit = ("bash", "-c", 'ulimit -f 8; exec "$@"', "bash")
    run = start(Row(fault="none", verdict=INFRASTRUCTURE), wrap=limit)
    output = run.output()
    record(measured=INFRASTRUCTURE if run.process.returncode == 75 else str(run.process.returncode))
    assert run.process.returncode == 75, output
    assert "cannot be written: File too large" in output
    assert 0 < len(run.samples()) < 20
    assert not run.servers()


def test_a_foreign_server_on_our_port_is_refused(
    start: Callable[..., SuiteRun], record: Callable[..., None], tmp_path: Path
) -> None:
    """Somebody else's server that answers with our model's name on our port is recognised, on every port tried."""
    record("foreign server on our port", INFRASTRUCTURE)
    with taking_every_port(tmp_path):
        run = start(Row(fault="foreign-server", verdict=INFRASTRUCTURE))
        output = run.output()
    record(measured=run.verdict())
    assert run.process.returncode == 75, output
    assert "another process listens on it" in output
    assert len(list(tmp_path.glob("port-*"))) == 3
    assert not run.samples()
    run.assert_nothing_is_left()


@contextmanager
def taking_every_port(folder: Path) -> Iterator[None]:
    """Serve on each port that the stand-in names, from this process."""
    over = threading.Event()

    def watch() -> None:
        servers = {}
        while not over.wait(0.02):
            for named in folder.glob("port-*"):
                if named not in servers:
                    port = int(named.name.removeprefix("port-"))
                    servers[named] = loopback_server(lambda body, n: completion("x"), model="stand-in", port=port)
                    servers[named].__enter__()
        for server in servers.values():
            server.__exit__(None, None, None)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
