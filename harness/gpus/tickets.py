"""The folder of tickets that all runs of a machine share: one file for each that holds GPUs or waits for some.

A ticket counts for as long as its process lives; whoever looks removes those of the dead. It bears the process' pid
and start time. Where a pid says nothing, in another container or after a reboot, the ticket counts while a lock is
held on the file beside it, which the kernel gives up with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from harness.errors import ConfigError, GpusBusy, InfrastructureError
from harness.gpus.queue import Granted, Ticket
from harness.servers.leftovers import start_ticks

VARIABLE = "ACCURACY_GATE_LEASES"
LOCK_SECONDS = 30.0
"""Who holds the folder's lock needs milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds GPUs, or waits for some."""

    pid: int
    start: int
    """Clock ticks since boot: a pid is used again, a pid with its start is not."""
    space: str
    """Where the pid means this process: the boot and the pid namespace."""
    what: str
    since: float
    """Seconds since the epoch: when the GPUs were granted, or the waiting began."""
    ticket: Ticket

    @classmethod
    def this_process(cls, what: str, ticket: Ticket) -> Self:
        start = start_ticks(os.getpid())
        assert start is not None, "this process is in /proc"
        return cls(pid=os.getpid(), start=start, space=_pid_space(), what=what, since=time.time(), ticket=ticket)

    @property
    def waits(self) -> bool:
        return self.ticket.granted is None

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl-Z or SIGSTOP suspended its process; False where that cannot be told from here."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
            return self.space == _pid_space() and stat.rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read a ticket's file; raises ValueError where it is none."""
        match json.loads(content):
            case {
                "pid": int(pid),
                "start": int(start),
                "space": str(space),
                "what": str(what),
                "since": int() | float() as since,
                "ticket": dict(ticket),
            }:
                read = _parse_ticket(ticket)
                return cls(pid=pid, start=start, space=space, what=what, since=since, ticket=read)
        raise ValueError("it lacks a key")


def _parse_ticket(data: dict[str, Any]) -> Ticket:
    match data:
        case {
            "number": int(number),
            "candidates": list(candidates),
            "count": int(count),
            "share": None | int() | float() as share,
            "granted": None | {"gpus": list(), "place": int()} as given,
        }:
            granted = Granted(gpus=tuple(map(str, given["gpus"])), place=given["place"]) if given else None
            wanted = tuple(map(str, candidates))
            return Ticket(number=number, candidates=wanted, count=count, share=share, granted=granted)
    raise ValueError("it lacks a key of the ticket")


def lease_folder() -> Path:
    """Name the folder of this user's tickets on this machine, or the one that $ACCURACY_GATE_LEASES names.

    Runs see each other only within one folder. To share GPUs between users or containers, name one that all of them
    may write to, without the sticky bit, which keeps one user from removing another's tickets.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        # Not TMPDIR, which CI systems and batch schedulers set anew for each job.
        return Path("/tmp") / f"accuracy-gate-gpus-{os.getuid()}"
    if not Path(named).is_absolute():
        raise ConfigError(f"{VARIABLE}={named}: must be an absolute path, the same for every run on this machine")
    return Path(named)


class TicketFolder:
    """Reads and writes tickets; all but `peek` and `remove` belong inside `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lives: dict[str, int] = {}
        """Open files whose locks say that a ticket's process lives."""

    @contextmanager
    def locked(self, deadline: float = float("inf")) -> Iterator[None]:
        """Be the only one who reads and writes; `deadline` is a time of the monotonic clock.

        Raises GpusBusy where another process keeps the lock, InfrastructureError where the folder cannot be used.
        """
        seconds = min(LOCK_SECONDS, max(deadline - time.monotonic(), 1.0))
        lock = FileLock(self.path / ".lock", mode=0o666)
        with self._usable():
            self._make()
            try:
                lock.acquire(timeout=seconds, poll_interval=0.02)
            except Timeout as error:
                raise GpusBusy(
                    f"{self.path / '.lock'}: held for over {seconds:g} s; `lslocks` names the process: it may be "
                    "stopped, so continue or end it"
                ) from error
            except NotImplementedError as error:
                raise ConfigError(f"{self.path}: this file system has no locks; name another in {VARIABLE}") from error
            try:
                yield
            finally:
                lock.release()

    def holders(self) -> dict[str, Holder]:
        """Read the tickets of all live processes by name, and remove whatever else lies there.

        A file that is no ticket is put aside with a warning.
        """
        found = self.peek()
        for path in [*self.path.glob("*.alive"), *self.path.glob("*.ticket"), *self.path.glob("*.part")]:
            if path.stem in found or path.stem in self._lives:
                continue
            if path.suffix == ".ticket" and (fault := self._fault(path)):
                aside = path.with_suffix(".damaged")
                path.replace(aside)
                warnings.warn(
                    f"{path}: no ticket for GPUs ({fault}): put aside as {aside.name}. If its run goes on, its GPUs "
                    "may be given to another; delete the file when that is settled",
                    stacklevel=2,
                )
            elif path.suffix != ".alive" or not self._lock_is_held(path.stem):
                path.unlink(missing_ok=True)
        return found

    def peek(self) -> dict[str, Holder]:
        """Read the tickets of all live processes by name and leave everything as it is."""
        found = {}
        for path in sorted(self.path.glob("*.ticket")):
            with contextlib.suppress(OSError, ValueError):
                holder = Holder.parse(path.read_bytes())
                if self._lives_on(path, holder):
                    found[path.stem] = holder
        return found

    def write(self, name: str, holder: Holder) -> None:
        """Write a ticket of this process, whole or not at all."""
        if name not in self._lives:
            self._lives[name] = _open_readable(self._life(name))
            fcntl.flock(self._lives[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
        part = self.path / f"{name}.part"
        with open(_open_readable(part), "w", encoding="utf-8") as file:
            json.dump(asdict(holder), file)
        part.replace(self.path / f"{name}.ticket")

    def remove(self, name: str) -> None:
        """Remove a ticket of this process, without the lock: leaving must not wait for anybody."""
        life = self._lives.pop(name, None)
        if life is None:
            return
        with contextlib.suppress(OSError):  # at the latest it goes with this process
            (self.path / f"{name}.ticket").unlink(missing_ok=True)
            self._life(name).unlink(missing_ok=True)
        os.close(life)

    def _life(self, name: str) -> Path:
        return self.path / f"{name}.alive"

    def _lives_on(self, path: Path, holder: Holder) -> bool:
        here = holder.space == _pid_space()
        if here and start_ticks(holder.pid) == holder.start:
            return True
        # Of other users' processes /proc may tell nothing.
        if here and os.getuid() in (0, path.stat().st_uid):
            return False
        return self._lock_is_held(path.stem)

    def _lock_is_held(self, name: str) -> bool:
        try:
            life = os.open(self._life(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(life)
        return False

    def _fault(self, path: Path) -> str | None:
        try:
            Holder.parse(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            return str(error)
        return None

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            told = self.path.lstat()
        else:
            return
        # In /tmp anybody may have made it, or a link of that name, before us.
        if not os.environ.get(VARIABLE) and self.path == lease_folder() and told.st_uid != os.getuid():
            raise ConfigError(f"{self.path}: belongs to another user: remove it, or name a folder in {VARIABLE}")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InfrastructureError(
                f"{self.path}: leases of GPUs cannot be kept there: {error.strerror or error}; free some space, or "
                f"name a folder that can be written to in {VARIABLE}"
            ) from error


def _open_readable(path: Path) -> int:
    """Open a file for writing that other users can read whatever this one's umask."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.fchmod(file, 0o644)
    return file


def _pid_space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
