"""Early stopping of one evaluation: which rule watches the answers, and the gate that its stop gives; pure."""

from __future__ import annotations

from decimal import Decimal

from harness.gates.sequential import (
    CompletedPrefix,
    ExactStop,
    Prior,
    SequentialStop,
    Stop,
    StopRule,
    asking_order,
)
from harness.gates.threshold import Gate, Verdict


class EarlyStop:
    """Watches answers as they complete and says when no more are needed."""

    def __init__(self, rule: StopRule, *, questions: int, threshold: float, floor: Decimal, alpha: float) -> None:
        self.order = asking_order(questions)
        """The indices in the order in which they must be asked."""
        self.stop: Stop | None = None
        self._prefix = CompletedPrefix(self.order)
        self._exact = ExactStop(questions=questions, floor=floor) if rule is StopRule.EXACT else None
        self._sequential = SequentialStop(questions=questions, floor=floor, prior=Prior.around(threshold), alpha=alpha)

    def complete(self, index: int, right: bool | None) -> bool:
        """Take one answer, None for a request that failed; True where the verdict is settled."""
        if self.stop is None and self._exact is not None:
            self.stop = self._exact.complete(right)
        elif self.stop is None:
            for answer in self._prefix.complete(index, right):
                self.stop = self.stop or self._sequential.complete(answer)
        return self.stop is not None


def judge_stop(stop: Stop, *, floor: Decimal) -> Gate:
    """Turn an early stop into the accuracy gate; the interval holds although the answers chose when to stop."""
    met = stop.verdict is Verdict.PASS
    message = (
        f"accuracy {stop.right} of the first {stop.graded} of {stop.questions} questions; over all of them it lies "
        f"within {stop.interval.low:.4f} to {stop.interval.high:.4f} ({stop.interval.confidence:.0%}) and "
        f"{'meets' if met else 'is below'} the floor {floor} (stop_early: {stop.rule})"
    )
    measured = stop.right / stop.graded if stop.graded else None
    return Gate(name="accuracy", verdict=stop.verdict, message=message, measured=measured, required=float(floor))
