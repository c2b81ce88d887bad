"""Threshold, tolerance and baseline from several runs of a model that is known to be good; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from harness.gates.history import QuestionHistory, histories
from harness.gates.power import NOISE_MULTIPLE, drop_seen_by_floor, drop_seen_by_pairing
from harness.gates.threshold import Counts

DEAD_ACCEPTANCE = 1.05
"""An acceptance length below this is speculation that does not work: 1 means that no draft was ever accepted."""
DIGITS = 4
"""To which threshold and tolerance are written: the tolerance is rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What several runs of one model say about its accuracy and its noise; all shares, 0 to 1."""

    runs: int
    questions: int
    accuracy: float
    threshold: float
    tolerance: float
    deviation: float
    """Standard deviation of the accuracy from run to run, as the runs' totals show it."""
    deviation_by_chance: float
    """What the questions that come out both ways explain, each on its own, and what so few runs may have missed."""
    both_ways: int
    """Questions that were right in some runs and wrong in others."""
    histories: tuple[QuestionHistory, ...]
    drop_seen_before: float
    """Smallest drop caught in 95 of 100 runs by the floor as it was."""
    drop_seen_after: float
    """The same by the calibrated floor."""
    drop_seen_paired: float
    """The same by the paired gate against these runs."""


def refusals(counts: Sequence[Counts], acceptance_lengths: Sequence[float | None]) -> list[str]:
    """Say why runs cannot be calibrated on: failed requests, or speculative decoding that does not work.

    An acceptance length is None where the run had no speculative decoding.
    """
    found = [
        f"run {number}: {run.errors} of {run.asked} requests got no answer"
        for number, run in enumerate(counts, 1)
        if run.errors
    ]
    found += [
        f"run {number}: acceptance length {length:.3f} is near 1: speculative decoding does not work"
        for number, length in enumerate(acceptance_lengths, 1)
        if length is not None and length < DEAD_ACCEPTANCE
    ]
    return found


def calibrate(
    runs: Sequence[Sequence[bool]],
    *,
    floor_before: float,
    alpha: float = 0.001,
    margin: float = 0.005,
    max_repeats: int = 3,
) -> Calibration:
    """Derive a threshold (the mean) and a tolerance (3.5 deviations) from runs over the same questions.

    Five runs tell the deviation of their totals to a third at best, so the tolerance is never less than what the
    questions explain by themselves. Raises ValueError with fewer than two runs, no questions, or unequal runs.
    """
    if len(runs) < 2 or not runs[0]:
        raise ValueError(f"{len(runs)} runs of {len(runs[0]) if runs else 0} questions: calibrating needs two or more")
    questions = len(runs[0])
    per_question = histories(runs)
    totals = [sum(run) / questions for run in runs]
    accuracy, deviation = fmean(totals), stdev(totals)
    by_chance = math.sqrt(_variance_of_total(per_question, len(runs))) / questions
    noise = max(deviation, by_chance)
    threshold = round(accuracy, DIGITS)
    tolerance = math.ceil(NOISE_MULTIPLE * noise * 10**DIGITS) / 10**DIGITS
    return Calibration(
        runs=len(runs),
        questions=questions,
        accuracy=accuracy,
        threshold=threshold,
        tolerance=tolerance,
        deviation=deviation,
        deviation_by_chance=by_chance,
        both_ways=sum(not history.unanimous for history in per_question),
        histories=per_question,
        drop_seen_before=drop_seen_by_floor(accuracy, floor_before, noise),
        drop_seen_after=drop_seen_by_floor(accuracy, threshold - tolerance, noise),
        drop_seen_paired=drop_seen_by_pairing(noise, runs=len(runs), repeats=max_repeats, alpha=alpha, margin=margin),
    )


def _variance_of_total(per_question: Sequence[QuestionHistory], runs: int) -> float:
    """Estimate the variance of one run's number of right answers, the questions being independent.

    Rare flips that k runs never showed may add up to 3 / k (the rule of three: three are expected where none is seen
    in one case of twenty).
    """
    return math.fsum(runs * history.variance_of_rate for history in per_question) + 3 / runs
