"""Who may take which GPUs next, as a pure function of all tickets: first come, first served where tickets compete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WHOLE = 1.0
ROUNDING = 1e-9
"""Ten shares of 0.1 fill a GPU, although floats make them a little less or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a ticket got."""

    gpus: tuple[str, ...]
    """UUIDs, in the order of the ticket's candidates."""
    place: int = 0
    """The lowest number that nobody else on this GPU has; 0 for whole GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A wish for GPUs, and what was given for it."""

    number: int
    """Its place in line: lower ones came first."""
    candidates: tuple[str, ...]
    """UUIDs of the GPUs that would do, the preferred ones first."""
    count: int = 1
    share: float | None = None
    """Of one GPU; None for whole ones."""
    granted: Granted | None = None
    """None while it waits."""


@dataclass(slots=True)
class _Usage:
    """What is taken: for each GPU the shares on it and their places."""

    taken: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, ticket: Ticket, granted: Granted) -> None:
        for uuid in granted.gpus:
            self.taken.setdefault(uuid, []).append((ticket.share or WHOLE, granted.place))

    def used(self, uuid: str) -> float:
        return sum(share for share, _ in self.taken.get(uuid, ()))

    def fit(self, ticket: Ticket, kept: set[str]) -> Granted | None:
        """Find room now, leaving alone what is kept for others."""
        allowed = [uuid for uuid in dict.fromkeys(ticket.candidates) if uuid not in kept]
        if ticket.share is None:
            free = [uuid for uuid in allowed if uuid not in self.taken]
            return Granted(gpus=tuple(free[: ticket.count])) if len(free) >= ticket.count else None
        room = [uuid for uuid in allowed if self.used(uuid) + ticket.share <= WHOLE + ROUNDING]
        if not room:
            return None
        fullest = max(room, key=self.used)  # whole GPUs stay free for those who need them
        places = {place for _, place in self.taken.get(fullest, ())}
        return Granted(gpus=(fullest,), place=next(n for n in range(len(places) + 1) if n not in places))


def grant(tickets: Iterable[Ticket], ticket: Ticket) -> Granted | None:
    """Decide what a ticket may take now; None where it has to wait.

    All candidates of those before it in line are kept for them, even what they could take now: where shares are packed
    depends on who looks first, so anything less could delay one by a later one. So many small ones cannot starve a big
    one, and a later one goes past only on GPUs that nobody before it wants.
    """
    usage = _Usage()
    kept: set[str] = set()
    for other in tickets:
        if other.granted is not None:
            usage.add(other, other.granted)
        elif other.number < ticket.number:
            kept.update(other.candidates)
    return usage.fit(ticket, kept)


def in_the_way(tickets: Iterable[Ticket], ticket: Ticket) -> list[Ticket]:
    """List those that a waiting ticket waits for: who holds one of its candidates, and who is before it in line."""
    wanted = set(ticket.candidates)
    return [
        other
        for other in sorted(tickets, key=lambda other: (other.granted is None, other.number))
        if (other.granted is not None and wanted.intersection(other.granted.gpus))
        or (other.granted is None and other.number < ticket.number and wanted.intersection(other.candidates))
    ]
