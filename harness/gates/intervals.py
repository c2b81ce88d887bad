"""Confidence intervals for a share of right answers; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A two-sided confidence interval, 0 to 1."""

    low: float
    high: float
    confidence: float = 0.95


def wilson(correct: int, n: int, confidence: float = 0.95) -> Interval:
    """Compute Wilson's score interval (Wilson 1927, JASA 22:209), which keeps inside 0..1 and holds near its ends.

    n = 0 knows nothing and gives 0 to 1. Raises ValueError where correct is not within 0..n.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} right of {n}")
    if n == 0:
        return Interval(low=0.0, high=1.0, confidence=confidence)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if correct == 0 else (centre - half) / scale
    high = 1.0 if correct == n else (centre + half) / scale
    return Interval(low=low, high=high, confidence=confidence)
