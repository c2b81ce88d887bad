"""The exact law of a sum: against enumeration, and against scipy's laws."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import comb, prod

import pytest
from scipy.stats import binom

from harness.gates.history import Pair, QuestionHistory, flips_between, histories, pair_up
from harness.gates.permutation import Outcome, law_of_sum

QUESTIONS = {
    "coins": [[(0, 1), (1, 1)]] * 6,
    "loaded": [[(-3, 2), (5, 7)], [(0, 1), (2, 3), (9, 4)], [(-1, 5), (4, 1)]],
    "constant": [[(7, 3)], [(0, 1), (6, 1)]],
    "even steps": [[(-4, 1), (0, 6), (4, 1)], [(2, 9), (-6, 2)]],
    "none": [],
}


def enumerated(questions: list[list[tuple[int, int]]], value: int) -> Fraction:
    hits = Fraction()
    for dealt in product(*questions):
        if sum(score for score, _ in dealt) >= value:
            shares = [Fraction(w, sum(ways for _, ways in q)) for (_, w), q in zip(dealt, questions, strict=True)]
            hits += prod(shares, start=Fraction(1))
    return hits


@pytest.mark.parametrize("name", QUESTIONS)
def test_tails_agree_with_enumeration(name: str) -> None:
    """Every tail equals the one counted out, to 1e-12 of itself."""
    questions = QUESTIONS[name]
    law = law_of_sum([Outcome(score=score, ways=ways) for score, ways in outcomes] for outcomes in questions)
    for value in range(-15, 25):
        expected = float(enumerated(questions, value))
        assert law.tail(value) == pytest.approx(expected, rel=1e-12, abs=1e-28)


@pytest.mark.parametrize("n", [1, 40, 400, 2000])
def test_many_questions_agree_with_scipy(n: int) -> None:
    """A sum over many coins is binomial, far into its tails as well; what is cut off makes no p-value too small."""
    law = law_of_sum([[Outcome(score=0, ways=1), Outcome(score=2, ways=3)]] * n)
    for successes in {0, n // 2, 3 * n // 4, min(n, 3 * n // 4 + 40), n}:
        expected = float(binom.sf(successes - 1, n, 0.75))
        assert law.tail(2 * successes) == pytest.approx(expected, rel=1e-9, abs=1e-25)
        assert law.tail(2 * successes) >= expected * (1 - 1e-9)


def test_critical_value_is_the_first_that_is_rare_enough() -> None:
    """Its tail is within alpha, and one step below it is not."""
    law = law_of_sum([[Outcome(score=0, ways=1), Outcome(score=3, ways=1)]] * 20)
    for alpha in (0.5, 0.05, 0.001):
        critical = law.critical(alpha)
        assert law.tail(critical) <= alpha < law.tail(critical - 3)
    assert law.critical(1e-9) == 63


def test_dealing_is_hypergeometric() -> None:
    """A question right 4 times of 8 puts 0 to 3 of them on three passes, each in as many ways as can be counted."""
    pair = Pair(index=0, baseline=QuestionHistory(right=3, runs=5), run=QuestionHistory(right=1, runs=3))
    dealt = pair.dealt(lambda before, after: 10 * before.right + after.right)
    assert [(outcome.score, outcome.ways) for outcome in dealt] == [
        (10 * (4 - r) + r, comb(3, r) * comb(5, 4 - r)) for r in range(4)
    ]


def test_histories_leave_failed_requests_out() -> None:
    """A request that failed is neither right nor wrong: the question has one run less."""
    assert histories([[True, None, False], [False, True, None]]) == (
        QuestionHistory(right=1, runs=2),
        QuestionHistory(right=1, runs=1),
        QuestionHistory(right=0, runs=1),
    )


def test_pairs_need_an_answer_on_both_sides() -> None:
    """Questions that either side lacks are left out, with the others' places kept; none at all is refused."""
    baseline = histories([[True, None, False]])
    assert [pair.index for pair in pair_up(baseline, [[None, True, True]])] == [2]
    with pytest.raises(ValueError, match="no question has an answer"):
        pair_up(baseline, [[None, True, None]])


def test_unequal_question_counts_are_refused() -> None:
    """A baseline of other questions must not be compared question by question."""
    with pytest.raises(ValueError, match="zip"):
        pair_up(histories([[True, False]]), [[True]])


def test_impossible_history_is_refused() -> None:
    """More right answers than runs is a fault of the caller."""
    with pytest.raises(ValueError, match="3 right of 2 runs"):
        QuestionHistory(right=3, runs=2)


def test_flips_between_runs_are_the_mean_over_pairs() -> None:
    """It is what counting the differences of all pairs of runs gives; one run has nothing to differ from."""
    runs = [[True, False, True, False], [True, True, False, False], [True, True, True, False]]
    pairs = [(0, 1), (0, 2), (1, 2)]
    counted = sum(a != b for i, j in pairs for a, b in zip(runs[i], runs[j], strict=True)) / 3
    assert flips_between(histories(runs)) == pytest.approx(counted, abs=1e-12)
    assert flips_between(histories(runs[:1])) is None
