"""Continuous scores against a baseline: the t test against scipy, what is red, what is drift, and what is noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from scipy.special import betainc
from scipy.stats import t as student
from scipy.stats import ttest_1samp, ttest_rel

from harness.gates.drift import MARGIN, PairedChange, drift, judge_increase, paired_change
from harness.gates.student import incomplete_beta, mean_of, t_quantile, t_tail
from harness.gates.threshold import Verdict


def alone(scores: Sequence[float]) -> list[list[float]]:
    """Put each score as the only run of its item."""
    return [[score] for score in scores]


def drawn(items: int, shift: float, seed: int) -> tuple[list[float], list[float]]:
    dice = random.Random(seed)
    before = [dice.gauss(1.2, 0.2) for _ in range(items)]
    return before, [score + shift + dice.gauss(0, 0.01) for score in before]


@pytest.mark.parametrize("items", [2, 3, 5, 30, 200, 1319])
@pytest.mark.parametrize("shift", [-0.02, 0.0, 0.0005, 0.005, 0.3])
def test_the_test_agrees_with_scipy(items: int, shift: float) -> None:
    """t, both p-values and the 95% interval are those of scipy's paired t test, to 1e-9 of themselves."""
    before, after = drawn(items, shift, seed=items)
    change = paired_change(alone(before), alone(after))
    theirs = ttest_rel(after, before)
    interval = theirs.confidence_interval(0.95)
    assert change.t == pytest.approx(theirs.statistic, rel=1e-9)
    assert change.p_value == pytest.approx(theirs.pvalue, rel=1e-9, abs=1e-300)
    assert change.p_increase == pytest.approx(ttest_rel(after, before, alternative="greater").pvalue, rel=1e-9)
    assert (change.low, change.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (change.items, change.missing) == (items, 0)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 29, 30, 100, 1318, 20_000])
def test_the_tail_agrees_with_scipy(degrees: int) -> None:
    """From the middle to far out and on both sides, to 1e-9 of itself; the quantile is its inverse."""
    for t in (0.0, 1e-9, 1e-3, 0.3, 0.99, 1.0, 2.0, 4.8, 9.0, 30.0, 1e4):
        assert t_tail(t, degrees) == pytest.approx(student.sf(t, degrees), rel=1e-9, abs=1e-300)
        assert t_tail(-t, degrees) == pytest.approx(student.sf(-t, degrees), rel=1e-9)
    for tail in (0.5, 0.4, 0.025, 0.005, 0.0005, 1e-9):
        assert t_quantile(tail, degrees) == pytest.approx(student.isf(tail, degrees), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (0.5, 14.5), (14.5, 0.5), (3.0, 2.0), (659.0, 0.5), (40.0, 70.0)])
