"""GPU leases: a config takes its GPUs, or a share of one, and every other run on the machine knows."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigError, GpusBusy
from harness.gpus.inventory import Gpu
from harness.gpus.queue import Granted, Ticket, grant, in_the_way
from harness.gpus.tickets import Holder, TicketFolder, lease_folder

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a config may use until its lease ends."""

    gpus: tuple[Gpu, ...] = ()
    share: float | None = None
    """Of the one GPU; None where they are whole."""
    place: int = 0
    """A small number that nobody else on this GPU has, for port ranges."""


class GpuLeases:
    """Hands out the GPUs of this machine; all runs that name the same folder queue in one line."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is by default one per user and machine; see `harness.gpus.tickets.lease_folder`."""
        self._folder = TicketFolder(folder or lease_folder())

    @contextmanager
    def lease(
        self,
        candidates: Sequence[Gpu],
        *,
        count: int = 1,
        share: float | None = None,
        what: str,
        timeout: float = math.inf,
        waiting: Callable[[str], None] = lambda text: None,
    ) -> Iterator[Lease]:
        """Wait for `count` whole GPUs or a `share` of one, and hold them until the context is left.

        Without candidates (a CPU) or with a count of 0 there is nothing to lease and nothing to wait for. `waiting`
        is told whom this waits for, again whenever that changes. Raises ConfigError for more GPUs than there are
        candidates or an impossible share, GpusBusy after `timeout` seconds (0 tries once).
        """
        wish = _wish(candidates, count, share)
        if wish is None:
            yield Lease()
            return
        name, pid = uuid.uuid4().hex, os.getpid()
        try:
            granted = self._wait(_Wish(name=name, what=what, ticket=wish, gpus=candidates), timeout, waiting)
            by_uuid = {gpu.uuid: gpu for gpu in candidates}
            yield Lease(gpus=tuple(by_uuid[uuid] for uuid in granted.gpus), share=share, place=granted.place)
        finally:
            if os.getpid() == pid:  # a forked child that ends through here holds nothing
                self._folder.remove(name)

    def table(self) -> tuple[Holder, ...]:
        """List who holds GPUs, then who waits in which order."""
        holders = self._folder.peek().values()
        return tuple(sorted(holders, key=lambda holder: (holder.waits, holder.ticket.number)))

    def _wait(self, wish: _Wish, timeout: float, waiting: Callable[[str], None]) -> Granted:
        deadline = time.monotonic() + timeout
        mine = said = None
        while True:
            with self._folder.locked(deadline):
                mine, others = self._look(wish, mine)
            if mine.ticket.granted is not None:
                return mine.ticket.granted
            text = wish.explain(mine, others)
            if time.monotonic() >= deadline:
                raise GpusBusy(f"{wish.what}: not within {timeout:g} s: {text}; wait longer, or end those")
            if text != said:
                waiting(text)
            said = text
            time.sleep(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))

    def _look(self, wish: _Wish, mine: Holder | None) -> tuple[Holder, list[Holder]]:
        """Stand in line, or take what there is; return this run's ticket and the others that count."""
        found = self._folder.holders()
        present = found.pop(wish.name, None) is not None
        # One that was suspended keeps its place and what it holds, but nobody waits for it to look again.
        others = [other for other in found.values() if not (other.waits and other.is_stopped)]
        if mine is None:
            last = max((other.ticket.number for other in found.values()), default=0)
            mine = Holder.this_process(wish.what, replace(wish.ticket, number=last + 1))
        granted = grant([other.ticket for other in others], mine.ticket)
        if granted is not None:
            mine = Holder.this_process(wish.what, replace(mine.ticket, granted=granted))
        if granted is not None or not present:  # whoever cleans up /tmp may have removed it
            self._folder.write(wish.name, mine)
        return mine, others


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What one call of `lease` asks for."""

    name: str
    what: str
    ticket: Ticket
    gpus: Sequence[Gpu]

    def explain(self, mine: Holder, others: Sequence[Holder]) -> str:
        """Say whom it waits for, in one line."""
        index = {gpu.uuid: str(gpu.index) for gpu in self.gpus}
        by_number = {other.ticket.number: other for other in others}
        reasons = []
        for ticket in in_the_way([other.ticket for other in others], mine.ticket):
            holder = by_number[ticket.number]
            if ticket.granted is None:
                reasons.append(f"pid {holder.pid} ({holder.what}) is before it in line")
            else:
                part = "" if ticket.share is None else f"{ticket.share:g} of "
                held = ", ".join(index[uuid] for uuid in ticket.granted.gpus if uuid in index)
                reasons.append(f"pid {holder.pid} ({holder.what}) holds {part}GPU {held}")
        needed = describe_need(mine.ticket, index)
        return f"{needed}: {'; '.join(reasons)}"


def describe_need(ticket: Ticket, names: dict[str, str]) -> str:
    """Say what a ticket asks for; `names` gives a GPU's short name by its UUID."""
    among = ", ".join(names.get(uuid, uuid) for uuid in ticket.candidates)
    if ticket.share is not None:
        return f"{ticket.share:g} of a GPU among {among}"
    return f"{ticket.count} whole GPU{'s' if ticket.count > 1 else ''} among {among}"


def _wish(candidates: Sequence[Gpu], count: int, share: float | None) -> Ticket | None:
    """Check what is asked for; None where it is nothing."""
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"gpu_share: {share:g}: must lie above 0 and not above 1")
    if share is not None and count > 1:
        raise ConfigError(
            f"gpu_share: {share:g}: is a share of one GPU, but {count} GPUs are needed: remove one of both"
        )
    if not candidates or count <= 0:
        return None
    if count > len(candidates):
        there = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in candidates)
        raise ConfigError(f"{count} GPUs are needed and the run may use {len(candidates)}: {there}; see --gpus")
    return Ticket(number=0, candidates=tuple(gpu.uuid for gpu in candidates), count=count, share=share)
