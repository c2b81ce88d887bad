"""Stopping a server: nothing of it is left, whatever it does and whoever dies first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from trials import PATIENCE, QUICK, can_be_bound, eventually, group_is_gone, is_gone, pid_in, press_ctrl_c, spec

from harness.servers.child import StopSeconds
from harness.servers.leftovers import VARIABLE, find_marked
from harness.servers.ports import PortBlock
from harness.servers.process import ServerProcess


@pytest.fixture
def ports() -> Iterator[PortBlock]:
    with PortBlock.reserve() as block:
        yield block


def started(folder: Path, ports: PortBlock, *options: str, stop_seconds: StopSeconds = QUICK) -> ServerProcess:
    server = ServerProcess(spec(folder, ports, *options), stop_seconds=stop_seconds)
    server.start()
    return server


def assert_nothing_left(server: ServerProcess, *others: int) -> None:
    assert server.pid is not None
    assert server.marker is not None
    # Orphans of a killed supervisor are reaped by the system's first process, in its own time.
    assert eventually(lambda: group_is_gone(server.pid))
    assert [pid for pid in others if not is_gone(pid)] == []
    assert find_marked(server.marker) == []
    assert can_be_bound(server.spec.port)
    assert [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE] == []


def test_polite_server(tmp_path: Path, ports: PortBlock) -> None:
    """A server that heeds SIGINT is given the time to end by it, and stopping it again costs nothing."""
    server = started(tmp_path, ports, stop_seconds=StopSeconds(interrupt=PATIENCE, terminate=0))
    server.stop()
    assert server.exit_description() == "killed by SIGINT (signal 2)"
    assert "KeyboardInterrupt" in server.log_tail()
    assert_nothing_left(server)
    server.stop()


def test_stubborn_server(tmp_path: Path, ports: PortBlock) -> None:
    """A server that ignores SIGINT and SIGTERM is killed."""
    server = started(tmp_path, ports, "--stubborn")
    server.stop()
    assert server.exit_description() == "killed by SIGKILL (signal 9)"
    assert_nothing_left(server)


def test_times_given_by_default(tmp_path: Path, ports: PortBlock) -> None:
    """Even a stubborn server is gone within the 8 s that CI gives a cancelled job."""
    server = started(tmp_path, ports, "--stubborn", stop_seconds=StopSeconds())
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 8
    assert_nothing_left(server)


def test_hung_server(tmp_path: Path, ports: PortBlock) -> None:
    """A server whose processes do not run at all is stopped as well."""
    server = started(tmp_path, ports)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert_nothing_left(server)


def test_grandchild_in_its_own_session(tmp_path: Path, ports: PortBlock) -> None:
    """A grandchild that left the session and ignores SIGTERM goes with the server."""
    server = started(tmp_path, ports, "--escaped", str(tmp_path / "escaped.pid"))
    escaped = pid_in(tmp_path / "escaped.pid")
    assert os.getsid(escaped) != server.pid
    server.stop()
    assert_nothing_left(server, escaped)


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "left alone"])
def test_worker_that_outlives_its_server(tmp_path: Path, ports: PortBlock, stop: bool) -> None:
    """When the API process alone is killed, its worker goes too: on stop, and even if nobody calls stop."""
    server = started(tmp_path, ports, "--worker", str(tmp_path / "worker.pid"))
    worker = pid_in(tmp_path / "worker.pid")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    if stop:
        server.stop()
    assert eventually(lambda: is_gone(worker))
    server.stop()
    assert_nothing_left(server, worker)


def test_worker_that_ignores_what_its_server_heeds(tmp_path: Path, ports: PortBlock) -> None:
    """Once the API process has ended, a worker that ignores the same signal is not waited for as long."""
    times = StopSeconds(interrupt=PATIENCE, terminate=0.3)
    server = started(tmp_path, ports, "--worker", str(tmp_path / "worker.pid"), stop_seconds=times)
    worker = pid_in(tmp_path / "worker.pid")
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < PATIENCE
    assert server.exit_description() == "killed by SIGINT (signal 2)"
    assert_nothing_left(server, worker)


def test_shared_memory_of_a_killed_server(tmp_path: Path, ports: PortBlock) -> None:
    """What a killed server held in /dev/shm is freed: its resource tracker is killed only after it had its turn."""
    server = started(tmp_path, ports, "--stubborn", "--shared", str(tmp_path / "name"))
    memory = Path("/dev/shm") / (tmp_path / "name").read_text()
    assert memory.exists()
    server.stop()
    assert not memory.exists()
    assert_nothing_left(server)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_supervisor_that_is_lost(
    tmp_path: Path, ports: PortBlock, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the supervisor is lost, server, worker and escaped grandchild are found and killed all the same."""
    monkeypatch.setattr("harness.servers.child.ANSWER_SECONDS", 0.5)
    names = [tmp_path / "worker.pid", tmp_path / "escaped.pid"]
    quick = StopSeconds(interrupt=0.1, terminate=0.1, kill=1)  # as long as a hung supervisor is waited for
    server = started(tmp_path, ports, "--worker", str(names[0]), "--escaped", str(names[1]), stop_seconds=quick)
    others = [pid_in(name) for name in names]
    supervisor = psutil.Process(server.pid).parent()
    assert supervisor is not None
    supervisor.send_signal(blow)
    if blow == signal.SIGKILL:
        assert eventually(lambda: is_gone(server.pid)), "the server outlived its supervisor"
        assert "supervisor was killed" in server.exit_description()
    server.stop()
    assert_nothing_left(server, *others)


