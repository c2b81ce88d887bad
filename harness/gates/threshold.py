"""The gates of a single run: accuracy against its floor, acceptance length, and how many requests got no answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from harness.gates.intervals import Interval, wilson
from harness.gates.power import smallest_drop


class Verdict(StrEnum):
    """What a gate, a config or a run says about the model."""

    PASS = "pass"
    REGRESSION = "regression"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One rule applied to one result."""

    name: str
    verdict: Verdict
    message: str
    measured: float | None = None
    required: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many questions came out how."""

    asked: int = 0
    correct: int = 0
    truncated: int = 0
    unanswered: int = 0
    errors: int = 0
    retried: int = 0
    """Answered, but not at the first attempt."""
    reused: int = 0
    """Taken from the sample cache or an interrupted run: graded, but not asked now."""

    @property
    def graded(self) -> int:
        """Questions that got a response; a request that failed is not graded, whichever way."""
        return self.asked - self.errors

    @property
    def accuracy(self) -> float | None:
        """Right answers over graded questions; None where nothing was graded."""
        return self.correct / self.graded if self.graded else None

    @property
    def interval(self) -> Interval:
        return wilson(self.correct, self.graded)


def judge_accuracy(counts: Counts, *, threshold: float, tolerance: float) -> Gate:
    """Compare accuracy with threshold - tolerance in exact arithmetic: 84 of 100 meets 0.92 - 0.08."""
    floor = Decimal(str(threshold)) - Decimal(str(tolerance))
    if counts.accuracy is None:
        return Gate(
            name="accuracy",
            verdict=Verdict.INFRASTRUCTURE,
            message="no question got an answer",
            required=float(floor),
        )
    met = Decimal(counts.correct) >= floor * counts.graded
    interval = counts.interval
    message = (
        f"accuracy {counts.accuracy:.4f} ({counts.correct} of {counts.graded}, 95% interval {interval.low:.4f} to "
        f"{interval.high:.4f}) {'meets' if met else 'is below'} the floor {floor} "
        f"(threshold {threshold} - tolerance {tolerance})"
    )
    drop = smallest_drop(counts.graded, threshold)
    message += f"; {counts.graded} questions show a drop of {drop:.4f}" if drop is not None else ""
    if met and floor <= 0:
        message += "; a floor of 0 or less cannot fail"
    verdict = Verdict.PASS if met else Verdict.REGRESSION
    return Gate(name="accuracy", verdict=verdict, message=message, measured=counts.accuracy, required=float(floor))


def judge_errors(counts: Counts, *, max_error_rate: float) -> Gate:
    """Call it an outage when more requests than allowed got no answer."""
    allowed = Decimal(str(max_error_rate)) * counts.asked
    rate = counts.errors / counts.asked if counts.asked else 0.0
    few = counts.errors <= allowed
    message = f"{counts.errors} of {counts.asked} requests got no answer ({rate:.2%}; allowed {max_error_rate:.2%})"
    if not few:
        both = f"accuracy over those answered {counts.accuracy:.4f}" if counts.accuracy is not None else "none answered"
        message += f"; {both}; counting failures as wrong {counts.correct / counts.asked:.4f}"
    verdict = Verdict.PASS if few else Verdict.INFRASTRUCTURE
    return Gate(name="errors", verdict=verdict, message=message, measured=rate, required=max_error_rate)


def judge_acceptance(length: float | None, *, minimum: float) -> Gate:
    """Compare the acceptance length with its minimum; None means that not one draft was made: speculation is dead."""
    if length is None:
        message = f"speculative decoding made no draft at all (minimum acceptance length {minimum})"
        return Gate(name="acceptance length", verdict=Verdict.REGRESSION, message=message, required=minimum)
    met = length >= minimum
    message = f"acceptance length {length:.3f} {'meets' if met else 'is below'} the minimum {minimum}"
    verdict = Verdict.PASS if met else Verdict.REGRESSION
    return Gate(name="acceptance length", verdict=verdict, message=message, measured=length, required=minimum)


def overall(gates: Iterable[Gate]) -> Verdict:
    """Combine gates: too many failed requests void everything; a measured regression outweighs a check not made."""
    verdicts = {gate.name: gate.verdict for gate in gates}
    if verdicts.get("errors") is Verdict.INFRASTRUCTURE:
        return Verdict.INFRASTRUCTURE
    for verdict in (Verdict.REGRESSION, Verdict.INFRASTRUCTURE):
        if verdict in verdicts.values():
            return verdict
    return Verdict.PASS
