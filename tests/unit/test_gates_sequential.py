"""Early stopping: the martingale against scipy and enumeration, and how often a verdict differs, counted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import betabinom, hypergeom

from harness.gates.sequential import (
    CompletedPrefix,
    ExactStop,
    Prior,
    SequentialStop,
    Stop,
    asking_order,
    confidence_sequence,
    log_ratio,
    sequential_verdict,
)
from harness.gates.threshold import Counts, Verdict, judge_accuracy

N = 1319
PRIORS = {"flat": Prior(), "around 0.88": Prior.around(0.88)}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_ratio_is_prior_over_posterior(prior: Prior) -> None:
    """It is what Bayes' rule gives with scipy's laws, over every number of right answers in a population of 60."""
    population, graded, right = 60, 17, 13
    totals = np.arange(population + 1)
    before = betabinom.pmf(totals, population, prior.right, prior.wrong)
    after = before * hypergeom.pmf(right, population, totals, graded)
    after /= after.sum()
    for total in totals:
        ours = math.exp(-log_ratio(right, graded, int(total), population, prior))
        assert ours == pytest.approx(after[total] / before[total], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
@pytest.mark.parametrize(("right", "graded"), [(0, 0), (0, 9), (9, 9), (31, 50), (700, 800), (1160, 1319)])
def test_confidence_sequence_is_the_set_of_small_ratios(prior: Prior, right: int, graded: int) -> None:
    """Its ends are the first and last total whose ratio, by scipy, is below 1 / 0.05."""
    totals = np.arange(N + 1)
    marginal = betabinom.pmf(right, graded, prior.right, prior.wrong) if graded else 1.0
    inside = totals[marginal < 20 * hypergeom.pmf(right, N, totals, graded)]
    interval = confidence_sequence(right, graded, N, prior)
    assert interval.low == pytest.approx(inside[0] / N, abs=1e-9)
    assert interval.high == pytest.approx(inside[-1] / N, abs=1e-9)


def boundaries(population: int, floor: Fraction, prior: Prior, alpha: float) -> tuple[list[int], list[int]]:
    """For each number of answers, up to how many right the rule stops red, and from how many green."""

    def first(holds: Callable[[Verdict | None], bool], graded: int) -> int:
        low, high = -1, graded + 1
        while high - low > 1:
            middle = (low + high) // 2
            verdict = sequential_verdict(middle, graded, population, floor=floor, prior=prior, alpha=alpha)
            low, high = (low, middle) if holds(verdict) else (middle, high)
        return high

    red = [first(lambda v: v is not Verdict.REGRESSION, graded) - 1 for graded in range(1, population + 1)]
    green = [first(lambda v: v is Verdict.PASS, graded) for graded in range(1, population + 1)]
    return red, green


def exactly(population: int, rights: int, needed: int, ends: tuple[list[int], list[int]]) -> tuple[float, float]:
    """Sum over every order of the questions: how likely the verdict differs, and the share asked on average."""
    counts, red = np.arange(population + 2), rights < needed
    law = np.zeros(population + 2)
    law[0] = 1.0
    differing = asked = 0.0
    for done, (fail, succeed) in enumerate(zip(*ends, strict=True)):
        right = law * np.clip((rights - counts) / (population - done), 0, 1)
        law = law - right
        law[1:] += right[:-1]
        if done + 1 == population:
            break
        failed, passed = counts <= fail, counts >= succeed
        differing += float(law[passed].sum() if red else law[failed].sum())
        asked += (done + 1) * float(law[failed | passed].sum())
        law = np.where(failed | passed, 0.0, law)
    return differing, (asked + population * float(law.sum())) / population


DISTANCES = (-30, -20, -12, -8, -5, -3, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 3, 5, 8, 10, 12)


@pytest.mark.parametrize("accuracy", [0.3, 0.55, 0.88, 0.95])
def test_verdicts_differ_no_more_often_than_stated(accuracy: float) -> None:
    """Exactly, at 20 distances: within alpha; 8 points above it asks at most 35%, 30 below at most 5%."""
    floor = Fraction(str(accuracy)) - Fraction("0.08")
    needed = math.ceil(floor * N)
    ends = boundaries(N, floor, Prior.around(accuracy), 0.001)
    for distance in DISTANCES:
        rights = round(float(floor + Fraction(str(distance)) / 100) * N)
        if rights < 0:
            continue
        differing, asked = exactly(N, rights, needed, ends)
        assert differing <= 0.001
        if distance == 8:
            assert asked <= 0.35
        if distance == -30:
            assert asked <= 0.05
    for rights in (needed - 1, needed):
        assert exactly(N, rights, needed, ends)[0] <= 0.001


@pytest.mark.parametrize("alpha", [0.3, 0.05])
@pytest.mark.parametrize("floor", ["0.1", "0.5", "0.84", "1"])
def test_verdicts_differ_within_alpha_whatever_the_truth(floor: str, alpha: float) -> None:
    """Of 50 questions, with any number of them right, the probability of another verdict is within alpha."""
    needed = math.ceil(Fraction(floor) * 50)
    ends = boundaries(50, Fraction(floor), Prior.around(0.9), alpha)
    assert max(exactly(50, rights, needed, ends)[0] for rights in range(51)) <= alpha


def test_failed_requests_do_not_loosen_it() -> None:
    """With any number of right, wrong and failing questions of 14, over all their orders, it stays within alpha."""
    floor, alpha, total = Fraction("0.6"), 0.3, 14
    worst = 0.0
    for right, failing in product(range(total + 1), range(4)):
        wrong = total - right - failing
        if wrong >= 0 and right + wrong:
            worst = max(worst, _differing(right, wrong, failing, floor, alpha))
    assert 0 < worst <= alpha


def _differing(right: int, wrong: int, failing: int, floor: Fraction, alpha: float) -> float:
    """Follow every order of right, wrong and failing questions until the rule stops."""
    truth = Verdict.PASS if right >= floor * (right + wrong) else Verdict.REGRESSION
    total, states, differing = right + wrong + failing, {(0, 0, 0): 1.0}, 0.0
    for done in range(total - 1):
        after: dict[tuple[int, int, int], float] = {}
        for (s, f, e), likely in states.items():
            for step, left in (((1, 0, 0), right - s), ((0, 1, 0), wrong - f), ((0, 0, 1), failing - e)):
                if left:
                    state = (s + step[0], f + step[1], e + step[2])
                    after[state] = after.get(state, 0.0) + likely * left / (total - done)
        states = {}
        for (s, f, e), likely in after.items():
            verdict = None
            if s + f < total - e:
                verdict = sequential_verdict(s, s + f, total - e, floor=floor, prior=Prior(), alpha=alpha)
            if verdict is None:
                states[s, f, e] = likely
            elif verdict is not truth:
                differing += likely
    return differing


def feed(stop: SequentialStop | ExactStop, answers: list[bool | None]) -> tuple[Stop | None, int]:
    for asked, answer in enumerate(answers, 1):
        reached = stop.complete(answer)
        if reached is not None:
            return reached, asked
    return None, len(answers)


def test_a_healthy_model_is_done_early() -> None:
    """At 0.88 with a floor of 0.80 it stops green, says on how many answers, and its interval lies above the floor."""
    rng = np.random.default_rng(1)
    answers: list[bool | None] = rng.permuted(np.arange(N) < 1161).tolist()
    stop, asked = feed(SequentialStop(questions=N, floor=Decimal("0.80"), prior=Prior.around(0.88)), answers)
    assert stop is not None
    assert (stop.verdict, stop.graded, stop.questions) == (Verdict.PASS, asked, N)
    assert asked < N / 2
    assert stop.right == sum(answer is True for answer in answers[:asked])
    assert 0.80 < stop.interval.low < 1161 / N < stop.interval.high


def test_it_runs_on_where_the_floor_is_near() -> None:
    """A model exactly at its floor is asked until no open question can change the full run's verdict."""
    rng = np.random.default_rng(2)
    answers: list[bool | None] = rng.permuted(np.arange(200) < 160).tolist()
    stop, asked = feed(SequentialStop(questions=200, floor=Decimal("0.80"), prior=Prior()), answers)
    assert stop is not None
    assert (stop.verdict, asked) == (Verdict.PASS, 199)
    assert stop.right == 160


