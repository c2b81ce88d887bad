"""The exact law of a sum of scores over questions, each question's outcome dealt at random; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NEGLIGIBLE = 1e-30
"""Shares this small are cut off the ends of a law and counted into every tail, so that no p-value is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One thing that may come of a question: its score, and in how many equally likely ways it does."""

    score: int
    ways: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """How likely each value of the sum is: `shares[i]` is the probability of `lowest + i * step`."""

    lowest: int
    step: int
    shares: Sequence[float]
    cut: float

    def tail(self, value: int) -> float:
        """Give the probability of at least `value`, good to 1e-12 of itself where it is above 1e-25."""
        first = max(0, -((self.lowest - value) // self.step))
        return min(1.0, math.fsum(self.shares[first:]) + self.cut)

    def critical(self, alpha: float) -> int:
        """Give the lowest value whose tail is at most alpha; one step above all there are where none is."""
        beyond, index = self.cut, len(self.shares)
        while index and beyond + self.shares[index - 1] <= alpha:
            index -= 1
            beyond += self.shares[index]
        return self.lowest + index * self.step


def law_of_sum(questions: Iterable[Sequence[Outcome]]) -> Law:
    """Add up the questions' scores, the questions being independent: one convolution for each.

    Every term is positive, so nothing cancels and the rounding stays relative.
    """
    lowest, shifted = 0, []
    for outcomes in questions:
        least = min(outcome.score for outcome in outcomes)
        lowest += least
        if len(outcomes) > 1:
            shifted.append([(outcome.score - least, outcome.ways) for outcome in outcomes])
    step = math.gcd(*(score for scored in shifted for score, _ in scored)) or 1
    shares, cut = [1.0], 0.0
    for scored in shifted:
        shares = _convolve(shares, [(score // step, ways) for score, ways in scored])
        start, stop = _kept(shares)
        cut += math.fsum(shares[:start]) + math.fsum(shares[stop:])
        shares = shares[start:stop]
        lowest += start * step
    return Law(lowest=lowest, step=step, shares=shares, cut=cut)


def _convolve(shares: list[float], outcomes: Sequence[tuple[int, int]]) -> list[float]:
    total, span = sum(ways for _, ways in outcomes), max(score for score, _ in outcomes)
    columns = []
    for score, ways in outcomes:
        weight = ways / total
        columns.append([0.0] * score + [share * weight for share in shares] + [0.0] * (span - score))
    return [sum(column) for column in zip(*columns, strict=True)]


def _kept(shares: Sequence[float]) -> tuple[int, int]:
    """Find the stretch between the negligible ends."""
    start, stop = 0, len(shares)
    while shares[start] < NEGLIGIBLE:
        start += 1
    while shares[stop - 1] < NEGLIGIBLE:
        stop -= 1
    return start, stop
