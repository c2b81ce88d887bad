"""The paired gate: its p-values and bounds against oracles, its error rates against enumeration, its verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product

import pytest
from h200_records import BF16, CHANGED, RUNS
from scipy.optimize import brentq
from scipy.stats import norm, poisson
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from harness.gates.history import Pair, QuestionHistory, histories, pair_up
from harness.gates.paired import (
    PairedVerdict,
    judge_paired,
    loss_bound,
    mcnemar,
    p_value_of_loss,
    paired_verdict,
)
from harness.gates.threshold import Verdict


def pairs_of(counts: Sequence[tuple[int, int, int, int]]) -> list[Pair]:
    """Build pairs from (right, runs) of the baseline and (right, passes) of the run."""
    return [
        Pair(index=i, baseline=QuestionHistory(right=c, runs=k), run=QuestionHistory(right=r, runs=passes))
        for i, (c, k, r, passes) in enumerate(counts)
    ]


def discordant(lost: int, gained: int, same: int = 20) -> list[Pair]:
    return pairs_of([(1, 1, 0, 1)] * lost + [(0, 1, 1, 1)] * gained + [(1, 1, 1, 1)] * same)


@pytest.mark.parametrize(("lost", "gained"), [(0, 1), (1, 0), (3, 9), (9, 3), (7, 7), (13, 0), (50, 20), (300, 220)])
def test_mcnemar_agrees_with_statsmodels(lost: int, gained: int) -> None:
    """The two-sided p-value equals statsmodels' exact one; the gate's one-sided one is half of it."""
    theirs = statsmodels_mcnemar([[100, lost], [gained, 100]], exact=True).pvalue
    assert mcnemar(lost, gained) == pytest.approx(theirs, abs=1e-12)
    if lost > gained:
        assert p_value_of_loss(discordant(lost, gained)) == pytest.approx(theirs / 2, abs=1e-9)


def test_guard_against_noise_leaves_mcnemar_alone() -> None:
    """With one run on each side the gate's p-value is the exact binomial tail for every table up to 25 each way."""
    for lost, gained in product(range(26), repeat=2):
        n = lost + gained
        exact = sum(math.comb(n, i) for i in range(lost, n + 1)) / 2**n
        assert p_value_of_loss(discordant(lost, gained)) == pytest.approx(exact, abs=1e-9)


def test_no_discordant_pair_is_a_pass_with_p_1() -> None:
    """A run that answers as its baseline did shows no loss, and the bound still allows what was not seen."""
    answers = [True] * 600 + [False] * 719
    result = paired_verdict(histories([answers]), [answers])
    assert (result.p_value, result.loss, result.worse, result.better) == (1.0, 0.0, 0, 0)
    assert (result.verdict, result.final) == (PairedVerdict.KEPT, True)
    assert judge_paired(result).verdict is Verdict.PASS
    assert result.upper_bound_95 == pytest.approx(1.6449**2 / 1319, rel=1e-4)


def dealt_anew(c: int, k: int, r: int, passes: int) -> Iterator[tuple[int, int]]:
    """Every way of dealing a question's right answers over all its runs, written out slot by slot."""
    for slots in combinations(range(k + passes), c + r):
        yield sum(slot < k for slot in slots), sum(slot >= k for slot in slots)


def weighted_loss(c: int, k: int, r: int, passes: int) -> Fraction:
    return (Fraction(c, k) - Fraction(r, passes)) * (1 if c in (0, k) else Fraction(1, k))


ENUMERATED = {
    "k = 1, three passes": [(1, 1, 0, 3), (1, 1, 1, 3), (0, 1, 1, 3), (1, 1, 2, 3)],
    "k = 2, one pass": [(2, 2, 0, 1), (2, 2, 0, 1), (1, 2, 1, 1), (0, 2, 1, 1), (1, 2, 0, 1)],
    "k = 3, two passes": [(3, 3, 0, 2), (2, 3, 1, 2), (3, 3, 1, 2), (0, 3, 0, 2)],
    "k = 5, three passes": [(5, 5, 0, 3), (4, 5, 2, 3), (5, 5, 2, 3)],
    "failed requests": [(5, 5, 0, 2), (3, 4, 2, 3), (2, 2, 1, 3)],
}


@pytest.mark.parametrize("name", ENUMERATED)
def test_p_value_agrees_with_enumeration(name: str) -> None:
    """It is the share of all dealings whose weighted loss is as large, counted out one by one, to 1e-9."""
    counts = ENUMERATED[name]
    observed = sum(weighted_loss(*question) for question in counts)
    dealings = [
        [weighted_loss(before, k, after, passes) for before, after in dealt_anew(c, k, r, passes)]
        for c, k, r, passes in counts
    ]
    every = [sum(scores) for scores in product(*dealings)]
    expected = sum(total >= observed for total in every) / len(every)
    assert p_value_of_loss(pairs_of(counts)) == pytest.approx(expected, abs=1e-9)


