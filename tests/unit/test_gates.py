"""Gates of a single run: exact floors, intervals, and which verdict outweighs which."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from harness.gates.intervals import wilson
from harness.gates.threshold import Counts, Gate, Verdict, judge_acceptance, judge_accuracy, judge_errors, overall


@pytest.mark.parametrize("n", [1, 2, 20, 32, 1319])
def test_wilson_agrees_with_scipy(n: int) -> None:
    """Every interval equals scipy's to 1e-12."""
    for correct in {0, 1, n // 3, n // 2, n - 1, n}:
        for confidence in (0.95, 0.999):
            theirs = binomtest(correct, n).proportion_ci(confidence, method="wilson")
            ours = wilson(correct, n, confidence)
            assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_nothing_graded_knows_nothing() -> None:
    """An empty sample has the interval from 0 to 1."""
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)


def test_impossible_counts_are_refused() -> None:
    """More right than asked is a fault of the caller."""
    with pytest.raises(ValueError, match="3 right of 2"):
        wilson(3, 2)


EXACT = [(84, 100, 0.92, 0.08), (42, 100, 0.45, 0.03), (170, 200, 0.93, 0.08), (0, 5, 0.0, 0.0), (5, 5, 1.0, 0.0)]


@pytest.mark.parametrize(("correct", "n", "threshold", "tolerance"), EXACT)
def test_an_accuracy_at_the_floor_passes(correct: int, n: int, threshold: float, tolerance: float) -> None:
    """The floor is compared in exact arithmetic: floats say that 84 of 100 misses 0.92 - 0.08."""
    assert judge_accuracy(Counts(asked=n, correct=correct), threshold=threshold, tolerance=tolerance).verdict == "pass"
    if correct:
        below = judge_accuracy(Counts(asked=n, correct=correct - 1), threshold=threshold, tolerance=tolerance)
        assert below.verdict == "regression"


@pytest.mark.parametrize(("truth", "measured"), [(714, 660), (458, 419)])
def test_tolerance_is_absolute(truth: int, measured: int) -> None:
    """0.419 against 0.458 passes at 0.08, which a relative tolerance would fail."""
    gate = judge_accuracy(Counts(asked=1000, correct=measured), threshold=truth / 1000, tolerance=0.08)
    assert gate.verdict is Verdict.PASS


def test_a_failed_gate_names_measured_floor_and_interval() -> None:
    """Whoever reads the message needs nothing else to see how much worse it is."""
    gate = judge_accuracy(Counts(asked=32, correct=8), threshold=0.5, tolerance=0.08)
    assert gate.verdict is Verdict.REGRESSION
    for part in ("0.2500", "8 of 32", "0.42", "threshold 0.5", "95% interval 0.1325 to 0.4211"):
        assert part in gate.message


def test_a_failed_request_is_not_a_wrong_answer() -> None:
    """Of 8 requests 2 failed: accuracy is over the other 6, and both readings are shown."""
    counts = Counts(asked=8, correct=2, errors=2)
    gate = judge_errors(counts, max_error_rate=0.0)
    assert counts.accuracy == pytest.approx(1 / 3)
    assert gate.verdict is Verdict.INFRASTRUCTURE
    for part in ("2 of 8", "25.00%", "0.3333", "0.2500"):
        assert part in gate.message


def test_allowed_errors_pass_exactly_at_the_rate() -> None:
    """One of ten is within 0.1; floats must not decide that."""
    assert judge_errors(Counts(asked=10, errors=1), max_error_rate=0.1).verdict is Verdict.PASS
    assert judge_errors(Counts(asked=10, errors=2), max_error_rate=0.1).verdict is Verdict.INFRASTRUCTURE


def test_nothing_graded_is_no_pass() -> None:
    """A check that could not be made is never passed."""
    assert judge_accuracy(Counts(), threshold=0.0, tolerance=0.0).verdict is Verdict.INFRASTRUCTURE


def test_a_floor_that_cannot_fail_says_so() -> None:
    """A pass at floor 0 tells the reader what it is worth."""
    assert "cannot fail" in judge_accuracy(Counts(asked=5), threshold=0.05, tolerance=0.08).message


def test_acceptance_length_is_gated_at_its_minimum() -> None:
    """Equal passes, less is a regression, no draft at all is a regression that says so."""
    assert judge_acceptance(1.2, minimum=1.2).verdict is Verdict.PASS
    assert judge_acceptance(1.19, minimum=1.2).verdict is Verdict.REGRESSION
    dead = judge_acceptance(None, minimum=1.2)
    assert dead.verdict is Verdict.REGRESSION
    assert "no draft at all" in dead.message


COMBINED = [
    (["pass", "pass", "pass"], "pass"),
    (["pass", "regression", "pass"], "regression"),
    (["infrastructure", "regression", "regression"], "infrastructure"),
    (["pass", "regression", "infrastructure"], "regression"),
    (["pass", "pass", "infrastructure"], "infrastructure"),
]


@pytest.mark.parametrize(("verdicts", "expected"), COMBINED)
def test_verdicts_combine(verdicts: list[str], expected: str) -> None:
    """Too many failed requests void everything; a measured regression outweighs a check that could not be made."""
    names = ("errors", "accuracy", "acceptance length")
    gates = [Gate(name=n, verdict=Verdict(v), message="") for n, v in zip(names, verdicts, strict=True)]
    assert overall(gates) == expected
