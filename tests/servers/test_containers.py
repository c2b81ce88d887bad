"""A server in a container: found ready though its processes are a daemon's, and gone by its name at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.config import ModelConfig
from harness.errors import ServerError
from harness.servers.containers import is_container, remove_container
from harness.servers.vllm import vllm_server

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "faults/faulty_vllm.py"


class Daemon:
    """Runs what `docker run` asked for, as its own children, until `docker rm` names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.started = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        while not self.over.wait(0.02):
            for asked in self.folder.glob("run-*"):
                name = asked.name.removeprefix("run-")
                order = json.loads(asked.read_text())
                asked.rename(self.folder / f"running-{name}")
                environment = {**os.environ, "VLLM_API_KEY": order["key"]}
                self.running[name] = subprocess.Popen(order["command"], env=environment)
                self.started += 1
            for asked in self.folder.glob("rm-*"):
                self.remove(asked.name.removeprefix("rm-"))
                asked.unlink()

    def remove(self, name: str) -> None:
        if name in self.running:
            process = self.running.pop(name)
            process.kill()
            process.wait()
            (self.folder / f"running-{name}").unlink()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A `docker` command on PATH and its daemon."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_docker.py"} "$@"\n')
    docker.chmod(0o755)
    folder = tmp_path / "daemon"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{docker.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    daemon = Daemon(folder)
    daemon.thread.start()
    yield daemon
    daemon.over.set()
    daemon.thread.join()
    for name in list(daemon.running):
        daemon.remove(name)


def config(fault: str, startup: float = 20.0) -> ModelConfig:
    inside = f"{sys.executable} {STAND_IN} {fault} {{model}} --port {{port}} {{args}}"
    return ModelConfig(
        model_name="stand-in",
        accuracy_threshold=0.5,
        serve_command=f"docker run --rm --name {{name}} -e VLLM_API_KEY image {inside}",
        startup_max_wait_seconds=startup,
    )


def test_a_container_is_found_ready_and_removed_by_name(daemon: Daemon, tmp_path: Path) -> None:
    """What listens is no descendant of ours, and is gone all the same when the block is left."""
    with vllm_server(config("none"), tmp_path / "server.log") as endpoint:
        assert endpoint.death() is None
        assert len(daemon.running) == 1
    assert daemon.started == 1
    assert not daemon.running


def test_a_container_that_never_gets_ready_is_removed(daemon: Daemon, tmp_path: Path) -> None:
    """A start that fails leaves no container either."""
    with (
        pytest.raises(ServerError, match="not ready"),
        vllm_server(config("never-ready", startup=2.0), tmp_path / "server.log"),
    ):
        pytest.fail("it is not ready")
    assert daemon.started == 1
    assert not daemon.running


def test_a_container_needs_a_name() -> None:
    """A container without a name of its own could not be stopped, so the config is refused."""
    with pytest.raises(ValueError, match=r"must hold --name \{name\}"):
        ModelConfig(
            model_name="m", accuracy_threshold=0.5, serve_command="docker run --rm image {model} --port {port} {args}"
        )


COMMANDS = {
    "docker run": (["docker", "run", "image"], True),
    "podman by path": (["/usr/bin/podman", "--log-level", "error", "run", "image"], True),
    "docker exec": (["docker", "exec", "name", "vllm"], False),
    "vllm": (["vllm", "serve"], False),
}


@pytest.mark.parametrize(("words", "expected"), COMMANDS.values(), ids=COMMANDS)
def test_containers_are_told_by_their_command(words: list[str], expected: bool) -> None:
    """Only what starts a container is stopped by name."""
    assert is_container(words) is expected


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("exit 0", None),
        ("echo 'Error: No such container: x' >&2; exit 1", None),
        ("echo 'cannot connect to the daemon' >&2; exit 1", "cannot connect to the daemon"),
    ],
    ids=["removed", "gone already", "no daemon"],
)
def test_a_container_that_may_be_left_is_an_error(tmp_path: Path, script: str, fault: str | None) -> None:
    """What cannot be confirmed as gone is not taken as gone."""
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    if fault is None:
        remove_container(str(program), "x")
        return
    with pytest.raises(ServerError, match=fault):
        remove_container(str(program), "x")
