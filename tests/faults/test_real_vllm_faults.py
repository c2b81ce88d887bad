"""The same promises on real vLLM, whose API server, engine and workers are processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from suite_run import SuiteRun

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "configs/cpu/smollm2-135m-gsm8k.yaml").read_text() + "max_concurrency: 4\n"


def begin(run_suite: Callable[..., SuiteRun], gsm8k_dir: Path, more: str = "") -> tuple[SuiteRun, list[psutil.Process]]:
    """Start the suite on real vLLM and wait until some of its 32 questions are answered."""
    run = run_suite(CONFIG + more, f"--data-dir={gsm8k_dir}")
    run.await_samples(3)
    return run, run.servers()


def api_server(processes: list[psutil.Process]) -> psutil.Process:
    return next(process for process in processes if "serve" in process.cmdline())


def engine(processes: list[psutil.Process]) -> psutil.Process:
    return next(process for process in processes if "EngineCore" in process.name() + "".join(process.cmdline()))


def assert_outage(run: SuiteRun, processes: list[psutil.Process], record: Callable[..., None], says: str) -> None:
    output = run.output()
    record(measured=run.verdict())
    assert run.process.returncode == 75, output
    assert says in output
    assert run.result()["counts"]["asked"] >= 3
    run.assert_nothing_is_left()
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_api_server_leaves_no_engine(
    run_suite: Callable[..., SuiteRun], gsm8k_dir: Path, record: Callable[..., None]
) -> None:
    """The API server is killed half-way: the run ends within seconds as an outage, and nothing named VLLM remains."""
    record("vLLM: API server killed", "infrastructure")
    run, processes = begin(run_suite, gsm8k_dir)
    api_server(processes).kill()
    killed = time.monotonic()
    assert_outage(run, processes, record, "killed by SIGKILL")
    assert time.monotonic() - killed < 12
    assert run.result()["counts"]["asked"] < 32


def test_a_killed_engine_is_an_outage(
    run_suite: Callable[..., SuiteRun], gsm8k_dir: Path, record: Callable[..., None]
) -> None:
    """The engine is killed half-way: whatever vLLM answers then, it is no wrong answer."""
    record("vLLM: engine killed", "infrastructure")
    run, processes = begin(run_suite, gsm8k_dir)
    engine(processes).kill()
    assert_outage(run, processes, record, "InfrastructureError")


def test_a_hung_engine_is_an_outage(
    run_suite: Callable[..., SuiteRun], gsm8k_dir: Path, record: Callable[..., None]
) -> None:
    """The engine stops without dying: the config's own time ends the run, and the stopped process goes too."""
    record("vLLM: engine hung", "infrastructure")
    run, processes = begin(run_suite, gsm8k_dir, "request_timeout_seconds: 10\n")
    engine(processes).send_signal(signal.SIGSTOP)
    assert_outage(run, processes, record, "requests got no answer")


def test_a_cancelled_job_stops_real_vllm(
    run_suite: Callable[..., SuiteRun], gsm8k_dir: Path, record: Callable[..., None]
) -> None:
    """SIGTERM to pytest: within 8 s vLLM is gone and the records are written."""
    record("vLLM: pytest gets SIGTERM", "interrupted")
    run, processes = begin(run_suite, gsm8k_dir)
    run.process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    output = run.output()
    assert time.monotonic() - sent < 8
    record(measured="interrupted" if run.process.returncode == 2 else str(run.process.returncode))
    assert run.process.returncode == 2, output
    run.assert_nothing_is_left()
    assert not [p for p in processes if p.is_running()]


def test_a_killed_pytest_takes_real_vllm_along(
    run_suite: Callable[..., SuiteRun], gsm8k_dir: Path, record: Callable[..., None]
) -> None:
    """SIGKILL to pytest: API server, engine and workers are gone within seconds."""
    record("vLLM: pytest gets SIGKILL", "server gone")
    run, _ = begin(run_suite, gsm8k_dir)
    run.process.kill()
    run.output()
    gone = run.servers_go_away()
    record(measured="server gone" if gone else "server left")
    assert gone
