"""Runs one server and lets nothing of it outlive the harness; started by path, so standard library only.

Its stdin is a socket to the harness: one JSON line orders the server, "stop" and "kill" end it, and so does the
harness' death. What happens goes back as JSON lines. Its stdout and stderr are the server's log.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IDLE_SECONDS = 0.5
"""How often the harness' death is looked for beside the socket, whose other end a forked child may hold open."""

CLEANING_SECONDS = 1.0
"""How long a resource tracker may outlive the processes it cleans up after: else their /dev/shm stays full."""

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class Harness:
    """The harness' end of the socket, as the supervisor sees it."""

    def __init__(self, channel: socket.socket) -> None:
        self.stop = False
        """It wants the server ended, or is gone."""
        self.kill = False
        """It will not wait for the server to end by itself."""
        self.kept = False
        """It left the server to whoever sends us SIGTERM or SIGINT."""
        self._channel = channel
        self._pid = os.getppid()
        self._heard = b""
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._signals = _signal_wakeups()
        self._poll.register(self._signals, select.POLLIN)

    def order(self) -> dict[str, Any] | None:
        """Wait for the order; None when the harness went away without giving one."""
        while b"\n" not in self._heard:
            if self.stop:
                return None
            self.listen(IDLE_SECONDS)
        line, self._heard = self._heard.split(b"\n", 1)
        order: dict[str, Any] = json.loads(line)
        return order

    def listen(self, seconds: float) -> None:
        """Wait for a word from the harness or a signal, such as a child's end."""
        for fd, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if fd == self._signals.fileno():
                numbers = self._signals.recv(4096)
                self.stop |= self.kept and bool({signal.SIGTERM, signal.SIGINT} & set(numbers))
            else:
                self._receive()
        if os.getppid() != self._pid and not self.kept:
            self.stop = True

    def tell(self, **event: Any) -> None:
        try:
            self._channel.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self.stop |= not self.kept

    def _receive(self) -> None:
        try:
            data = self._channel.recv(65536)
        except OSError:
            data = b""
        self._heard += data
        words = self._heard.split(b"\n")
        self.kept |= b"keep" in words
        if not data:
            self.stop |= not self.kept
            self._poll.unregister(self._channel)
        self.stop |= b"stop" in words
        self.kill |= b"kill" in words


class Server:
    """The server's process and whatever came from it."""

    def __init__(self, argv: list[str], harness: Harness) -> None:
        supervisor = os.getpid()

        def die_with_supervisor() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)

        # preexec_fn is safe here: this process has one thread.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_supervisor
        )
        self.pid = self._process.pid
        self.status: int | None = None
        """Its exit code, or less the signal that killed it; None while it runs."""
        self._harness = harness
        harness.tell(pid=self.pid)

    def reap(self) -> bool:
        """Collect the dead, telling the harness if the server is among them; False once no descendant is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
                self._harness.tell(exit=self.status)

    def signal_group(self, number: int) -> bool:
        """Signal the server's process group, or only look for it with 0; False when nothing is left of it."""
        self.reap()
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # All that is left has changed its user, and is still there.
        return True


def main() -> int:
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    harness = Harness(socket.socket(fileno=0))
    order = harness.order()
    if order is None or harness.stop:
        return 0
    try:
        server = Server(order["argv"], harness)
    except (OSError, subprocess.SubprocessError) as error:
        harness.tell(error=str(error))
        return 1
    while server.reap() and server.status is None and not harness.stop:
        harness.listen(IDLE_SECONDS)
    _end(server, harness, order)
    return 0


def _end(server: Server, harness: Harness, order: dict[str, Any]) -> None:
    """Ask the server's group to end, ever less politely; then kill every descendant, also those in other sessions."""
    if server.status is None and server.signal_group(signal.SIGINT):
        _wait(harness, lambda: harness.kill or not server.reap() or server.status is not None, order["interrupt"])
    # Workers that are left get the time to free shared memory and devices, for their server's death told them nothing.
    if not harness.kill and server.signal_group(signal.SIGTERM):
        _wait(harness, lambda: harness.kill or not server.signal_group(0), order["terminate"])

    spared_until = time.monotonic() + CLEANING_SECONDS

    def all_gone() -> bool:
        for pid in descendants():
            if time.monotonic() >= spared_until or not _cleans_up(pid):
                _kill(pid)
        return not server.reap()

    if not _wait(harness, all_gone, order["kill"]):
        harness.tell(left=descendants())


def _wait(harness: Harness, done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        harness.listen(min(0.02, left))
    return True


def descendants() -> list[int]:
    """Every process below this one: a subreaper inherits all that lose their parents."""
    children: dict[int, list[int]] = {}
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        stat = _read(pid, "stat").rpartition(b")")[2].split()
        if stat:
            children.setdefault(int(stat[1]), []).append(pid)
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def _cleans_up(pid: int) -> bool:
    """Tell whether a process is Python's resource tracker, which unlinks the shared memory of the killed."""
    return b"multiprocessing.resource_tracker" in _read(pid, "cmdline")


def _read(pid: int, name: str) -> bytes:
    """Read one of a process's files in /proc: empty when it is gone."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - pathlib would cost this process its quick start
            return file.read()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # Gone already, or another user's: then it is reported as left.


def _signal_wakeups() -> socket.socket:
    """Make signals wake the poll and do nothing else; a handler, unlike SIG_IGN, is not passed on to the server."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    return ours


if __name__ == "__main__":
    sys.exit(main())
