"""What the tests of servers share: a spec for the fake server, and waiting with a deadline."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.servers.child import StopSeconds
from harness.servers.ports import PortBlock
from harness.servers.process import ServerSpec

FAKE = Path(__file__).with_name("fake_servers.py")
KEY = "the-key-of-this-server"
QUICK = StopSeconds(interrupt=0.3, terminate=0.3)
PATIENCE = 30.0
"""Seconds: far beyond what anything here needs, for a machine that is busy."""


def spec(folder: Path, ports: PortBlock, *options: str, startup_seconds: float = PATIENCE, **env: str) -> ServerSpec:
    return ServerSpec(
        argv=(sys.executable, str(FAKE), "--port", str(ports.port), "--key", KEY, *options),
        env={**os.environ, **env},
        log_path=folder / "server.log",
        base_url=f"http://127.0.0.1:{ports.port}",
        served_model="tiny",
        api_key=KEY,
        startup_seconds=startup_seconds,
    )


def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Wait until the condition holds; False when it never did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pid_in(path: Path) -> int:
    """Read the pid that a fake server leaves in a file once the process runs."""
    assert eventually(path.exists), f"{path} was never written"
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    """A zombie is gone, too: it holds nothing, and whoever inherited it may never collect it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def group_is_gone(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return True
    return False


def press_ctrl_c() -> None:
    """Send the main thread what a terminal sends; `interrupt_main` would not wake it from waiting."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def can_be_bound(port: int) -> bool:
    """As a server binds: sockets of finished connections do not matter."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
