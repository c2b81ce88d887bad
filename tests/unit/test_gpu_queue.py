"""Who gets which GPUs next."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.gpus.queue import ROUNDING, Granted, Ticket, grant, in_the_way


def wants(number: int, candidates: str, count: int = 1, share: float | None = None) -> Ticket:
    return Ticket(number=number, candidates=tuple(candidates), count=count, share=share)


def holds(gpus: str, share: float | None = None, place: int = 0) -> Ticket:
    return Ticket(
        number=0,
        candidates=tuple(gpus),
        count=len(gpus),
        share=share,
        granted=Granted(gpus=tuple(gpus), place=place),
    )


CASES: dict[str, tuple[list[Ticket], Ticket, tuple[str, int] | None]] = {
    "an empty machine gives the first candidate": ([], wants(1, "abcd"), ("a", 0)),
    "several in the candidates' order": ([], wants(1, "dcba", 2), ("dc", 0)),
    "held ones are passed over": ([holds("a"), holds("c")], wants(1, "abcd", 2), ("bd", 0)),
    "too few are free": ([holds("ab")], wants(1, "abc", 2), None),
    "nothing outside the candidates": ([holds("a")], wants(1, "a"), None),
    "first come, first served": ([wants(1, "a")], wants(2, "a"), None),
    "a later one does not count": ([wants(3, "a")], wants(2, "a"), ("a", 0)),
    "not before the first has looked": ([wants(1, "ab")], wants(2, "ab"), None),
    "past one with no candidate in common": ([wants(1, "ab")], wants(2, "cd"), ("c", 0)),
    "a big one is not starved": ([holds("a"), wants(1, "ab", 2)], wants(2, "ab"), None),
    "past one that waits for other GPUs": ([holds("a"), wants(1, "ab", 2)], wants(2, "abc"), ("c", 0)),
    "past two that wait for other GPUs": (
        [wants(1, "ab"), holds("c"), wants(2, "bc", 2)],
        wants(3, "bd"),
        ("d", 0),
    ),
    "a share of an empty GPU": ([], wants(1, "ab", share=0.25), ("a", 0)),
    "shares are packed on the fullest": (
        [holds("a", 0.25), holds("b", 0.5)],
        wants(1, "abc", share=0.5),
        ("b", 1),
    ),
    "the fullest that has room": ([holds("a", 0.25), holds("b", 0.75)], wants(1, "abc", share=0.5), ("a", 1)),
    "no share of a whole one": ([holds("a")], wants(1, "a", share=0.1), None),
    "no whole one of a shared GPU": ([holds("a", 0.1)], wants(1, "a"), None),
    "shares up to the brim": ([holds("a", 0.1, place) for place in range(9)], wants(1, "a", share=0.1), ("a", 9)),
    "and no further": ([holds("a", 0.1, place) for place in range(10)], wants(1, "a", share=0.1), None),
    "the lowest place that is free": ([holds("a", 0.2, 0), holds("a", 0.2, 2)], wants(1, "a", share=0.2), ("a", 1)),
    "a small share waits behind a large one": (
        [holds("a", 0.6), wants(1, "a", share=0.5)],
        wants(2, "a", share=0.1),
        None,
    ),
    "a whole one waits behind a share": ([wants(1, "ab", share=0.5)], wants(2, "ab"), None),
}


@pytest.mark.parametrize(("others", "ticket", "expected"), CASES.values(), ids=CASES)
def test_who_gets_what(others: list[Ticket], ticket: Ticket, expected: tuple[str, int] | None) -> None:
    """A ticket gets free GPUs, in order, and never at the cost of one before it."""
    granted = grant(others, ticket)
    assert (granted and ("".join(granted.gpus), granted.place)) == expected


def test_what_a_ticket_waits_for() -> None:
    """Holders of its candidates come first, then those before it in line; the others are not in its way."""
    holder, elsewhere = holds("a"), holds("c")
    before, beside, after = wants(1, "ab", 2), wants(2, "d"), wants(4, "ab")
    assert in_the_way([after, before, beside, elsewhere, holder], wants(3, "ab")) == [holder, before]


def test_a_stream_of_small_ones_does_not_starve_a_big_one() -> None:
    """A ticket for both GPUs gets them once those before it are done, whatever keeps arriving."""
    running = [replace(wants(n, "ab"), granted=Granted(gpus=(gpu,))) for n, gpu in ((1, "a"), (2, "b"))]
    big, number = wants(3, "ab", 2), 4
    for ended in range(2):
        small = [wants(number + n, "ab") for n in range(5)]
        number += len(small)
        running = [ticket for ticket in running if ticket.number != ended + 1]
        assert all(grant([*running, big, *small], one) is None for one in small)
    assert grant(running, big) == Granted(gpus=("a", "b"))


Wish = tuple[tuple[str, ...], int, float | None]

wishes = st.builds(
    lambda candidates, count, share: (
        tuple(sorted(candidates)),
        1 if share else min(count, len(candidates)),
        share,
    ),
    st.sets(st.sampled_from("abcd"), min_size=1),
    st.integers(1, 4),
    st.sampled_from([None, None, 0.1, 0.25, 0.3, 0.5, 1.0]),
)
events = st.lists(st.one_of(wishes, st.tuples(st.sampled_from(["looks", "ends"]), st.integers(0, 30))), max_size=40)


class Machine:
    """Plays runs that come, look and end, and checks after each step what must always hold."""

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.order: list[int] = []
        self.could: set[int] = set()

    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets.values() if ticket.granted is None]

    def comes(self, wish: Wish) -> None:
        number = len(self.order) + len(self.waiting()) + 1
        self.tickets[number] = Ticket(number=number, candidates=wish[0], count=wish[1], share=wish[2])

    def looks(self, ticket: Ticket) -> None:
        granted = grant(self.tickets.values(), ticket)
        if granted is not None:
            assert len(granted.gpus) == ticket.count
            assert set(granted.gpus) <= set(ticket.candidates)
            self.tickets[ticket.number] = replace(ticket, granted=granted)
            self.order.append(ticket.number)

    def ends_one(self, place: int) -> None:
        held = [ticket for ticket in self.tickets.values() if ticket.granted is not None]
        if held:
            del self.tickets[held[place % len(held)].number]

    def check(self) -> None:
        taken: dict[str, list[Ticket]] = {}
        for ticket in self.tickets.values():
            for gpu in ticket.granted.gpus if ticket.granted else ():
                taken.setdefault(gpu, []).append(ticket)
        for sharing in taken.values():
            assert sum(ticket.share or 1 for ticket in sharing) <= 1 + ROUNDING
            assert len({ticket.granted.place for ticket in sharing if ticket.granted}) == len(sharing)
        can = {ticket.number for ticket in self.waiting() if grant(self.tickets.values(), ticket) is not None}
        still = {ticket.number for ticket in self.waiting()}
        assert self.could & still <= can, "whoever could have gone can still go"
        self.could = can


@settings(max_examples=300, deadline=None)
@given(events)
def test_whatever_happens(happening: list[tuple[object, ...]]) -> None:
    """No GPU is given out twice, whoever could go still can later, and in the end everybody had a turn."""
    machine, wished = Machine(), []
    for event in happening:
        match event:
            case ("looks", int(place)):
                for ticket in machine.waiting()[place : place + 1]:
                    machine.looks(ticket)
            case ("ends", int(place)):
                machine.ends_one(place)
            case (tuple(candidates), int(count), None | float() as share):
                machine.comes((candidates, count, share))
                wished.append(machine.tickets[max(machine.tickets)])
        machine.check()
    while machine.tickets:
        for ticket in sorted(machine.waiting(), key=lambda ticket: ticket.number):
            machine.looks(ticket)
            machine.check()
        assert any(ticket.granted for ticket in machine.tickets.values()), "nobody holds anything and nobody may go"
        machine.ends_one(0)
        machine.check()
    assert sorted(machine.order) == [ticket.number for ticket in wished]


@settings(max_examples=200, deadline=None)
@given(st.lists(wishes, min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_equal_wishes_are_granted_in_order(asked: list[Wish], chance: random.Random) -> None:
    """Of two that want the same, the one that came first goes first, whoever looks first."""
    machine = Machine()
    for wish in asked:
        machine.comes(wish)
    wished = list(machine.tickets.values())
    while machine.tickets:
        looking = machine.waiting()
        chance.shuffle(looking)
        for ticket in looking:
            machine.looks(ticket)
            machine.check()
        machine.ends_one(chance.randrange(12))
    for earlier, later in itertools.combinations(wished, 2):
        if replace(earlier, number=0) == replace(later, number=0):
            assert machine.order.index(earlier.number) < machine.order.index(later.number)
