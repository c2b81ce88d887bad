"""One list over several machines: which config runs where, so that all finish at about the same time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

GAIN = 1e-9
"""Relative; less is a float's rounding, by which two moves could undo each other for ever."""


@dataclass(slots=True)
class _Shard:
    items: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def exchange(self, out: Sequence[int], into: Sequence[int], durations: Sequence[float]) -> None:
        self.items = [item for item in self.items if item not in out] + list(into)
        self.seconds = sum(durations[item] for item in self.items)


def shards(items: Sequence[tuple[str, float]], n: int) -> tuple[tuple[str, ...], ...]:
    """Deal servers with their seconds over `n` shards; each stands in exactly one, in the list's order.

    All tasks of one server belong in one item. The longest is dealt first, each to the shard with the least to do;
    then the busiest gives an item away, or swaps one, for as long as that helps. The same list always gives the same
    shards, on every machine; a shard may be empty. Raises ValueError for no shards, a name that stands twice and
    seconds that are no duration.
    """
    _check(items, n)
    durations = [seconds for _, seconds in items]
    dealt = [_Shard() for _ in range(n)]
    for item in sorted(range(len(items)), key=lambda item: (-durations[item], item)):
        min(dealt, key=lambda shard: (shard.seconds, len(shard.items))).exchange((), (item,), durations)
    while _improve(dealt, durations):
        pass
    return tuple(tuple(items[item][0] for item in sorted(shard.items)) for shard in dealt)


def _check(items: Sequence[tuple[str, float]], n: int) -> None:
    if n < 1:
        raise ValueError(f"{n} shards: there must be 1 or more")
    names = set()
    for name, seconds in items:
        if name in names:
            raise ValueError(f"{name} stands twice")
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{name}: {seconds} s is no duration")
        names.add(name)


def _improve(dealt: Sequence[_Shard], durations: Sequence[float]) -> bool:
    """Make the best exchange between the busiest shard and another; False where none shortens the two."""
    busiest = max(dealt, key=lambda shard: shard.seconds)
    best, found = busiest.seconds * (1 - GAIN), None
    for other in dealt:
        if other is busiest:
            continue
        for out, into in _exchanges(busiest, other):
            less = sum(durations[item] for item in out) - sum(durations[item] for item in into)
            longer = max(busiest.seconds - less, other.seconds + less)
            if longer < best:
                best, found = longer, (other, out, into)
    if found is None:
        return False
    other, out, into = found
    busiest.exchange(out, into, durations)
    other.exchange(into, out, durations)
    return True


def _exchanges(busiest: _Shard, other: _Shard) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """List what may leave the busiest shard, and what may come back for it."""
    for out in busiest.items:
        yield (out,), ()
        for into in other.items:
            yield (out,), (into,)
            for second in busiest.items:
                if second > out:
                    yield (out, second), (into,)
        for into in other.items:
            for second in other.items:
                if second > into:
                    yield (out,), (into, second)