def test_the_incomplete_beta_agrees_with_scipy(a: float, b: float) -> None:
    """On both sides of its mean, where the fraction is used and where its complement is."""
    for x in (0.0, 1e-12, 0.01, 0.2, 0.36, 0.5, 0.9, 0.999, 1.0):
        assert incomplete_beta(a, b, x=x, rest=1 - x) == pytest.approx(betainc(a, b, x), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_a_mean_has_its_t_interval(confidence: float) -> None:
    """The interval is scipy's; one value has a mean and no interval; none has not even that."""
    values = [0.3, -1.2, 4.0, 2.2]
    theirs = ttest_1samp(values, 0).confidence_interval(confidence)
    found = mean_of(values, confidence=confidence)
    assert (found.mean, found.low, found.high) == pytest.approx((1.325, theirs.low, theirs.high), rel=1e-9)
    assert (mean_of([2.0]).mean, mean_of([2.0]).low, mean_of([2.0]).high) == (2.0, None, None)
    with pytest.raises(ValueError, match="no values"):
        mean_of([])


@pytest.mark.parametrize("scores", [[1.2, 0.7, 1.9], [0.0, 0.0], [5.0] * 30], ids=["mixed", "zero", "equal"])
def test_no_change_is_p_1(scores: list[float]) -> None:
    """A run that scores as its baseline did, to the last bit, shows no change, and nothing divides by zero."""
    change = paired_change(alone(scores), alone(scores))
    assert (change.mean, change.t, change.p_value, change.p_increase) == (0.0, 0.0, 1.0, 0.5)
    assert not drift(change, noise=0.0, alpha=0.001).beyond_noise
    assert judge_increase(change, maximum=0.0, alpha=0.001).verdict is Verdict.PASS


@pytest.mark.parametrize("items", [2, 5, 30, 1000])
@pytest.mark.parametrize("step", [0.25, 0.1, -0.1])
def test_the_same_change_of_all_is_certain(items: int, step: float) -> None:
    """Where every item changed alike the p-value is as small as rounding allows, and all figures are JSON."""
    before = [1.0 + 0.01 * i for i in range(items)]
    change = paired_change(alone(before), alone([score + step for score in before]))
    assert change.p_value < 1e-12
    assert change.p_increase == pytest.approx(1.0 if step < 0 else 0.0, abs=1e-12)
    assert change.mean == pytest.approx(step, rel=1e-9)
    assert drift(change, noise=0.05, alpha=0.001).beyond_noise
    json.dumps(asdict(change), allow_nan=False)


def test_a_rounding_error_is_no_change() -> None:
    """Differences of the last bit are not significant however alike they are."""
    before = [1.0 + 0.01 * i for i in range(30)]
    change = paired_change(alone(before), alone([math.nextafter(score, 2) for score in before]))
    assert change.p_value > 0.05


def test_runs_count_by_their_mean() -> None:
    """An item asked five times counts once, as one asked once does."""
    before, now = [[1.0, 1.2, 1.4], [0.8], [2.0, 2.2]], [[1.3], [1.0, 1.2], [2.5]]
    change = paired_change(before, now)
    means = paired_change(alone([1.2, 0.8, 2.1]), alone([1.3, 1.1, 2.5]))
    assert (change.mean, change.p_value) == pytest.approx((means.mean, means.p_value), rel=1e-12)


def test_items_without_a_score_are_left_out_and_counted() -> None:
    """A document that failed on either side is not compared, and the sentence says how many there were."""
    change = paired_change([[1.0], [], [1.0], [2.0], []], [[1.5], [1.0], [], [2.25], []])
    assert (change.items, change.missing, change.mean) == (2, 3, 0.375)
    said = judge_increase(change, maximum=0.01, alpha=0.001).message
    assert "over 2 documents (3 more have none on one side)" in said


def test_nothing_to_compare_is_refused() -> None:
    """No common item, or sides of different length, is no result."""
    with pytest.raises(ValueError, match="no item has a score both in the baseline and in the run"):
        paired_change([[1.0], []], [[], [1.0]])
    with pytest.raises(ValueError, match="shorter"):
        paired_change([[1.0], [1.0]], [[1.0]])


def test_one_item_shows_nothing() -> None:
    """A single document does not tell a change from its noise: it is never red and never drift."""
    change = paired_change([[1.0]], [[3.0]])
    assert (change.mean, change.t, change.low, change.p_value, change.p_increase) == (2.0, None, None, 1.0, 1.0)
    assert judge_increase(change, maximum=0.01, alpha=0.001).verdict is Verdict.PASS
    told = drift(change, noise=0.001, alpha=0.001)
    assert not told.beyond_noise
    assert told.sentence == (
        "bits per byte +2.0000 against the baseline over 1 documents (no interval, p = 1): not significant at 0.001"
    )


def with_figures(*, mean: float, p_value: float, spread: float = 0.0) -> PairedChange:
    one_sided = p_value / 2 if mean > 0 else 1 - p_value / 2
    return PairedChange(
        items=30,
        missing=0,
        mean=mean,
        standard_error=0.004,
        t=mean / 0.004,
        low=mean - 0.008,
        high=mean + 0.008,
        p_value=p_value,
        p_increase=one_sided,
        baseline_spread=spread,
    )


INCREASES = {
    "large and real": (0.02, 1e-5, Verdict.REGRESSION, "above the allowed +0.01 and significant at 0.001"),
    "large by chance": (0.02, 0.01, Verdict.PASS, "above the allowed +0.01 and not significant at 0.001"),
    "real and small": (0.005, 1e-9, Verdict.PASS, "within the allowed +0.01"),
    "as large as allowed": (0.01, 1e-9, Verdict.PASS, "within the allowed +0.01"),
    "one-sided": (0.02, 0.0019, Verdict.REGRESSION, "above the allowed +0.01 and significant at 0.001"),
    "better": (-0.5, 1e-9, Verdict.PASS, "within the allowed +0.01"),
}


@pytest.mark.parametrize(("mean", "p", "verdict", "said"), INCREASES.values(), ids=INCREASES)
def test_an_increase_fails_that_is_large_and_real(mean: float, p: float, verdict: Verdict, said: str) -> None:
    """Both are needed, and a decrease never fails."""
    gate = judge_increase(with_figures(mean=mean, p_value=p), maximum=0.01, alpha=0.001)
    assert (gate.verdict, gate.measured, gate.required) == (verdict, mean, 0.01)
    assert gate.message.endswith(said)


def test_the_gate_tells_its_figures() -> None:
    """How many documents, the mean change, its interval and the p-value."""
    gate = judge_increase(with_figures(mean=0.02, p_value=3e-5), maximum=0.01, alpha=0.001)
    assert gate.message == (
        "bits per byte +0.0200 against the baseline over 30 documents (95% interval +0.0120 to +0.0280, "
        "one-sided p = 1.5e-05): above the allowed +0.01 and significant at 0.001"
    )
    assert "one-sided p < 1e-12)" in judge_increase(with_figures(mean=0.02, p_value=0), maximum=0, alpha=0.001).message


DRIFTS = {
    "up": (0.002, 1e-5, 0.0, True, "beyond the numeric noise of 0.001"),
    "down": (-0.002, 1e-5, 0.0, True, "beyond the numeric noise of 0.001"),
    "small and real": (0.0009, 1e-9, 0.0, False, "within the numeric noise of 0.001"),
    "by chance": (0.002, 0.02, 0.0, False, "not significant at 0.001"),
    "less than the baseline's own": (0.002, 1e-9, 0.003, False, "within the numeric noise of 0.003"),
    "more than the baseline's own": (-0.004, 1e-9, 0.003, True, "beyond the numeric noise of 0.003"),
}


@pytest.mark.parametrize(("mean", "p", "spread", "beyond", "said"), DRIFTS.values(), ids=DRIFTS)
def test_drift_is_a_real_change_beyond_noise(mean: float, p: float, spread: float, beyond: bool, said: str) -> None:
    """Either way, and never within the floor or what the baseline's own runs differ by."""
    told = drift(with_figures(mean=mean, p_value=p, spread=spread), noise=0.001, alpha=0.001)
    assert told.beyond_noise is beyond
    assert told.sentence.endswith(said)


def test_margins_are_told_as_margins() -> None:
    """The sentence speaks of what changed."""
    told = drift(with_figures(mean=-0.02, p_value=1e-5), noise=0.01, alpha=0.001, of=MARGIN)
    assert told.sentence == (
        "margin of the right choice -0.0200 against the baseline over 30 questions (95% interval -0.0280 to -0.0120, "
        "p = 1e-05): beyond the numeric noise of 0.01"
    )


def test_noise_is_what_whole_runs_of_the_baseline_differ_by() -> None:
    """Runs are compared by their means over the items that every run scored."""
    change = paired_change([[1.0, 1.5], [2.0, 1.5], [3.0, 3.3], [9.0]], alone([1.0, 2.0, 3.0, 9.0]))
    assert change.baseline_spread == pytest.approx(0.1, rel=1e-12)
    assert paired_change(alone([1.0, 2.0]), alone([1.0, 2.0])).baseline_spread == 0.0


MEASURED = (
    *(1.21876, 1.59534, 1.00075, 0.88132, 1.14443, 0.62342, 1.87530, 0.67687, 1.02148, 1.10164),
    *(1.00352, 1.29149, 1.25817, 0.66709, 1.35313, 1.01102, 1.25240, 1.36906, 0.95406, 0.67860),
    *(2.02280, 1.42231, 1.08557, 1.14046, 1.17432, 1.19042, 0.96796, 1.26139, 1.59921, 1.02221),
)
"""Bits per byte of the shipped documents by SmolLM2-135M-Instruct in float32, transformers on the CPU."""
HALVED = (
    *(1.23759, 1.64782, 1.05654, 0.89345, 1.16203, 0.63831, 1.91154, 0.69580, 1.04556, 1.14921),
    *(1.03353, 1.32445, 1.27790, 0.68867, 1.40445, 1.03575, 1.27774, 1.39206, 0.98374, 0.69569),
    *(2.06636, 1.44136, 1.11162, 1.19229, 1.19985, 1.22284, 0.99166, 1.29634, 1.61694, 1.04952),
)
"""The same with the output projection of the attention in layer 2 (from 0) multiplied by 0.5."""
WEAKENED = (
    *(1.22174, 1.60715, 1.00740, 0.88742, 1.14524, 0.62599, 1.88011, 0.67830, 1.02504, 1.10601),
    *(1.00594, 1.29496, 1.26035, 0.67029, 1.36320, 1.01416, 1.25700, 1.37069, 0.95991, 0.67834),
    *(2.02947, 1.42533, 1.09203, 1.14908, 1.17695, 1.19561, 0.97248, 1.27154, 1.60101, 1.02553),
)
"""The same with it multiplied by 0.9."""
ROUNDED = (
    *(1.22165, 1.58907, 1.00174, 0.88232, 1.14531, 0.62394, 1.87645, 0.67792, 1.02254, 1.10221),
    *(1.00405, 1.29407, 1.25898, 0.66732, 1.35127, 1.01289, 1.25444, 1.37443, 0.95510, 0.67983),
    *(2.01688, 1.42514, 1.08079, 1.14013, 1.17586, 1.19133, 0.97111, 1.26053, 1.60082, 1.01995),
)
"""The same in bfloat16."""


def test_a_damaged_layer_is_red_on_the_shipped_documents() -> None:
    """Half of one projection's strength is +0.03 bits a byte: well above 0.01, with p below a millionth."""
    change = paired_change(alone(MEASURED), alone(HALVED))
    assert change.mean > 0.02
    assert change.p_increase < 1e-6
    assert judge_increase(change, maximum=0.01, alpha=0.001).verdict is Verdict.REGRESSION
    assert drift(change, noise=0.001, alpha=0.001).beyond_noise


def test_a_slightly_weakened_layer_is_drift_and_not_red() -> None:
    """A tenth less of the same projection is reported, although no answer would show it and no gate fails."""
    change = paired_change(alone(MEASURED), alone(WEAKENED))
    assert change.mean > 0.002
    assert change.p_value < 1e-6
    assert drift(change, noise=0.001, alpha=0.001).beyond_noise
    assert judge_increase(change, maximum=0.01, alpha=0.001).verdict is Verdict.PASS


def test_another_precision_is_neither_red_nor_drift() -> None:
    """bfloat16 against float32 changes every document a little, and the mean by less than the noise."""
    change = paired_change(alone(MEASURED), alone(ROUNDED))
    assert 0 < abs(change.mean) < 0.001
    assert judge_increase(change, maximum=0.0, alpha=0.001).verdict is Verdict.PASS
    assert not drift(change, noise=0.001, alpha=0.001).beyond_noise
    assert not drift(change, noise=0.0, alpha=0.001).beyond_noise
