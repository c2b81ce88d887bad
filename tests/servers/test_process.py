"""Starting a server: ready, ended, or out of time."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from trials import FAKE, KEY, QUICK, can_be_bound, eventually, group_is_gone, is_gone, pid_in, press_ctrl_c, spec

from harness.errors import InfrastructureError, PortTaken, ServerError, ServerExited, ServerNotReady
from harness.servers.ports import PortBlock, PortOwner, free_port
from harness.servers.process import ServerProcess, ServerSpec, start_with_retry


@pytest.fixture
def ports() -> Iterator[PortBlock]:
    with PortBlock.reserve() as block:
        yield block


def failing(asked: ServerSpec, kind: type[ServerError]) -> str:
    """Start a server that does not come up, and return what is said about it."""
    server = ServerProcess(asked, stop_seconds=QUICK)
    with pytest.raises(kind) as raised:
        server.start()
    assert type(raised.value) is kind
    assert not server.is_alive()
    assert server.pid is None or group_is_gone(server.pid)
    return str(raised.value)


def test_ready_server(tmp_path: Path, ports: PortBlock) -> None:
    """A server is ready when it lives, is healthy, knows our key and lists the model; then its start has been timed."""
    began = time.time()
    with ServerProcess(spec(tmp_path, ports, "--print", "hello"), stop_seconds=QUICK) as server:
        assert server.is_alive()
        assert server.death() is None
        assert server.exit_description() == "running"
        assert server.log_tail() == "hello"
        assert server.ready_at is not None
        assert server.ready_at >= began
        assert server.startup_seconds is not None
        assert 0 < server.startup_seconds <= time.time() - began
        assert server.pid in [process.pid for process in psutil.Process().children(recursive=True)]
    assert not server.is_alive()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--exit", "0"], "exited with code 0", id="exits with 0"),
        pytest.param(["--raise", "no such layer"], "exited with code 3", id="raises"),
        pytest.param(["--die-by", str(int(signal.SIGUSR1))], "killed by SIGUSR1 (signal 10)", id="signal"),
        pytest.param(["--die-by", "40"], "killed by a signal (signal 40)", id="signal without a name"),
        pytest.param(["--die-by", "9"], "killed by SIGKILL (signal 9)", id="SIGKILL"),
        pytest.param(["--frobnicate"], "likely cause: the server does not know an option", id="unknown option"),
    ],
)
def test_server_that_ends_first(tmp_path: Path, ports: PortBlock, options: list[str], says: str) -> None:
    """A server that ends before it is ready is reported at once with how it ended."""
    assert says in failing(spec(tmp_path, ports, *options), ServerExited)


def test_message_ends_with_the_log(tmp_path: Path, ports: PortBlock) -> None:
    """The report of a dead server names its log and ends with the log's last lines."""
    said = failing(spec(tmp_path, ports, "--raise", "no such layer"), ServerExited)
    assert str(tmp_path / "server.log") in said
    assert said.endswith("RuntimeError: no such layer")


def test_command_that_does_not_exist(tmp_path: Path, ports: PortBlock) -> None:
    """A command that cannot be started is named."""
    asked = replace(spec(tmp_path, ports), argv=("/nonexistent/vllm", "serve"))
    said = failing(asked, ServerExited)
    assert "could not be started" in said
    assert "/nonexistent/vllm" in said


def test_log_that_cannot_be_written(tmp_path: Path, ports: PortBlock) -> None:
    """A log that cannot be opened is named, and nothing is started."""
    (tmp_path / "file").touch()
    asked = replace(spec(tmp_path, ports), log_path=tmp_path / "file" / "server.log")
    assert str(asked.log_path) in failing(asked, ServerError)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--silent"], "nothing listens on port", id="never listens"),
        pytest.param(["--health", "503"], "/health answers 503", id="503 for ever"),
        pytest.param(["--drip"], "no answer over HTTP", id="never ends its answer"),
    ],
)
def test_server_that_is_never_ready(tmp_path: Path, ports: PortBlock, options: list[str], says: str) -> None:
    """A server that is not ready at its deadline is given up, with what it was doing and what it last printed."""
    asked = spec(tmp_path, ports, *options, "--print", "Loading weights 3/8", startup_seconds=2)
    began = time.monotonic()
    said = failing(asked, ServerNotReady)
    assert time.monotonic() - began < 20
    assert says in said
    assert "s ago: Loading weights 3/8" in said


def test_other_model(tmp_path: Path, ports: PortBlock) -> None:
    """A server of ours that serves another model is refused at once, naming both."""
    said = failing(spec(tmp_path, ports, "--model", "tiny-v2"), ServerError)
    assert "serves tiny-v2, expected tiny" in said


def test_other_key(tmp_path: Path, ports: PortBlock) -> None:
    """A server of ours that refuses our key is refused at once."""
    said = failing(spec(tmp_path, ports, "--key", "another-key"), ServerError)
    assert "/v1/models answers 401" in said


@contextmanager
def stranger(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port), *options])
    try:
        assert eventually(lambda: not can_be_bound(port))
        yield process
    finally:
        process.kill()
        process.wait()


def test_stranger_on_the_port(tmp_path: Path, ports: PortBlock) -> None:
    """A stranger that answers on our port, with our key and our model, is never taken for our server."""
    with stranger(ports.port, "--key", KEY) as other:
        said = failing(spec(tmp_path, ports, "--silent"), PortTaken)
        assert f"port {ports.port}" in said
        assert other.poll() is None


