"""Flips: the count and its p-value against enumeration, and what the real runs are called."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product
from math import prod

import pytest
from h200_records import BF16, CHANGED, RUNS
from scipy.stats import hypergeom

from harness.gates.flips import FlipResult, flip_test, judge_flips
from harness.gates.history import QuestionHistory, histories
from harness.gates.threshold import Verdict


def against_other_bf16(name: str) -> FlipResult:
    return flip_test(histories([RUNS[other] for other in BF16 if other != name]), [RUNS[name]])


@pytest.mark.parametrize("name", CHANGED)
def test_real_changes_are_called_changed(name: str) -> None:
    """Every run with fp8 weights or an fp8 KV cache flips far more answers than bf16's own runs do."""
    result = against_other_bf16(name)
    assert result.changed is True
    assert result.flips > 85
    assert result.p_value is not None
    assert result.p_value < 1e-20
    assert judge_flips(result).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("name", [*BF16, "bf16_second_host", "ngram_0", "ngram_1"])
def test_what_should_be_lossless_is_called_unchanged(name: str) -> None:
    """No bf16 run against the others, no run of a second host and no n-gram run: neither by size nor by chance."""
    result = against_other_bf16(name)
    assert result.changed is False
    assert result.p_value is not None
    assert result.p_value > 0.001
    assert judge_flips(result).verdict is Verdict.PASS


@pytest.mark.parametrize("name", [*CHANGED, "bf16_c100", "bf16_second_host", "ngram_0", "ngram_1"])
def test_any_five_bf16_runs_make_a_baseline(name: str) -> None:
    """The same verdicts with every choice of five bf16 runs as the baseline; each tenth choice is tried."""
    for five in list(combinations([other for other in BF16 if other != name], 5))[::10]:
        result = flip_test(histories([RUNS[other] for other in five]), [RUNS[name]])
        assert result.changed is (name in CHANGED)


def crossed(c: int, k: int, r: int, passes: int) -> Fraction:
    return Fraction(sum(a != b for a in [1] * c + [0] * (k - c) for b in [1] * r + [0] * (passes - r)), k * passes)


ENUMERATED = {
    "k = 2, one pass": [(2, 2, 0, 1), (1, 2, 1, 1), (0, 2, 1, 1), (1, 2, 0, 1), (2, 2, 1, 1)],
    "k = 5, two passes": [(5, 5, 0, 2), (1, 5, 1, 2), (4, 5, 2, 2)],
    "k = 3, three passes": [(0, 3, 2, 3), (3, 3, 1, 3), (0, 3, 0, 3), (2, 3, 0, 3)],
}


@pytest.mark.parametrize("name", ENUMERATED)
def test_p_value_agrees_with_enumeration(name: str) -> None:
    """It is the probability of as many flips when every question's right answers are dealt anew, to 1e-9."""
    counts = ENUMERATED[name]
    baseline = [QuestionHistory(right=c, runs=k) for c, k, _, _ in counts]
    passes = [[i < r for _, _, r, _ in counts] for i in range(counts[0][3])]
    result = flip_test(baseline, passes)
    observed = sum(crossed(*question) for question in counts)
    assert result.flips == pytest.approx(float(observed), abs=1e-12)
    laws = []
    for c, k, r, m in counts:
        law = hypergeom(k + m, c + r, m)
        laws.append([(crossed(c + r - x, k, x, m), law.pmf(x)) for x in _dealt(c, k, r, m)])
    every = [(sum(f for f, _ in dealt), prod(p for _, p in dealt)) for dealt in product(*laws)]
    expected = sum(probability for flips, probability in every if flips >= observed)
    assert result.p_value == pytest.approx(expected, abs=1e-9)


def _dealt(c: int, k: int, r: int, passes: int) -> range:
    return range(max(0, c + r - k), min(passes, c + r) + 1)


def test_expected_flips_are_those_between_the_baselines_own_runs() -> None:
    """They are the mean over all pairs of its runs: 20.8 among the nine bf16 runs."""
    names = [*BF16, "bf16_second_host"]
    between = [sum(x != y for x, y in zip(RUNS[a], RUNS[b], strict=True)) for a, b in combinations(names, 2)]
    result = flip_test(histories([RUNS[name] for name in names]), [RUNS["ngram_0"]])
    assert result.expected == pytest.approx(sum(between) / len(between), abs=1e-9)


def test_bound_is_where_chance_ends() -> None:
    """As many flips as the bound are significant and fewer are not, at the alpha given."""
    for name in ("fp8_0", "ngram_1"):
        result = flip_test(histories([RUNS[other] for other in BF16]), [RUNS[name]], max_flip_rate=0.0)
        assert result.bound is not None
        assert result.changed is (result.flips >= result.bound)


def test_small_excess_is_allowed_however_significant() -> None:
    """12 questions of 1,319 that turn are beyond chance and within the one percent that is allowed by default."""
    baseline = histories([[True] * 1319] * 5)
    run = [False] * 12 + [True] * 1307
    allowed, refused = flip_test(baseline, [run] * 3), flip_test(baseline, [run] * 3, max_flip_rate=0.005)
    assert allowed.p_value is not None
    assert allowed.p_value < 1e-9
    assert (allowed.changed, refused.changed) == (False, True)


def test_one_run_cannot_tell_chance_from_change() -> None:
    """A baseline of one run counts the flips, and a gate on them is no pass."""
    result = flip_test(histories([RUNS["bf16_1"]]), [RUNS["fp8_0"]])
    assert result.flips == 102
    assert (result.expected, result.bound, result.p_value, result.changed) == (None, None, None, None)
    gate = judge_flips(result)
    assert gate.verdict is Verdict.INFRASTRUCTURE
    assert "make a baseline of 2 runs or more" in gate.message


def test_flips_are_listed_both_ways() -> None:
    """A question is listed where most of the baseline and most of the run disagree; an even split on a side is not."""
    baseline = histories([[True, True, False, False, True, False], [True, False, False, True, True, False]])
    result = flip_test(baseline, [[False, False, True, False, True, True], [False, False, True, False, False, False]])
    assert (result.to_wrong, result.to_right) == ((0,), (2,))


def test_message_names_flips_expected_and_allowed() -> None:
    """Whoever reads a red flip gate needs nothing else to see how large the change is."""
    message = judge_flips(against_other_bf16("fp8_second_host")).message
    for part in ("87.1 of 1319", "6.61%", "21.0 by the baseline's own runs", "+5.01% beyond", "allowed 1.00%"):
        assert part in message