def chance(rate: float, right: int, runs: int) -> float:
    return math.comb(runs, right) * rate**right * (1 - rate) ** (runs - right)


RATES = {
    "hesitant": (0.5, 0.5, 0.5),
    "nearly always right": (0.97, 0.9, 0.99),
    "nearly always wrong": (0.02, 0.1, 0.05),
    "mixed": (0.03, 0.6, 0.95),
}


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("name", RATES)
def test_two_looks_never_exceed_alpha(name: str, alpha: float) -> None:
    """Summed over every outcome of baseline, first pass and second, a model that did not change is red within alpha."""
    red = 0.0
    outcomes = list(product(range(3), range(2), range(2)))
    for dealt in product(outcomes, repeat=3):
        probability = math.prod(
            chance(rate, c, 2) * chance(rate, first, 1) * chance(rate, second, 1)
            for rate, (c, first, second) in zip(RATES[name], dealt, strict=True)
        )
        baseline = [QuestionHistory(right=c, runs=2) for c, _, _ in dealt]
        passes = [[bool(first) for _, first, _ in dealt], [bool(second) for _, _, second in dealt]]
        result = paired_verdict(baseline, passes[:1], alpha=alpha, margin=0, max_repeats=2)
        if not result.final:
            result = paired_verdict(baseline, passes, alpha=alpha, margin=0, max_repeats=2)
        red += probability * (result.verdict is PairedVerdict.LOST)
    assert red <= alpha


@pytest.mark.parametrize(
    "counts", [[(5, 5, 3, 3)] * 9, [(5, 5, 2, 3)] * 4, [(3, 5, 1, 3)] * 7 + [(0, 5, 1, 3)], [(1, 1, 0, 1)] * 3]
)
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_bound_solves_its_score_equation(counts: list[tuple[int, int, int, int]], confidence: float) -> None:
    """It is the loss at which the score test just fails, found by bisection, to 1e-9."""
    pairs, z, fewest = pairs_of(counts), norm.ppf(confidence), min(counts[0][1], counts[0][3])
    loss = sum(c / k - r / passes for c, k, r, passes in counts)
    variance = sum(
        (c / k - r / passes) ** 2
        if fewest == 1
        else c / k * (1 - c / k) / (k - 1) + r / passes * (1 - r / passes) / (passes - 1)
        for c, k, r, passes in counts
    )

    def score(beyond: float) -> float:
        return beyond**2 - z**2 * (variance + math.sqrt(variance**2 + (2 * beyond / fewest) ** 2)) / 2

    root = brentq(score, 1e-9, 1e3, xtol=1e-13, rtol=1e-14)
    assert loss_bound(pairs, confidence) == pytest.approx((loss + root) / len(counts), abs=1e-9)


@pytest.mark.parametrize(("lost", "gained"), [(0.0, 0.0), (2, 2), (10.5, 10.5), (24, 10.5), (48, 45), (13, 0.0)])
def test_bound_holds_as_often_as_it_says(lost: float, gained: float) -> None:
    """With one run on each side, over every table that chance makes of 1,319 questions: 95%, less rounding at most."""
    covered, z = 0.0, float(norm.ppf(0.95))
    for b, c in product(range(110), repeat=2):
        likely = poisson.pmf(b, lost) * poisson.pmf(c, gained)
        if likely > 1e-12:
            bound = b - c + z * math.sqrt(b + c + z * z)
            covered += likely * (bound >= lost - gained)
    assert covered >= 0.944
    assert loss_bound(discordant(9, 4, 1306), 0.95) * 1319 == pytest.approx(5 + z * math.sqrt(13 + z * z))


def broken(answers: list[bool], questions: int) -> list[bool]:
    """Turn the last right answers of a run to wrong."""
    right = [i for i, answer in enumerate(answers) if answer][-questions:]
    return [answer and i not in right for i, answer in enumerate(answers)]


def test_two_points_lost_are_red() -> None:
    """27 of 1,319 questions that break are called lost, with the numbers that say why."""
    run = RUNS["bf16_second_host"]
    five = histories([RUNS[f"bf16_{i}"] for i in range(1, 6)])
    passes = [broken(run, 27), broken(RUNS["bf16_0"], 27), broken(RUNS["bf16_c512"], 27)]
    first = paired_verdict(five, passes[:1])
    last = paired_verdict(five, passes)
    assert first.verdict is PairedVerdict.LOST
    assert first.final
    gate = judge_paired(last)
    assert gate.verdict is Verdict.REGRESSION
    for part in ("1319 questions and 3 passes", "significant at 0.0009", "above the margin 0.005", "95% confidence"):
        assert part in gate.message
    assert last.low < last.loss < last.high
    assert gate.measured == last.loss