@pytest.mark.parametrize("options", [["--model", "tiny-v2"], ["--key", "another-key"]], ids=["model", "key"])
def test_stranger_where_owners_are_hidden(
    tmp_path: Path, ports: PortBlock, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not tell whose a port is, another model or a refused key means a stranger's server."""
    monkeypatch.setattr("harness.servers.process.port_owner", lambda *_: PortOwner.UNKNOWN)
    assert f"port {ports.port}" in failing(spec(tmp_path, ports, *options), PortTaken)


def test_lost_port_is_tried_elsewhere(tmp_path: Path) -> None:
    """A server that finds its port bound is started again on other ports, which are its own until it is stopped."""
    blocks: list[PortBlock] = []
    with socket.socket() as bound:

        def make(block: PortBlock) -> ServerSpec:
            if not blocks:
                bound.bind(("127.0.0.1", block.port))
            blocks.append(block)
            return spec(tmp_path, block)

        server = start_with_retry(make, stop_seconds=QUICK)
        try:
            assert len(blocks) == 2
            assert server.spec.base_url == f"http://127.0.0.1:{blocks[1].port}"
            assert "Address already in use" in server.spec.log_path.read_text()
            assert not server.lost_its_port()
            with pytest.raises(InfrastructureError):
                free_port(blocks[1].first, blocks[1].first + 64)
        finally:
            server.stop()
        assert free_port(blocks[1].first + 2, blocks[1].first + 64)


@pytest.mark.parametrize(
    ("options", "kind", "starts"),
    [
        pytest.param(
            ["--raise", "OSError: [Errno 98] Address already in use"], ServerExited, 3, id="port always taken"
        ),
        pytest.param(["--raise", "no such layer"], ServerExited, 1, id="another fault"),
        pytest.param(["--model", "tiny-v2"], ServerError, 1, id="another model"),
    ],
)
def test_what_is_tried_again(tmp_path: Path, options: list[str], kind: type[ServerError], starts: int) -> None:
    """Only a lost port is tried again, three times at most, and every promised port is given back."""
    blocks: list[PortBlock] = []

    def make(block: PortBlock) -> ServerSpec:
        blocks.append(block)
        return spec(tmp_path, block, *options)

    with pytest.raises(kind):
        start_with_retry(make, stop_seconds=QUICK)
    assert len(blocks) == starts
    for block in blocks:
        assert free_port(block.first + 2, block.first + 64)


def test_log_flood(tmp_path: Path, ports: PortBlock) -> None:
    """100 MiB of log neither block the server nor are read by the harness, which shows the last lines only."""
    with ServerProcess(spec(tmp_path, ports, "--flood", "100"), stop_seconds=QUICK) as server:
        assert server.spec.log_path.stat().st_size > 100 * 2**20
        assert server.log_tail(3) == "\n".join(["x" * 127] * 3)


def test_proxy_variables(tmp_path: Path, ports: PortBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy is never asked about a server on this machine, and the server keeps it for its downloads."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ServerProcess(spec(tmp_path, ports), stop_seconds=QUICK) as server:
        assert psutil.Process(server.pid).environ()["http_proxy"] == "http://127.0.0.1:9"


def test_interrupted_start(tmp_path: Path, ports: PortBlock) -> None:
    """Ctrl-C while a server starts leaves nothing of it, nor of what escaped from it."""
    escaped = tmp_path / "escaped.pid"
    server = ServerProcess(spec(tmp_path, ports, "--silent", "--escaped", str(escaped)), stop_seconds=QUICK)

    def interrupt() -> None:
        if eventually(escaped.exists):
            press_ctrl_c()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        server.start()
    thread.join()
    assert server.pid is not None
    assert group_is_gone(server.pid)
    assert is_gone(pid_in(escaped))


def test_secrets_in_the_log(tmp_path: Path, ports: PortBlock) -> None:
    """Neither a report nor the log left behind holds a secret: not the key, nor the environment's, nor one told of."""
    said = f"key {KEY}, token token-from-env, other told-secret"
    asked = replace(spec(tmp_path, ports, "--print", said, HF_TOKEN="token-from-env"), secrets=("told-secret",))
    with ServerProcess(asked, stop_seconds=QUICK) as server:
        assert server.log_tail() == "key ***, token ***, other ***"
    assert asked.log_path.read_text().splitlines()[0] == "key ***, token ***, other ***"
    assert list(tmp_path.iterdir()) == [asked.log_path]


def test_death_while_asked(tmp_path: Path, ports: PortBlock) -> None:
    """A server that ends after it was ready says how, with the end of its log."""
    with ServerProcess(spec(tmp_path, ports, "--print", "serving"), stop_seconds=QUICK) as server:
        assert server.pid is not None
        psutil.Process(server.pid).kill()
        assert eventually(lambda: not server.is_alive())
        death = server.death()
        assert death is not None
        assert "killed by SIGKILL (signal 9)" in death
        assert "host memory" in death
        assert death.endswith("serving")


@pytest.mark.parametrize(
    "url", ["http://localhost:8000", "https://127.0.0.1:8000", "http://127.0.0.1", "http://127.0.0.1:8000/v1"]
)
def test_address_of_a_server(tmp_path: Path, ports: PortBlock, url: str) -> None:
    """Only a literal loopback address with a port is accepted."""
    with pytest.raises(ValueError, match="base_url"):
        replace(spec(tmp_path, ports), base_url=url)