@pytest.mark.parametrize("floor", ["0.2", "0.5", "0.84", "1"])
def test_exact_never_differs(floor: str) -> None:
    """Over all outcomes of 8 questions, failures included, a stop gives the full run's verdict and accuracy."""
    for answers in product([True, False, None], repeat=8):
        stop, asked = feed(ExactStop(questions=8, floor=Decimal(floor)), list(answers))
        full = Counts(asked=8, correct=answers.count(True), errors=answers.count(None))
        if stop is None:
            continue
        assert asked < 8
        assert full.accuracy is not None
        assert stop.verdict is judge_accuracy(full, threshold=float(floor), tolerance=0).verdict
        if None not in answers[asked:]:
            assert stop.interval.low <= full.accuracy <= stop.interval.high


def test_exact_stops_as_soon_as_it_can() -> None:
    """Of 10 with a floor of 0.84 nine must be right: the second wrong answer is the last, as is the ninth right one."""
    lost, asked = feed(ExactStop(questions=10, floor=Decimal("0.84")), [True, False, True, False, True])
    assert (lost and lost.verdict, asked) == (Verdict.REGRESSION, 4)
    won, asked = feed(ExactStop(questions=10, floor=Decimal("0.84")), [True] * 9)
    assert (won and won.verdict, asked) == (Verdict.PASS, 9)
    even, asked = feed(ExactStop(questions=10, floor=Decimal("0.5")), [True] * 9)
    assert (even and even.verdict, asked) == (Verdict.PASS, 5)


def test_failed_requests_leave_the_questions() -> None:
    """Of 10 questions 4 failed: half of the other 6 is 3, and the third right answer is enough for certain."""
    answers: list[bool | None] = [None] * 4 + [True] * 5
    stop, asked = feed(SequentialStop(questions=10, floor=Decimal("0.5"), prior=Prior()), answers)
    assert (stop and stop.verdict, asked) == (Verdict.PASS, 7)


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_prefix_releases_answers_in_asking_order(order: list[int], completed: list[int]) -> None:
    """Whatever completes first, answers come in the asking order, and none before all those ahead of it are there."""
    prefix, released = CompletedPrefix(order), []
    answers = {index: (True, False, None)[index % 3] for index in order}
    for done, index in enumerate(completed, 1):
        released += list(prefix.complete(index, answers[index]))
        ahead = next((i for i, asked in enumerate(order) if asked not in completed[:done]), len(order))
        assert released == [answers[asked] for asked in order[:ahead]]


def test_asking_order_is_one_shuffle_for_all_machines() -> None:
    """It holds every question once, differs by seed, and never changes between versions."""
    order = asking_order(N)
    assert sorted(order) == list(range(N))
    assert asking_order(N, seed=1) != order
    assert order[:6] == [392, 942, 404, 87, 1023, 923]
