"""Dealing one list over several machines."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config_lists import load_lists
from harness.durations import guessed
from harness.shards import shards

VARIABLE = "ACCURACY_GATE_VLLM_CONFIGS"
FOLDER = Path(os.environ[VARIABLE]).resolve() if os.environ.get(VARIABLE) else None
LISTS = sorted(FOLDER.rglob("*.txt")) if FOLDER else []

items_of_any_length = st.lists(
    st.tuples(st.uuids().map(str), st.floats(0, 1e4)), max_size=12, unique_by=lambda item: item[0]
)


def longest(dealt: Sequence[Sequence[str]], items: Sequence[tuple[str, float]]) -> float:
    seconds = dict(items)
    return max(sum(seconds[name] for name in shard) for shard in dealt)


def best(durations: Sequence[float], n: int, found: float) -> float:
    """Find by branch and bound the least time in which `n` machines are done, given a time that can be reached."""
    ordered = sorted(durations, reverse=True)
    least = max(sum(ordered) / n, ordered[0])
    answer = found
    loads = [0.0] * n

    def place(index: int) -> None:
        nonlocal answer
        if index == len(ordered):
            answer = min(answer, max(loads))
            return
        for load in sorted(set(loads)):  # equal loads lead to the same
            if answer <= least * (1 + 1e-12) or load + ordered[index] >= answer * (1 - 1e-12):
                return
            shard = loads.index(load)
            loads[shard] += ordered[index]
            place(index + 1)
            loads[shard] = load

    place(0)
    return answer


@settings(deadline=None)
@given(items_of_any_length, st.integers(1, 6))
def test_every_config_is_in_exactly_one_shard(items: list[tuple[str, float]], n: int) -> None:
    """There are as many shards as asked for, and together they are the list, each in its order."""
    dealt = shards(items, n)
    names = [name for name, _ in items]
    assert len(dealt) == n
    assert sorted(itertools.chain(*dealt)) == sorted(names)
    assert all(list(shard) == sorted(shard, key=names.index) for shard in dealt)
    assert shards(items, n) == dealt


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=10), st.integers(1, 5))
def test_any_list_is_dealt_as_well_as_is_guaranteed(durations: list[int], n: int) -> None:
    """No list, however awkward, takes longer than dealing the longest first guarantees: 4/3 - 1/(3 n) of the best."""
    items = [(str(index), float(seconds)) for index, seconds in enumerate(durations)]
    found = longest(shards(items, n), items)
    assert found <= (4 / 3 - 1 / (3 * n)) * best([seconds for _, seconds in items], n, found) + 1e-6


@pytest.mark.parametrize(
    ("durations", "n", "expected"),
    [
        ([], 2, ((), ())),
        ([5], 3, (("0",), (), ())),
        ([1, 1, 1], 1, (("0", "1", "2"),)),
        ([3, 3, 2, 2, 2], 2, (("2", "3", "4"), ("0", "1"))),  # the longest first alone would take 7
        ([1, 2, 3, 4], 2, (("0", "3"), ("1", "2"))),
        ([0, 0], 2, (("0",), ("1",))),
    ],
    ids=["nothing", "fewer than shards", "one shard", "exchanged", "dealt", "no time at all"],
)
def test_small_lists(durations: list[float], n: int, expected: tuple[tuple[str, ...], ...]) -> None:
    """What comes out is known for lists that can be checked by hand."""
    assert shards([(str(index), seconds) for index, seconds in enumerate(durations)], n) == expected


@pytest.mark.parametrize(
    ("items", "n", "message"),
    [
        ([("a", 1.0)], 0, "0 shards"),
        ([("a", 1.0), ("a", 2.0)], 2, "a stands twice"),
        ([("a", float("nan"))], 2, "a: nan s is no duration"),
        ([("a", -1.0)], 2, "a: -1.0 s is no duration"),
        ([("a", float("inf"))], 2, "a: inf s is no duration"),
    ],
)
def test_what_cannot_be_dealt(items: list[tuple[str, float]], n: int, message: str) -> None:
    """A mistake is named instead of dealt."""
    with pytest.raises(ValueError, match=message):
        shards(items, n)


@pytest.mark.skipif(not LISTS, reason=f"{VARIABLE} names no folder of vLLM's configs")
@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_real_lists_are_balanced(path: Path) -> None:
    """Of a real list every config runs once, and no number of shards takes a tenth longer than its best balance."""
    entries = load_lists([path])
    items = [(entry.id, guessed(entry.config).seconds) for entry in entries]
    for n in range(1, 17):
        dealt = shards(items, n)
        assert sorted(itertools.chain(*dealt)) == sorted(entry.id for entry in entries)
        found = longest(dealt, items)
        assert found <= 1.1 * best([seconds for _, seconds in items], n, found)
