"""What a number of questions, a tolerance or a baseline can show: against scipy and statsmodels."""

from __future__ import annotations

import pytest
from scipy.stats import binom, norm
from statsmodels.stats.power import normal_power_het
from statsmodels.stats.proportion import proportion_confint

from harness.gates.intervals import wilson
from harness.gates.power import (
    binomial_tail,
    drop_seen_by_floor,
    drop_seen_by_pairing,
    smallest_drop,
)


@pytest.mark.parametrize(("correct", "n"), [(0, 7), (7, 7), (19, 20), (132, 1319), (1200, 1319)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_wilson_agrees_with_statsmodels(correct: int, n: int, confidence: float) -> None:
    """Both ends equal statsmodels' to 1e-9."""
    theirs = proportion_confint(correct, n, alpha=1 - confidence, method="wilson")
    ours = wilson(correct, n, confidence)
    assert (ours.low, ours.high) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("n", [1, 20, 200, 1319, 14042])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.1, 0.5, 0.97, 1.0])
def test_binomial_tail_agrees_with_scipy(n: int, share: float) -> None:
    """From one end to the other, to 1e-9."""
    for at_most in {-1, 0, int(0.9 * n * share), int(n * share), min(n, int(n * share) + 3), n - 1, n}:
        assert binomial_tail(at_most, n, share) == pytest.approx(float(binom.cdf(at_most, n, share)), abs=1e-9)


@pytest.mark.parametrize("n", [20, 200, 1319])
@pytest.mark.parametrize("accuracy", [0.3, 0.55, 0.88, 0.95, 1.0])
def test_smallest_drop_has_the_power_it_says_and_no_smaller_one(n: int, accuracy: float) -> None:
    """By scipy: its critical count is red by chance within alpha, and the drop is red in exactly 95 of 100 runs."""
    drop = smallest_drop(n, accuracy)
    assert drop is not None
    critical = max(count for count in range(n) if binom.cdf(count, n, accuracy) <= 0.05)
    assert float(binom.cdf(critical, n, accuracy - drop)) == pytest.approx(0.95, abs=1e-6)


def test_nothing_shows_where_there_is_nothing_to_lose() -> None:
    """At accuracy 0, or with too few questions for any count to be surprising, no drop shows."""
    assert smallest_drop(1319, 0.0) is None
    assert smallest_drop(3, 0.3) is None


@pytest.mark.parametrize(("accuracy", "floor", "deviation"), [(0.88, 0.80, 0.0023), (0.55, 0.541, 0.0037)])
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_drop_seen_by_a_floor_agrees_with_statsmodels(
    accuracy: float, floor: float, deviation: float, power: float
) -> None:
    """At that drop a run of normal noise falls below the floor with the power asked for, to 1e-9."""
    drop = drop_seen_by_floor(accuracy, floor, deviation, power=power)
    alarms = norm.cdf((floor - accuracy) / deviation)
    theirs = normal_power_het(-drop, 1, alarms, std_null=deviation, std_alternative=deviation, alternative="smaller")
    if alarms > 1e-300:
        assert theirs == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize(("runs", "repeats"), [(1, 1), (5, 1), (5, 3), (10, 3)])
def test_drop_seen_by_pairing_agrees_with_statsmodels(runs: int, repeats: int) -> None:
    """Without a margin it is the drop at which the normal test of two means has the power asked for, to 1e-9."""
    deviation = 0.0025
    drop = drop_seen_by_pairing(deviation, runs=runs, repeats=repeats, margin=0.0)
    spread = deviation * (1 / runs + 1 / repeats) ** 0.5
    theirs = normal_power_het(drop, 1, 0.001, std_null=spread, std_alternative=spread, alternative="larger")
    assert theirs == pytest.approx(0.95, abs=1e-9)


def test_margin_is_the_least_that_pairing_shows() -> None:
    """Without noise every loss beyond the margin shows, and none below it."""
    assert drop_seen_by_pairing(0.0, runs=5, repeats=3, margin=0.005) == 0.005
