"""Finds the processes of a server by the mark in their environment, and kills them; never those of a live run.

A mark survives what hides a process from its parents: a parent's death, `setsid`, a double fork.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Self

import psutil

VARIABLE = "ACCURACY_GATE_SERVER"
SUPERVISOR_NAME = "supervisor.py"
PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Whose a server is; its text is `run id:server:harness pid:harness start`."""

    run_id: str
    server: str
    harness_pid: int
    harness_start: int
    """Clock ticks since boot, as the kernel counts them: a pid is used again, a pid with its start is not."""

    @classmethod
    def new(cls, run_id: str) -> Self:
        """Make the mark of one more server of this process."""
        start = start_ticks(os.getpid())
        assert start is not None, "this process is in /proc"
        return cls(run_id=run_id, server=uuid.uuid4().hex, harness_pid=os.getpid(), harness_start=start)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a mark; None when it is none."""
        match text.rsplit(":", 3):
            case [run_id, server, pid, start] if pid.isdecimal() and start.isdecimal():
                return cls(run_id=run_id, server=server, harness_pid=int(pid), harness_start=int(start))
        return None

    def __str__(self) -> str:
        return f"{self.run_id}:{self.server}:{self.harness_pid}:{self.harness_start}"

    def harness_lives(self) -> bool:
        return start_ticks(self.harness_pid) == self.harness_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One process of a server."""

    pid: int
    name: str
    marker: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was killed, and what is still there although it was."""

    killed: tuple[Leftover, ...] = ()
    survivors: tuple[Leftover, ...] = ()


def kill_marked(marker: Marker, *, seconds: float, session: int | None = None) -> Sweep:
    """Kill every process that bears the mark or is in the server's session, and wait until none is left."""
    text = str(marker)

    def belongs(process: psutil.Process, mark: str) -> bool:
        return mark == text or (session is not None and os.getsid(process.pid) == session)

    return _kill(belongs, seconds)


def find_marked(marker: Marker) -> list[Leftover]:
    """List the processes that bear the mark."""
    return [found for _, found in _find(lambda _, mark: mark == str(marker))]


def sweep_dead_runs(seconds: float = 5.0) -> Sweep:
    """Kill the servers whose harness is no more, but for those whose supervisor lives: it stops or keeps them."""
    supervised = {left.marker for _, left in _find(lambda process, _: _is_supervisor(process))}

    def orphaned(process: psutil.Process, mark: str) -> bool:
        marker = Marker.parse(mark) if mark not in supervised else None
        # In another container the harness' pid means another process: nothing can be said about it from here.
        return (
            marker is not None
            and _pid_namespace(process.pid) == _pid_namespace(os.getpid())
            and not marker.harness_lives()
        )

    return _kill(orphaned, seconds)


def _is_supervisor(process: psutil.Process) -> bool:
    return any(PurePath(word).name == SUPERVISOR_NAME for word in process.cmdline()[1:])


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is dead, a zombie or not to be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _kill(belongs: Callable[[psutil.Process, str], bool], seconds: float) -> Sweep:
    """Kill until a scan finds nothing: what is forked during one scan is found by the next."""
    deadline = time.monotonic() + seconds
    killed: dict[psutil.Process, Leftover] = {}
    while found := dict(_find(belongs)):
        for process in found:
            try:
                process.kill()
            except psutil.Error:
                continue
        killed |= found
        if time.monotonic() >= deadline:
            return Sweep(killed=tuple(killed.values()), survivors=tuple(found.values()))
        time.sleep(PAUSE_SECONDS)
    return Sweep(killed=tuple(killed.values()))


def _find(belongs: Callable[[psutil.Process, str], bool]) -> Iterator[tuple[psutil.Process, Leftover]]:
    me = psutil.Process()
    spared = {me, *me.parents()}
    for process in psutil.process_iter():
        try:
            if process in spared or process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            mark = _mark(process)
            if belongs(process, mark):
                yield process, Leftover(pid=process.pid, name=process.name(), marker=mark)
        except (psutil.Error, OSError):
            continue  # Gone meanwhile, or not ours to read.


def _mark(process: psutil.Process) -> str:
    try:
        return process.environ().get(VARIABLE, "")
    except psutil.AccessDenied:
        return ""  # It may yet be known by its session.


def _pid_namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
