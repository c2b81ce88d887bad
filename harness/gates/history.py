"""How often each question came out right, over the runs of a baseline or the passes of a run; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from harness.gates.permutation import Outcome

Pass = Sequence[bool | None]
"""Right or wrong for each question of one pass, in the questions' order; None where a request got no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionHistory:
    """How often one question was answered, and how often right."""

    right: int
    runs: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.runs:
            raise ValueError(f"{self.right} right of {self.runs} runs")

    @property
    def rate(self) -> Fraction:
        return Fraction(self.right, self.runs)

    @property
    def unanimous(self) -> bool:
        return self.right in (0, self.runs)

    @property
    def variance_of_rate(self) -> float:
        """Estimate the variance of the rate from its own runs, without bias; needs two of them."""
        return self.right * (self.runs - self.right) / (self.runs * self.runs * (self.runs - 1))


def histories(passes: Sequence[Pass]) -> tuple[QuestionHistory, ...]:
    """Count each question's right answers over the passes, leaving out requests that got none.

    Raises ValueError where the passes differ in length.
    """
    return tuple(
        QuestionHistory(right=sum(answer is True for answer in answers), runs=sum(a is not None for a in answers))
        for answers in zip(*passes, strict=True)
    )


def flips_between(questions: Sequence[QuestionHistory]) -> float | None:
    """Count the answers that differ between two runs, on average over all pairs of them; None where one is alone."""
    if min(question.runs for question in questions) < 2:
        return None
    return math.fsum(2 * question.runs * question.variance_of_rate for question in questions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One question in the baseline and in the run under test, answered at least once in each."""

    index: int
    baseline: QuestionHistory
    run: QuestionHistory

    @property
    def loss(self) -> Fraction:
        return self.baseline.rate - self.run.rate

    @property
    def informative(self) -> bool:
        """Whether its right answers could have fallen otherwise than they did."""
        return 0 < self.baseline.right + self.run.right < self.baseline.runs + self.run.runs

    def dealt(self, score: Callable[[QuestionHistory, QuestionHistory], int]) -> tuple[Outcome, ...]:
        """List how the question's right answers may fall on baseline and run, with the score of each way.

        Where nothing changed, every way of dealing them over all the runs is equally likely whatever the
        question's own success rate: the hypergeometric law.
        """
        k, passes, right = self.baseline.runs, self.run.runs, self.baseline.right + self.run.right
        return tuple(
            Outcome(
                score=score(QuestionHistory(right=right - r, runs=k), QuestionHistory(right=r, runs=passes)),
                ways=comb(k, right - r) * comb(passes, r),
            )
            for r in range(max(0, right - k), min(passes, right) + 1)
        )


def pair_up(baseline: Sequence[QuestionHistory], passes: Sequence[Pass]) -> list[Pair]:
    """Put baseline and run side by side, question by question, leaving out what either has no answer to.

    Raises ValueError where they hold different numbers of questions, or no question has an answer in both.
    """
    run = histories(passes)
    pairs = [
        Pair(index=index, baseline=before, run=after)
        for index, (before, after) in enumerate(zip(baseline, run, strict=True))
        if before.runs and after.runs
    ]
    if not pairs:
        raise ValueError("no question has an answer both in the baseline and in the run")
    return pairs
