"""The gates' decisions for ten thousand draws at once, and the same decisions by the harness itself to check them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from math import comb

import numpy as np
from gate_draws import CELLS, Floats, Ints, K, N
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import norm

from harness.gates.calibration import calibrate
from harness.gates.history import histories
from harness.gates.intervals import wilson
from harness.gates.paired import CLEAR, CLEAR_CONFIDENCE, FIRST_LOOK_SHARE, PairedVerdict, paired_verdict
from harness.gates.power import NOISE_MULTIPLE
from harness.gates.threshold import Counts, Verdict, judge_accuracy

Bools = NDArray[np.bool_]
ALPHA, MARGIN, REPEATS = 0.001, 0.005, 3
CERTAIN = (1.5, 7.0)
"""Between these standard deviations the p-value is computed; beyond them the verdict does not depend on it."""

CODES = np.arange(CELLS)
BITS = CODES // 6
RUNS = np.array([(BITS >> run) & 1 for run in range(K)])
FIRST = CODES // 3 % 2
PASSES = FIRST + CODES % 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """For every draw the number of questions by right answers in k runs of the baseline and in the passes."""

    k: int
    passes: int
    counts: Floats

    @classmethod
    def of(cls, draws: Ints, k: int, passes: int) -> Tables:
        before = RUNS[:k].sum(axis=0)
        after = FIRST if passes == 1 else PASSES
        kind = before * (passes + 1) + after
        sums = np.zeros((CELLS, (k + 1) * (passes + 1)))
        sums[CODES, kind] = 1
        return cls(k=k, passes=passes, counts=draws @ sums)

    @property
    def sides(self) -> tuple[Floats, Floats]:
        c, r = np.divmod(np.arange((self.k + 1) * (self.passes + 1)), self.passes + 1)
        return c.astype(float), r.astype(float)

    @property
    def loss(self) -> Floats:
        c, r = self.sides
        return self.counts @ (c / self.k - r / self.passes)

    def noise(self) -> tuple[Floats, Floats]:
        """The variance for the bound, and that which the gains show."""
        c, r = self.sides
        k, passes = self.k, self.passes
        loss = c / k - r / passes
        if min(k, passes) == 1:
            base, run = np.zeros_like(c), loss**2
        else:
            base, run = c * (k - c) / (k * k * (k - 1)), r * (passes - r) / (passes * passes * (passes - 1))
        gains = np.minimum(2 * self.counts @ np.where(loss < 0, run, 0), self.counts @ run)
        return self.counts @ (base + run), self.counts @ base + gains

    def bound(self, confidence: float) -> Floats:
        z = norm.ppf(confidence)
        return (self.loss + z * np.sqrt(self.noise()[0] + (z / min(self.k, self.passes)) ** 2)) / N

    def p_values(self) -> Floats:
        """Both tests' larger p-value; 0 or 1 where the verdict does not depend on it."""
        loss, noise = self.loss, self.noise()[1]
        spread = np.sqrt(np.where(noise > 0, noise, 1))
        guard = np.where((loss > 0) & (noise > 0), ndtr(-loss / spread), 0.0)
        open_yet = (guard <= ALPHA) & (loss > MARGIN * N)
        return np.maximum(np.where(open_yet, 0.0, 1.0), np.maximum(self._p_unchanged(open_yet), guard))

    def _p_unchanged(self, wanted: Bools) -> Floats:
        k, passes = self.k, self.passes
        unit = math.lcm(k, passes)
        score = np.array(
            [
                [round(unit * (c / k - r / passes)) * (k if c in (0, k) else 1) for r in range(passes + 1)]
                for c in range(k + 1)
            ]
        )
        rights = range(1, k + passes)
        ways = {
            t: [(score[t - r, r], comb(passes, r) * comb(k, t - r) / comb(k + passes, t)) for r in _dealt(t, k, passes)]
            for t in rights
        }
        c, r = (side.astype(int) for side in self.sides)
        members = np.array([(c + r == t) for t in rights]).T.astype(float)
        counts = self.counts @ members
        informative = np.where((c + r > 0) & (c + r < k + passes), score[c, r], 0)
        observed = np.rint(self.counts @ informative)
        mean = np.array([sum(s * w for s, w in ways[t]) for t in rights])
        square = np.array([sum(s * s * w for s, w in ways[t]) for t in rights])
        spread = np.sqrt(np.maximum(counts @ (square - mean**2), 1e-12))
        z = (observed - counts @ mean) / spread
        result = np.where(z < CERTAIN[0], 1.0, 0.0)
        near = np.flatnonzero(wanted & (z >= CERTAIN[0]) & (z <= CERTAIN[1]))
        for part in np.array_split(near, max(1, near.size // 500)):
            if part.size:
                result[part] = _tails(counts[part], observed[part], counts[part] @ mean, spread[part], ways)
        return result


def _dealt(t: int, k: int, passes: int) -> range:
    return range(max(0, t - k), min(passes, t) + 1)


def _tails(
    counts: Floats, observed: Floats, mean: Floats, spread: Floats, ways: dict[int, list[tuple[int, float]]]
) -> Floats:
    """Invert the sums' characteristic functions: exact to rounding, on a grid of 20 standard deviations or more."""
    size = 1 << max(9, math.ceil(math.log2(20 * spread.max() + 64)))
    turn = -2j * np.pi * np.arange(size // 2 + 1) / size
    waves = [sum(share * np.exp(turn * score) for score, share in outcomes) for outcomes in ways.values()]
    logs = np.log(np.maximum(np.abs(waves), 1e-300)) + 1j * np.angle(waves)
    start = np.floor(mean - size // 2)
    shares = np.fft.irfft(np.exp(counts @ logs - turn * start[:, None]), n=size, axis=1)
    tails = np.cumsum(shares[:, ::-1], axis=1)[:, ::-1]
    return np.clip(tails[np.arange(len(counts)), (observed - start).astype(int)], 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the paired gate needs to know of one look at every draw."""

    p: Floats
    large: Bools
    kept: Bools
    bound: Floats

    @classmethod
    def at(cls, draws: Ints, k: int, passes: int) -> Look:
        tables = Tables.of(draws, k, passes)
        return cls(
            p=tables.p_values(),
            large=tables.loss > MARGIN * N + 1e-9,
            kept=tables.bound(CLEAR_CONFIDENCE) < CLEAR * MARGIN,
            bound=tables.bound(0.95),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The paired gate's verdicts: red or not, and after how many passes."""

    red: Bools
    passes: Ints


def one_look(first: Look) -> Paired:
    return Paired(red=(first.p <= ALPHA) & first.large, passes=np.ones(first.p.size, dtype=int))


def two_looks(first: Look, last: Look) -> Paired:
    lost = (first.p <= ALPHA * FIRST_LOOK_SHARE) & first.large
    again = ~lost & ~first.kept
    lost_later = (last.p <= ALPHA * (1 - FIRST_LOOK_SHARE)) & last.large
    return Paired(red=lost | (again & lost_later), passes=np.where(again, REPEATS, 1))


def by_totals(draws: Ints) -> dict[str, Bools]:
    """The rules that see one run's total, against the mean of the baseline's five."""
    right = (draws @ FIRST).astype(float)
    totals = draws @ RUNS.T
    mean = totals.mean(axis=1)
    ends = np.array([wilson(count, N).high for count in range(N + 1)])
    before = RUNS.sum(axis=0)
    chance = np.sqrt(draws @ (before * (K - before) / (K * (K - 1))) + 3 / K) / N
    noise = np.maximum(totals.std(axis=1, ddof=1) / N, chance)
    tolerance = np.ceil(np.round(NOISE_MULTIPLE * noise * 1e4, 9)) / 1e4
    return {
        "threshold 0.08": right / N < mean / N - 0.08 - 1e-12,
        "TensorRT-LLM": right / N < mean / N + norm.ppf(0.05) * math.sqrt(2 * 0.25 / N),
        "Wilson bound": ends[right.astype(int)] < mean / N,
        "calibrated": right / N < np.round(mean / N, 4) - tolerance - 1e-12,
    }


def check(draws: Ints, index: int, found: dict[str, Paired], totals: dict[str, Bools]) -> None:
    """Ask the harness itself about one draw, and assert that it says the same."""
    runs, asked = _expand(draws[index])
    for name, twin in found.items():
        k, repeats = (1 if "k = 1" in name else K), (1 if "one pass" in name else REPEATS)
        result = paired_verdict(histories(runs[:k]), asked[:1], alpha=ALPHA, margin=MARGIN, max_repeats=repeats)
        if not result.final:
            result = paired_verdict(histories(runs[:k]), asked, alpha=ALPHA, margin=MARGIN, max_repeats=repeats)
        assert (result.verdict is PairedVerdict.LOST) == twin.red[index], (name, result)
        assert result.passes == twin.passes[index], (name, result)
        p = Tables.of(draws[index : index + 1], k, result.passes).p_values()[0]
        assert p in (0.0, 1.0) or abs(p - result.p_value) < 1e-9, (name, p, result)
    counts, mean = Counts(asked=N, correct=sum(asked[0])), sum(map(sum, runs)) / K / N
    gate = judge_accuracy(counts, threshold=mean, tolerance=0.08)
    assert (gate.verdict is Verdict.REGRESSION) == totals["threshold 0.08"][index]
    fitted = calibrate(runs, floor_before=0.0)
    floor = Decimal(str(fitted.threshold)) - Decimal(str(fitted.tolerance))
    assert (counts.correct < floor * N) == totals["calibrated"][index], fitted


def _expand(table: Ints) -> tuple[list[list[bool]], list[list[bool]]]:
    """Write a table out as runs and passes."""
    codes = np.repeat(CODES, table.astype(int))
    others = codes % 3
    runs = [((codes // 6) >> run & 1).astype(bool).tolist() for run in range(K)]
    return runs, [a.astype(bool).tolist() for a in (FIRST[codes], others > 0, others > 1)]
