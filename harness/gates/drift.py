"""Continuous scores against a baseline's, item by item: an increase that fails, and drift that is only reported; pure.

An item is a document with its bits per byte, or a question with the margin of its right choice. The test is Student's
paired t. Flipping signs at random would assume less, but its smallest p-value costs as many draws as it is small, and
its answer would hang on a seed; the mean of some thirty differences is near enough to normal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.gates.student import mean_of, t_tail
from harness.gates.threshold import Gate, Verdict

SMALLEST_SHOWN = 1e-12
Scores = Sequence[Sequence[float]]
"""The scores of each item, one per run that gave it one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedChange:
    """The mean change of the items' scores from baseline to run; above 0 where the score grew."""

    items: int
    """With a score on both sides."""
    missing: int
    """Left out, having none on one side or the other."""
    mean: float
    standard_error: float | None
    """None, as are the next three, where there is one item: it does not show how changes vary."""
    t: float | None
    low: float | None
    """With `high` the two-sided 95% interval of the mean."""
    high: float | None
    p_value: float
    """Two-sided."""
    p_increase: float
    """One-sided, for an increase."""
    baseline_spread: float
    """By how much the means of the baseline's own runs lie apart; 0 where it holds one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Whether scores changed by more than numeric noise, either way."""

    beyond_noise: bool
    noise: float
    """The floor that was given, or the baseline's own spread where that is wider."""
    alpha: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What changed, in words."""

    name: str
    items: str


BITS_PER_BYTE = Quantity(name="bits per byte", items="documents")
MARGIN = Quantity(name="margin of the right choice", items="questions")


def paired_change(baseline: Scores, now: Scores) -> PairedChange:
    """Test whether the items' scores changed, each item's mean over its runs counting once.

    Raises ValueError where the sides hold different numbers of items, or no item has a score on both.
    """
    pairs = [(before, after) for before, after in zip(baseline, now, strict=True) if before and after]
    if not pairs:
        raise ValueError("no item has a score both in the baseline and in the run")
    changes = [fmean(after) - fmean(before) for before, after in pairs]
    scale = max(abs(score) for pair in pairs for side in pair for score in side)
    found = mean_of(changes, scale=scale)
    error = found.standard_error
    t = None if error is None else found.mean / error if error else 0.0
    return PairedChange(
        items=len(pairs),
        missing=len(baseline) - len(pairs),
        mean=found.mean,
        standard_error=error,
        t=t,
        low=found.low,
        high=found.high,
        p_value=1.0 if t is None else min(1.0, 2 * t_tail(abs(t), len(pairs) - 1)),
        p_increase=1.0 if t is None else t_tail(t, len(pairs) - 1),
        baseline_spread=_spread([before for before, _ in pairs]),
    )


def _spread(baseline: Scores) -> float:
    """Compare whole runs: only items that each run has a score of tell which run it came from."""
    runs = max(map(len, baseline))
    means = [fmean(run) for run in zip(*(scores for scores in baseline if len(scores) == runs), strict=True)]
    return max(means) - min(means)


def judge_increase(change: PairedChange, *, maximum: float, alpha: float) -> Gate:
    """Fail an increase of the bits per byte that is above the maximum and significant, one-sided."""
    above, significant = change.mean > maximum, change.p_increase < alpha
    message = f"{_figures(change, BITS_PER_BYTE)}, {_p('one-sided p', change.p_increase)}): "
    message += f"{'above' if above else 'within'} the allowed {maximum:+g}"
    if above:
        message += f" and {'' if significant else 'not '}significant at {alpha:g}"
    return Gate(
        name="bits per byte increase",
        verdict=Verdict.REGRESSION if above and significant else Verdict.PASS,
        message=message,
        measured=change.mean,
        required=maximum,
    )


def drift(change: PairedChange, *, noise: float, alpha: float, of: Quantity = BITS_PER_BYTE) -> Drift:
    """Say whether a change is more than numeric noise: significant, and its mean beyond `noise` either way.

    Other kernels and other batches round otherwise, and round the same text the same way each time, so a change can be
    significant that means nothing; hence the floor, and the baseline's own spread where that is wider.
    """
    floor = max(noise, change.baseline_spread)
    large, significant = abs(change.mean) > floor, change.p_value < alpha
    if large and significant:
        said = f"beyond the numeric noise of {floor:g}"
    elif large:
        said = f"not significant at {alpha:g}"
    else:
        said = f"within the numeric noise of {floor:g}"
    sentence = f"{_figures(change, of)}, {_p('p', change.p_value)}): {said}"
    return Drift(beyond_noise=large and significant, noise=floor, alpha=alpha, sentence=sentence)


def _figures(change: PairedChange, of: Quantity) -> str:
    """Begin a sentence; its bracket is left open for the p-value."""
    interval = "no interval" if change.low is None else f"95% interval {change.low:+.4f} to {change.high:+.4f}"
    left_out = f" ({change.missing} more have none on one side)" if change.missing else ""
    return f"{of.name} {change.mean:+.4f} against the baseline over {change.items} {of.items}{left_out} ({interval}"


def _p(name: str, value: float) -> str:
    return f"{name} < {SMALLEST_SHOWN:g}" if value < SMALLEST_SHOWN else f"{name} = {value:.2g}"