@pytest.mark.parametrize("name", [*BF16, *CHANGED, "bf16_second_host", "ngram_0", "ngram_1", "sglang_0"])
def test_no_real_run_is_called_lost(name: str) -> None:
    """Lossless, fp8 and on another host: none of these runs lost a significant half point against the others' five."""
    others = [other for other in BF16 if other != name][:5]
    assert paired_verdict(histories([RUNS[other] for other in others]), [RUNS[name]]).verdict is not PairedVerdict.LOST


def test_one_odd_run_of_a_noisy_change_is_not_red() -> None:
    """fp8_1 has 16 right answers fewer than bf16; asked again, fp8 has about 7, which its noise explains."""
    five = histories([RUNS[f"bf16_{i}"] for i in range(1, 6)])
    passes = [RUNS["fp8_1"], RUNS["fp8_0"], RUNS["fp8_second_host"]]
    first = paired_verdict(five, passes[:1])
    assert (first.verdict, first.final) == (PairedVerdict.INCONCLUSIVE, False)
    last = paired_verdict(five, passes)
    assert (last.verdict, last.final) == (PairedVerdict.INCONCLUSIVE, True)
    assert last.flips_between_passes == pytest.approx(70)
    assert last.flips_between_runs == pytest.approx(19.4)
    gate = judge_paired(last)
    assert gate.verdict is Verdict.PASS
    assert "is not excluded" in gate.message


def test_loss_must_exceed_the_margin() -> None:
    """One of 200 is exactly 0.005 and no more; floats must not decide that."""
    baseline, run = histories([[True] * 200]), [[False] + [True] * 199]
    at = paired_verdict(baseline, run, alpha=0.6, margin=0.005, max_repeats=1)
    below = paired_verdict(baseline, run, alpha=0.6, margin=0.0049, max_repeats=1)
    assert at.verdict is not PairedVerdict.LOST
    assert below.verdict is PairedVerdict.LOST


def test_looks_share_alpha() -> None:
    """The levels of the first and the last look add up to alpha; a single look has all of it."""
    baseline, run = histories([[True, False]] * 5), [True, False]
    levels = [paired_verdict(baseline, [run] * passes, alpha=0.01).level for passes in (1, 3)]
    assert sum(levels) == pytest.approx(0.01, abs=1e-15)
    assert paired_verdict(baseline, [run], alpha=0.01, max_repeats=1).level == 0.01


def test_a_look_that_alpha_does_not_pay_for_is_refused() -> None:
    """Judging after two passes of three would be a third look."""
    baseline = histories([[True, False]] * 5)
    with pytest.raises(ValueError, match="2 passes: they are judged after 1 and after 3"):
        paired_verdict(baseline, [[True, False]] * 2)


def test_other_questions_are_harder_to_speak_for() -> None:
    """13 questions that break are a sure loss on these questions, and less so on others like them."""
    answers = [True] * 1319
    baseline = histories([answers] * 5)
    result = paired_verdict(baseline, [broken(answers, 13)] * 3)
    assert result.p_value < 1e-9
    assert result.p_value_other_questions == pytest.approx(2**-13, abs=1e-12)


def test_noise_of_the_gains_is_held_against_a_loss() -> None:
    """22 questions that each fail one pass are a loss; with 16 that each gain one they are a noisier run."""
    quiet = [(5, 5, 3, 3)] * 1000
    faded = pairs_of([*quiet, *[(5, 5, 2, 3)] * 22])
    noisier = pairs_of([*quiet, *[(5, 5, 2, 3)] * 22, *[(0, 5, 1, 3)] * 16])
    assert p_value_of_loss(faded) < 1e-7
    losses, noise = (22 - 16) / 3, 2 * 16 / 9
    assert p_value_of_loss(noisier) == pytest.approx(float(norm.sf(losses / math.sqrt(noise))), rel=1e-9)


def test_pairing_up_counts_worse_and_better() -> None:
    """A question right less often is worse, whatever the numbers of runs."""
    baseline = histories([[True, True, False], [True, False, False]])
    result = paired_verdict(baseline, [[False, True, True]])
    assert (result.worse, result.better) == (1, 2)
    assert len(pair_up(baseline, [[False, True, None]])) == 2
