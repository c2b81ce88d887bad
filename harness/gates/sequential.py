"""Stopping before all questions are asked: once the verdict is certain, or all but certain; no I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction

from harness.gates.intervals import Interval
from harness.gates.threshold import Verdict

PRIOR_QUESTIONS = 10
"""How many answers' worth of belief the prior puts on the known accuracy, beside one right and one wrong."""


class StopRule(StrEnum):
    """When to stop asking."""

    EXACT = "exact"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The verdict on accuracy before all questions were asked."""

    rule: StopRule
    verdict: Verdict
    graded: int
    """Answers that decided it."""
    right: int
    questions: int
    interval: Interval
    """Of the accuracy that all the questions would have given; holds although the stop was chosen by the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed of the number of right answers beforehand: beta-binomial with these two parameters."""

    right: float = 1.0
    wrong: float = 1.0

    @classmethod
    def around(cls, accuracy: float) -> Prior:
        """Believe mildly in a known accuracy."""
        return cls(right=1 + PRIOR_QUESTIONS * accuracy, wrong=1 + PRIOR_QUESTIONS * (1 - accuracy))


def asking_order(questions: int, seed: int = 0) -> list[int]:
    """Shuffle the questions' indices by a digest, the same way on every machine and Python."""
    return sorted(range(questions), key=lambda index: hashlib.sha256(f"{seed}:{index}".encode()).digest())


class CompletedPrefix:
    """Releases answers in the asking order, however they complete.

    Short answers finish first and are more often right: looking at all that completed would be looking at those.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._waiting: dict[int, bool | None] = {}
        self._next = 0

    def complete(self, index: int, right: bool | None) -> Iterator[bool | None]:
        """Take one answer in and give those that it completes the prefix by."""
        self._waiting[index] = right
        while self._next < len(self._order) and self._order[self._next] in self._waiting:
            yield self._waiting.pop(self._order[self._next])
            self._next += 1


class ExactStop:
    """Stops when the questions still open cannot change the verdict; takes answers in any order."""

    def __init__(self, *, questions: int, floor: Decimal) -> None:
        self._questions = questions
        self._floor = Fraction(floor)
        self._right = self._graded = self._failed = 0

    def complete(self, right: bool | None) -> Stop | None:
        """Take one answer, None for a request that failed; stop where the verdict is certain and questions are open."""
        self._right += right is True
        self._graded += right is not None
        self._failed += right is None
        possible = self._questions - self._failed
        remaining = possible - self._graded
        if not remaining:
            return None
        best = self._right + remaining
        # A request that fails later leaves the count: that never lowers the worst case, nor raises the best one.
        if self._right >= self._floor * possible:
            verdict = Verdict.PASS
        elif best < self._floor * possible:
            verdict = Verdict.REGRESSION
        else:
            return None
        return Stop(
            rule=StopRule.EXACT,
            verdict=verdict,
            graded=self._graded,
            right=self._right,
            questions=self._questions,
            interval=Interval(low=self._right / possible, high=best / possible, confidence=1.0),
        )


class SequentialStop:
    """Stops when a confidence sequence over all questions lies on one side of the floor.

    Waudby-Smith and Ramdas 2020 (Confidence sequences for sampling without replacement): the prior's probability of
    the true number of right answers, over the posterior's, is a martingale that starts at 1. It ever reaches 1 / alpha
    with probability at most alpha (Ville) whatever the truth, so the verdict differs from the full run's no more often.
    """

    def __init__(self, *, questions: int, floor: Decimal, prior: Prior, alpha: float = 0.001) -> None:
        self._questions = questions
        self._floor = Fraction(floor)
        self._prior = prior
        self._alpha = alpha
        self._right = self._graded = self._failed = 0

    def complete(self, right: bool | None) -> Stop | None:
        """Take the next answer of the completed prefix, None for a request that failed.

        Failed requests leave the questions; those still open are taken to be graded, which gives the widest interval.
        """
        self._right += right is True
        self._graded += right is not None
        self._failed += right is None
        population = self._questions - self._failed
        if self._graded == population:
            return None
        verdict = sequential_verdict(
            self._right, self._graded, population, floor=self._floor, prior=self._prior, alpha=self._alpha
        )
        if verdict is None:
            return None
        return Stop(
            rule=StopRule.SEQUENTIAL,
            verdict=verdict,
            graded=self._graded,
            right=self._right,
            questions=self._questions,
            interval=confidence_sequence(self._right, self._graded, population, self._prior),
        )


def sequential_verdict(
    right: int, graded: int, population: int, *, floor: Fraction, prior: Prior, alpha: float
) -> Verdict | None:
    """Say on which side of the floor the whole population's accuracy lies; None while both are possible."""
    needed, limit = math.ceil(floor * population), -math.log(alpha)
    likeliest = _likeliest(right, graded, population)
    # The likelihood has one peak: once the value at the floor is excluded, so is all beyond it.
    if likeliest >= needed:
        passed = log_ratio(right, graded, needed - 1, population, prior) >= limit
        return Verdict.PASS if passed else None
    failed = log_ratio(right, graded, needed, population, prior) >= limit
    return Verdict.REGRESSION if failed else None


def log_ratio(right: int, graded: int, total_right: int, population: int, prior: Prior) -> float:
    """Compute the log of the prior-posterior ratio at `total_right` right answers in the population.

    By Bayes it is the answers' probability under the prior (beta-binomial) over that under `total_right`
    (hypergeometric); infinite where `total_right` is impossible.
    """
    wrong, total_wrong = graded - right, population - total_right
    if not (right <= total_right and wrong <= total_wrong):
        return math.inf
    marginal = (
        _log_comb(graded, right)
        + _log_beta(prior.right + right, prior.wrong + wrong)
        - _log_beta(prior.right, prior.wrong)
    )
    likelihood = _log_comb(total_right, right) + _log_comb(total_wrong, wrong) - _log_comb(population, graded)
    return marginal - likelihood


def confidence_sequence(right: int, graded: int, population: int, prior: Prior, confidence: float = 0.95) -> Interval:
    """Bound the share of right answers in the whole population, at all times at once."""
    limit = -math.log(1 - confidence)

    def inside(total_right: int) -> bool:
        return log_ratio(right, graded, total_right, population, prior) < limit

    peak = _likeliest(right, graded, population)
    low = _last_inside(inside, peak, right)
    high = _last_inside(inside, peak, population - (graded - right))
    return Interval(low=low / population, high=high / population, confidence=confidence)


def _likeliest(right: int, graded: int, population: int) -> int:
    """Find the number of right answers in the population that makes the answers so far likeliest."""
    peak = right * (population + 1) // graded if graded else 0
    return min(peak, population - (graded - right))


def _last_inside(inside: Callable[[int], bool], start: int, end: int) -> int:
    """Find the last value from `start`, which is inside, towards `end` that still is."""
    if inside(end):
        return end
    while abs(end - start) > 1:
        middle = (start + end) // 2
        start, end = (middle, end) if inside(middle) else (start, middle)
    return start


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
