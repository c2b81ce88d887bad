"""One process under a supervisor: started, watched and stopped with everything that came from it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.errors import ServerError
from harness.servers.leftovers import VARIABLE, Marker, kill_marked

SUPERVISOR = Path(__file__).with_name("supervisor.py")
ANSWER_SECONDS = 2.0
"""What a supervisor may need beyond the times it was given before it counts as hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSeconds:
    """How long a server is waited for after each signal; asking takes at most 6 s, for CI gives a cancelled job 8."""

    interrupt: float = 4.0
    terminate: float = 2.0
    kill: float = 20.0
    """Not a courtesy: what the kernel may need to take back the memory of a large process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended."""

    code: int | None = None
    signal: int | None = None
    problem: str | None = None
    """Why there is neither: it could not be started, or its supervisor was lost."""

    @classmethod
    def of(cls, status: int) -> Exit:
        return cls(code=status) if status >= 0 else cls(signal=-status)

    def __str__(self) -> str:
        if self.signal is not None:
            name = signal.Signals(self.signal).name if self.signal in set(signal.Signals) else "a signal"
            return f"killed by {name} (signal {self.signal})"
        return self.problem or f"exited with code {self.code}"


class Child:
    """A process, its supervisor and the socket between the supervisor and this process."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        run_id: str,
        seconds: StopSeconds,
    ) -> None:
        self.pid: int | None = None
        """The process's id, which is also its group's and session's; None until the supervisor has told."""
        self.exit: Exit | None = None
        self.marker = Marker.new(run_id)
        self._argv = list(argv)
        # vLLM names its workers with setproctitle, which overwrites the environment in /proc unless told not to.
        self._env = {**env, VARIABLE: str(self.marker), "SPT_NOENV": "1"}
        self._log_path = log_path
        self._seconds = seconds
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._channel, self._theirs = socket.socketpair()
        self._left: list[int] = []
        self._told = b""
        self._over = False
        self._kept = False

    def start(self) -> None:
        """Start the supervisor, which starts nothing before it has its order: until then there is nothing to lose."""
        with self._theirs, self._log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR)],
                stdin=self._theirs.fileno(),
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        self._say(json.dumps({"argv": self._argv, **asdict(self._seconds)}))

    @property
    def supervisor_pid(self) -> int | None:
        return self._supervisor.pid if self._supervisor else None

    def wait(self, seconds: float) -> bool:
        """Wait for news of the process; False when none came in time."""
        if self._over:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return False
        try:
            data = self._channel.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False  # Another thread was quicker.
        except OSError:
            data = b""
        *events, self._told = (self._told + data).split(b"\n")
        for event in events:
            self._note(json.loads(event))
        if not data:
            self._over = True
            self.exit = self.exit or Exit(problem="was lost: its supervisor was killed")
        return True

    def is_alive(self) -> bool:
        while self.wait(0):
            pass
        return self.exit is None

    def keep(self) -> None:
        """Leave the process to its supervisor, which then ends it on SIGTERM; `stop` does nothing any more."""
        self._say("keep")
        self._kept = True
        self._close()
        if self._supervisor is not None:
            self._supervisor.returncode = 0  # Or its destructor would complain that it runs.

    def stop(self) -> None:
        """End the process and all that came from it, at once when interrupted; may be called again.

        Raises ServerError when something is left that even SIGKILL did not end.
        """
        if os.getpid() != self.marker.harness_pid:
            return  # A forked copy of the harness; the server is not its own.
        if self._supervisor is None or self._kept:
            self._close()
            return
        seconds = self._seconds
        try:
            self._say("stop")
            self._await_supervisor(seconds.interrupt + seconds.terminate + seconds.kill + ANSWER_SECONDS)
        finally:
            self._say("kill")
            self._await_supervisor(ANSWER_SECONDS)
            self._bury()
            self._close()

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"pid": int(pid)}:
                self.pid = pid
            case {"exit": int(status)}:
                self.exit = Exit.of(status)
            case {"error": str(problem)}:
                self.exit = Exit(problem=f"could not be started: {problem}")
            case {"left": [*pids]}:
                self._left = pids

    def _say(self, word: str) -> None:
        with contextlib.suppress(OSError):
            self._channel.sendall(f"{word}\n".encode())

    def _await_supervisor(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._over and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(max(0.0, deadline - time.monotonic()))

    def _close(self) -> None:
        self._over = True
        self.exit = self.exit or Exit(problem="was not started")
        self._channel.close()
        self._theirs.close()

    def _bury(self) -> None:
        """Kill what the supervisor could not, which is nothing unless it was itself killed."""
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()
        marked = kill_marked(self.marker, seconds=self._seconds.kill, session=self.pid).survivors
        left = {process.pid: str(process) for process in marked}
        left |= {pid: str(pid) for pid in self._left if pid not in left and psutil.pid_exists(pid)}
        if left:
            raise ServerError(
                f"processes of the server {self.marker} are still there after SIGKILL: {', '.join(left.values())}; "
                "they wait for a device or a file system that does not answer, or run as another user: see `dmesg`"
            )
