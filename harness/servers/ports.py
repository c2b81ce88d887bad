"""Chooses ports that no other harness has been promised, and tells whose a listening port is."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import InfrastructureError

LOW, HIGH = 20_000, 30_000
"""Below Linux' own range for outgoing connections, which may take any port of theirs at any time."""
BLOCK = 64
"""vLLM counts up from VLLM_PORT, a few ports for each rank."""


class PortOwner(StrEnum):
    """Who listens on a port."""

    NOBODY = "nobody"
    OURS = "ours"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"
    """The kernel does not show it here."""


@dataclass(slots=True, kw_only=True)
class PortBlock:
    """Consecutive ports promised to one server until released, or until this process ends."""

    first: int
    _promise: socket.socket

    @property
    def port(self) -> int:
        """The port for HTTP."""
        return self.first

    @property
    def engine_port(self) -> int:
        """Where the engine starts counting for its own: VLLM_PORT."""
        return self.first + 1

    @classmethod
    def reserve(cls, low: int = LOW, high: int = HIGH) -> Self:
        """Promise a block of which every port is free.

        Raises InfrastructureError when there is none.
        """
        firsts = list(range(_block_of(low + BLOCK - 1), high - BLOCK + 1, BLOCK))
        random.Random().shuffle(firsts)
        for first in firsts:
            promise = _promise(first)
            if promise is None:
                continue
            if all(is_free(port) for port in range(first, first + BLOCK)):
                return cls(first=first, _promise=promise)
            promise.close()
        raise InfrastructureError(f"no {BLOCK} free ports in a row between {low} and {high}: see `ss -ltnp`")

    def release(self) -> None:
        self._promise.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def free_port(low: int = LOW, high: int = HIGH) -> int:
    """Return a port that is free now and promised to nobody: for what can be tried again."""
    ports = list(range(low, high))
    random.Random().shuffle(ports)
    for port in ports:
        promise = _promise(_block_of(port))
        if promise is not None:
            with promise:
                if is_free(port):
                    return port
    raise InfrastructureError(f"no free port between {low} and {high}: see `ss -ltnp`")


def is_free(port: int) -> bool:
    """Tell whether a server could bind the port on any address.

    Strict on purpose, without SO_REUSEADDR: vLLM binds its port minutes before it listens.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def port_owner(port: int, pids: Iterable[int]) -> PortOwner:
    """Tell whether all that listen for 127.0.0.1 on the port are among the given processes.

    All, because with SO_REUSEPORT two servers share a port and the kernel deals requests to both. While nobody listens,
    which is most of a start, it costs next to nothing: the kernel's list of sockets was seen to take 5 ms to read.
    """
    if not _takes_connections(port):
        return PortOwner.NOBODY
    try:
        listening = set(_listening_inodes(port))
    except OSError:
        return PortOwner.UNKNOWN
    if not listening:
        return PortOwner.NOBODY
    try:
        for pid in pids:
            listening -= set(_socket_inodes(pid))
    except PermissionError:
        return PortOwner.UNKNOWN
    return PortOwner.FOREIGN if listening else PortOwner.OURS


def _block_of(port: int) -> int:
    return port // BLOCK * BLOCK


def _promise(first: int) -> socket.socket | None:
    """Take the block's name, or None when another process has it.

    A name in the abstract namespace of Unix sockets is known to every user exactly as far as the ports themselves
    (one network namespace), and is gone with its holder: no lock file to go stale.
    """
    promise = socket.socket(socket.AF_UNIX)
    try:
        promise.bind(f"\0accuracy-gate-ports-{first}")
    except OSError:
        promise.close()
        return None
    return promise


_LOOPBACK = {
    "00000000",
    "0100007F",
    "00000000000000000000000000000000",
    "0000000000000000FFFF00000100007F",
    "0000000000000000FFFF000000000000",
}
_LISTEN = "0A"


def _takes_connections(port: int) -> bool:
    """Whether a connection to 127.0.0.1 is not refused; one that has to wait is not."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _listening_inodes(port: int) -> Iterator[int]:
    """List the sockets that take connections to 127.0.0.1, from lines `sl local remote st … uid timeout inode`."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError) if table.endswith("6") else contextlib.nullcontext():
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTEN and int(number, 16) == port and address in _LOOPBACK:
                    yield int(fields[9])


def _socket_inodes(pid: int) -> Iterator[int]:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return
    for link in links:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                yield int(target[8:-1])
