"""Calibration: threshold and tolerance from repeated runs, and what is refused."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from h200_records import RUNS

from harness.gates.calibration import calibrate, refusals
from harness.gates.power import NOISE_MULTIPLE
from harness.gates.threshold import Counts

FIVE = [RUNS[f"bf16_{i}"] for i in range(1, 6)]


def test_real_runs_give_a_tolerance_of_about_one_point() -> None:
    """Five runs of 1,319 questions: the mean, 3.5 deviations, and drops that shrink from 8 points to about one."""
    fitted = calibrate(FIVE, floor_before=0.1005 - 0.08)
    accuracies = [sum(run) / 1319 for run in FIVE]
    assert (fitted.runs, fitted.questions) == (5, 1319)
    assert fitted.accuracy == pytest.approx(statistics.fmean(accuracies), abs=1e-12)
    assert fitted.deviation == pytest.approx(statistics.stdev(accuracies), abs=1e-12)
    assert fitted.threshold == round(fitted.accuracy, 4)
    assert 0.0075 < fitted.tolerance < 0.0095
    assert fitted.both_ways == sum(len({run[i] for run in FIVE}) == 2 for i in range(1319))
    assert fitted.drop_seen_before > 0.08 > 0.015 > fitted.drop_seen_after > fitted.drop_seen_paired > 0.005


def test_totals_that_agree_by_luck_do_not_make_the_tolerance_small() -> None:
    """Two runs with equal totals and 20 differing answers: the questions explain a deviation, and it counts."""
    runs = [[True] * 10 + [False] * 10 + [True] * 980, [False] * 10 + [True] * 10 + [True] * 980]
    fitted = calibrate(runs, floor_before=0.9)
    assert fitted.deviation == 0
    assert fitted.deviation_by_chance == pytest.approx(math.sqrt(20 / 2 + 3 / 2) / 1000, abs=1e-12)
    assert fitted.tolerance >= NOISE_MULTIPLE * fitted.deviation_by_chance


def test_deviation_by_chance_is_that_of_independent_questions() -> None:
    """On average over many calibrations its square is the variance of a total, beside what may have been missed."""
    rng, rates = np.random.default_rng(3), np.array([0.1, 0.5, 0.9, 0.97, 1.0, 0.0] * 10)
    found = [calibrate((rng.random((5, 60)) < rates).tolist(), floor_before=0.0) for _ in range(600)]
    mean = statistics.fmean((60 * fitted.deviation_by_chance) ** 2 - 3 / 5 for fitted in found)
    assert mean == pytest.approx(float((rates * (1 - rates)).sum()), rel=0.03)


def test_runs_that_never_differ_leave_room_for_what_they_missed() -> None:
    """Five equal runs do not prove that no answer ever flips: the tolerance is small, not nothing."""
    fitted = calibrate([[True] * 1000] * 5, floor_before=0.92)
    assert fitted.threshold == 1.0
    assert 0 < fitted.tolerance < 0.004
    assert fitted.both_ways == 0


@pytest.mark.parametrize("runs", [[], [[True]], [[], []]], ids=["none", "one", "empty"])
def test_too_little_to_calibrate_on_is_refused(runs: list[list[bool]]) -> None:
    """One run has no deviation, and no questions have no accuracy."""
    with pytest.raises(ValueError, match="two or more"):
        calibrate(runs, floor_before=0.5)


def test_unequal_runs_are_refused() -> None:
    """Runs over other questions say nothing of run-to-run noise."""
    with pytest.raises(ValueError, match="zip"):
        calibrate([[True, False], [True]], floor_before=0.5)


def test_errors_and_dead_speculation_are_refused() -> None:
    """Each faulty run is named with its figure; a good acceptance length, or none at all, is no fault."""
    counts = [Counts(asked=10, correct=5), Counts(asked=10, correct=5, errors=2), Counts(asked=10)]
    found = refusals(counts, [2.4, 1.01, None])
    assert found == [
        "run 2: 2 of 10 requests got no answer",
        "run 2: acceptance length 1.010 is near 1: speculative decoding does not work",
    ]
    assert refusals(counts[:1], [None]) == []