def test_worker_that_renames_itself(tmp_path: Path, ports: PortBlock) -> None:
    """A worker keeps its mark when it takes a title as vLLM's do, which else overwrites the environment in /proc."""
    pytest.importorskip("setproctitle")
    server = started(tmp_path, ports, "--worker", str(tmp_path / "worker.pid"), "--titled")
    worker = pid_in(tmp_path / "worker.pid")
    try:
        assert eventually(lambda: "VLLM::EngineCore" in "".join(psutil.Process(worker).cmdline()))
        assert psutil.Process(worker).environ()[VARIABLE] == str(server.marker)
    finally:
        server.stop()
    assert_nothing_left(server, worker)


def test_signals_meant_for_the_harness(tmp_path: Path, ports: PortBlock) -> None:
    """Ctrl-C and a CI's SIGTERM to everything in sight end neither supervisor nor, through it, the server."""
    with started(tmp_path, ports, "--escaped", str(tmp_path / "orphan.pid")) as server:
        supervisor = psutil.Process(server.pid).parent()
        assert supervisor is not None
        assert os.getsid(supervisor.pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            supervisor.send_signal(number)
        # Once it has collected an orphan, it has come past the signals sent before.
        orphan = pid_in(tmp_path / "orphan.pid")
        os.kill(orphan, signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(orphan))
        assert server.is_alive()


def test_signals_that_the_harness_ignores(tmp_path: Path, ports: PortBlock) -> None:
    """A server heeds SIGINT although its harness was started with SIGINT ignored, as by `nohup` or a shell's `&`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = started(tmp_path, ports, stop_seconds=StopSeconds(interrupt=PATIENCE, terminate=0))
        server.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert server.exit_description() == "killed by SIGINT (signal 2)"


def test_interrupted_stop(tmp_path: Path, ports: PortBlock) -> None:
    """A second Ctrl-C while a server is being stopped kills it at once, and nothing is left."""
    server = started(
        tmp_path,
        ports,
        "--stubborn",
        "--escaped",
        str(tmp_path / "escaped.pid"),
        stop_seconds=StopSeconds(interrupt=600, terminate=600),
    )
    escaped = pid_in(tmp_path / "escaped.pid")
    timer = threading.Timer(0.3, press_ctrl_c)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    timer.join()
    assert_nothing_left(server, escaped)


def test_forked_copy_of_the_harness(tmp_path: Path, ports: PortBlock) -> None:
    """A forked child of the harness that leaves the block does not stop the server of its parent."""
    with started(tmp_path, ports) as server:
        script = os.fork()
        if script == 0:
            server.stop()
            os._exit(0)
        os.waitpid(script, 0)
        assert server.is_alive()
        assert not can_be_bound(server.spec.port)


HARNESS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trials import QUICK, spec
from harness.servers.ports import PortBlock
from harness.servers.process import ServerProcess

folder = Path(sys.argv[2])
server = ServerProcess(spec(folder, PortBlock.reserve(), "--stubborn", "--escaped", str(folder / "escaped.pid")),
                       stop_seconds=QUICK)
server.start()
if os.fork() == 0:
    time.sleep(60)  # a forked worker, which holds every descriptor open
print(server.pid, server.spec.port, flush=True)
time.sleep(60)
"""


def test_killed_harness(tmp_path: Path) -> None:
    """When the harness is killed with SIGKILL, its stubborn server and an escaped grandchild are gone in seconds."""
    command = [sys.executable, "-c", HARNESS, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as harness:
        assert harness.stdout is not None
        server, port = map(int, harness.stdout.readline().split())
        escaped = pid_in(tmp_path / "escaped.pid")
        try:
            harness.kill()
            harness.wait()
            assert eventually(lambda: is_gone(server) and is_gone(escaped))
            assert eventually(lambda: can_be_bound(port))
        finally:
            os.killpg(harness.pid, signal.SIGKILL)
