"""The smallest drop that a number of questions, a tolerance or a baseline can show; pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

NORMAL = NormalDist()
NOISE_MULTIPLE = 3.5
"""How many run-to-run deviations a tolerance must hold to be red by chance about once in a thousand runs."""


def binomial_tail(at_most: int, n: int, share: float) -> float:
    """Compute P(X <= at_most) for n independent questions, each right with probability `share`; exact to rounding."""
    if at_most < 0:
        return 0.0
    if at_most >= n or share <= 0:
        return 1.0
    if share >= 1:
        return 0.0
    if at_most > n * share:  # from the middle outwards terms only shrink, and may be left out once they are small
        return 1 - binomial_tail(n - at_most - 1, n, 1 - share)
    odds, terms = (1 - share) / share, [_binomial_term(at_most, n, share)]
    for x in range(at_most, 0, -1):
        terms.append(terms[-1] * x / (n - x + 1) * odds)
        if terms[-1] < 1e-18 * terms[0]:
            break
    return math.fsum(terms)


def smallest_drop(questions: int, accuracy: float, *, alpha: float = 0.05, power: float = 0.95) -> float | None:
    """Find the smallest drop from `accuracy` that the total of one run shows with `power`, at alpha false alarms.

    The total is binomial, as over questions never asked before; None where not even a drop to 0 would show.
    """
    critical = _last(lambda right: binomial_tail(right, questions, accuracy) <= alpha, questions)
    if critical is None:
        return None
    low, high = 0.0, accuracy
    while high - low > 1e-9:
        middle = (low + high) / 2
        seen = binomial_tail(critical, questions, accuracy - middle) >= power
        low, high = (low, middle) if seen else (middle, high)
    return high


def drop_seen_by_floor(accuracy: float, floor: float, deviation: float, *, power: float = 0.95) -> float:
    """Find the smallest drop from `accuracy` that puts a run below the floor with `power`, its noise being normal."""
    return max(0.0, accuracy - floor + NORMAL.inv_cdf(power) * deviation)


def drop_seen_by_pairing(
    deviation: float, *, runs: int, repeats: int, alpha: float = 0.001, margin: float = 0.005, power: float = 0.95
) -> float:
    """Estimate the smallest drop that the paired gate shows, by the normal law and the baseline's noise.

    `deviation` is that of one run's accuracy from run to run, `runs` those of the baseline.
    """
    spread = deviation * math.sqrt(1 / runs + 1 / repeats)
    return max(margin, NORMAL.inv_cdf(1 - alpha) * spread) + NORMAL.inv_cdf(power) * spread


def _binomial_term(x: int, n: int, share: float) -> float:
    logs = math.lgamma(n + 1) - math.lgamma(x + 1) - math.lgamma(n - x + 1)
    return math.exp(logs + x * math.log(share) + (n - x) * math.log1p(-share))


def _last(holds: Callable[[int], bool], end: int) -> int | None:
    """Find the last of 0 to end where a rule holds that, once broken, stays so."""
    low, high = -1, end + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low >= 0 else None
