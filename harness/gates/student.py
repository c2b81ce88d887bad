"""Student's t: its tail, its quantile, and the mean of a few values with the interval that it gives; pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

MOST_TERMS = 10_000
"""Of the continued fraction, which needs about the square root of the degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The mean of values that are a sample of many like them."""

    n: int
    mean: float
    standard_error: float | None
    """None, as are the interval's ends, where there is one value."""
    low: float | None
    """With `high` the two-sided interval."""
    high: float | None
    confidence: float = 0.95


def mean_of(values: Sequence[float], *, scale: float = 0.0, confidence: float = 0.95) -> Mean:
    """Compute the mean and its interval, mean +- t s / sqrt(n) (Student 1908, Biometrika 6:1).

    `scale` is the size of the numbers that the values came from: their rounding is a noise that the standard error is
    never below. Raises ValueError without any values.
    """
    n = len(values)
    if not n:
        raise ValueError("no values to take the mean of")
    mean = fmean(values)
    if n == 1:
        return Mean(n=1, mean=mean, standard_error=None, low=None, high=None, confidence=confidence)
    error = max(stdev(values) / math.sqrt(n), sys.float_info.epsilon * scale)
    half = t_quantile(0.5 - confidence / 2, n - 1) * error
    return Mean(n=n, mean=mean, standard_error=error, low=mean - half, high=mean + half, confidence=confidence)


def t_tail(t: float, degrees: int) -> float:
    """Compute P(T > t): half of I_x(degrees / 2, 1 / 2) at x = degrees / (degrees + t^2) for t above 0 (DLMF 8.17)."""
    if t < 0:
        return 1.0 - t_tail(-t, degrees)
    x, rest = degrees / (degrees + t * t), t * t / (degrees + t * t)
    return incomplete_beta(degrees / 2, 0.5, x=x, rest=rest) / 2


def t_quantile(tail: float, degrees: int) -> float:
    """Find the t at least 0 with P(T > t) = tail, by bisection; `tail` is at most one half and above 0."""
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > tail:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return high


def incomplete_beta(a: float, b: float, *, x: float, rest: float) -> float:
    """Compute the regularised incomplete beta function I_x(a, b) by its continued fraction (DLMF 8.17.22).

    `rest` is 1 - x, given apart since near x = 1 the difference has no digits left. On the far side of the mean the
    fraction is slow, and I_x(a, b) = 1 - I_rest(b, a) is used.
    """
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, x=rest, rest=x)
    log_front = a * math.log(x) + b * math.log(rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / (a * _fraction(a, b, x))


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 + d1 / (1 + d2 / (1 + ...)) by Lentz's method, through ratios of successive convergents."""
    value = upper = 1.0
    lower = 0.0
    for term in range(1, MOST_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        upper = 1 + d / upper
        lower = 1 / (1 + d * lower)
        value *= upper * lower
        if abs(upper * lower - 1) < sys.float_info.epsilon:
            break
    return value
