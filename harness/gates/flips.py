"""Answers that changed against the baseline, either way, beyond what the baseline's own runs show; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from harness.gates.history import Pass, QuestionHistory, flips_between, pair_up
from harness.gates.permutation import law_of_sum
from harness.gates.threshold import Gate, Verdict

HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipResult:
    """How many answers differ between a run and its baseline, and how many would by chance."""

    questions: int
    flips: float
    """Answers that differ, on average over one run of the baseline and one pass of the run."""
    rate: float
    expected: float | None
    """The same between two runs of the baseline; None, as are the next four, where it holds one run."""
    excess_rate: float | None
    """Flips beyond the expected, as a share of the questions."""
    bound: float | None
    """Fewest flips that chance would reach with at most alpha, given how often each question was right in all."""
    p_value: float | None
    changed: bool | None
    """Whether the flips are significant, and more than `max_flip_rate` beyond the expected."""
    max_flip_rate: float
    to_wrong: tuple[int, ...]
    """Questions mostly right in the baseline and mostly wrong in the run."""
    to_right: tuple[int, ...]


def flip_test(
    baseline: Sequence[QuestionHistory], passes: Sequence[Pass], *, alpha: float = 0.001, max_flip_rate: float = 0.01
) -> FlipResult:
    """Count the flips and test them by dealing each question's right answers anew over baseline and run.

    Raises ValueError where nothing can be compared.
    """
    pairs = pair_up(baseline, passes)
    unit = math.lcm(*(pair.baseline.runs * pair.run.runs for pair in pairs))

    def score(before: QuestionHistory, after: QuestionHistory) -> int:
        return int(_differing(before, after) * unit)

    observed = sum(score(pair.baseline, pair.run) for pair in pairs)
    flips, expected = observed / unit, flips_between([pair.baseline for pair in pairs])
    excess = bound = p_value = changed = None
    if expected is not None:
        law = law_of_sum(pair.dealt(score) for pair in pairs if pair.informative)
        p_value, bound = law.tail(observed), law.critical(alpha) / unit
        excess = (flips - expected) / len(pairs)
        changed = p_value <= alpha and excess > max_flip_rate
    return FlipResult(
        questions=len(pairs),
        flips=flips,
        rate=flips / len(pairs),
        expected=expected,
        excess_rate=excess,
        bound=bound,
        p_value=p_value,
        changed=changed,
        max_flip_rate=max_flip_rate,
        to_wrong=tuple(pair.index for pair in pairs if pair.baseline.rate > HALF > pair.run.rate),
        to_right=tuple(pair.index for pair in pairs if pair.baseline.rate < HALF < pair.run.rate),
    )


def judge_flips(result: FlipResult) -> Gate:
    """Turn the flips into a gate; without a second run in the baseline it cannot be judged, so it is not passed."""
    message = f"{result.flips:.1f} of {result.questions} answers differ from the baseline ({result.rate:.2%})"
    if result.changed is None:
        verdict = Verdict.INFRASTRUCTURE
        message += "; its one run does not show how many differ by chance: make a baseline of 2 runs or more"
    else:
        verdict = Verdict.REGRESSION if result.changed else Verdict.PASS
        message += (
            f", {result.expected:.1f} by the baseline's own runs: {result.excess_rate:+.2%} beyond them "
            f"(p = {result.p_value:.2g}; allowed {result.max_flip_rate:.2%}); "
            f"{len(result.to_wrong)} questions became mostly wrong, {len(result.to_right)} mostly right"
        )
    return Gate(
        name="flip rate",
        verdict=verdict,
        message=message,
        measured=result.excess_rate,
        required=result.max_flip_rate,
    )


def _differing(before: QuestionHistory, after: QuestionHistory) -> Fraction:
    """Share of the pairs of one baseline run and one pass whose answers differ."""
    crossed = after.right * (before.runs - before.right) + (after.runs - after.right) * before.right
    return Fraction(crossed, before.runs * after.runs)
