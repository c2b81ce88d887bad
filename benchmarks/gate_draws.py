"""Models whose questions flip from run to run, and draws of a baseline of five runs and three passes against it.

A draw is kept as a table: how many questions were right in which of the baseline's runs, in the first pass, and in how
many of the other two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]
Rng = np.random.Generator

N = 1319
K = 5
CELLS = 2**K * 2 * 3
RECORDS_VARIABLE = "ACCURACY_GATE_H200_RUNS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Each question's success rate in the baseline's runs, and in the passes before any loss."""

    name: str
    rates: Floats
    passes: Floats

    @property
    def accuracy(self) -> float:
        return float(self.rates.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to the model between baseline and run; shares of the questions."""

    breaks: float = 0.0
    """Right answers lost with their question: it is wrong in every pass."""
    fades: float = 0.0
    """Right answers lost at random, in every pass others."""
    churn: int = 0
    """Questions that turn from right to wrong for good, and as many from wrong to right."""

    @property
    def loss(self) -> float:
        return self.breaks + self.fades


def synthetic(accuracy: float, flips: float) -> Model:
    """Make a model whose two runs differ in `flips` answers on average.

    The rates are evenly spaced quantiles of a beta distribution, shaped like a U: most questions always come out the
    same way, and of the rest more hesitate a little than much.
    """

    def rates(weight: float) -> Floats:
        grid = (np.arange(N) + 0.5) / N
        p = beta.ppf(grid, accuracy * weight, (1 - accuracy) * weight)
        return np.where(p < 1e-5, 0.0, np.where(p > 1 - 1e-5, 1.0, p))

    weight = brentq(lambda w: float((2 * rates(w) * (1 - rates(w))).sum()) - flips, 1e-3, 50)
    p = rates(weight)
    return Model(name=f"{accuracy:g}", rates=p, passes=p)


def noisier(model: Model, flips: float) -> Model:
    """Give the passes more noise than the baseline, and the same accuracy."""
    other = synthetic(model.accuracy, flips)
    return replace(model, passes=other.rates)


def copied(model: Model) -> Model:
    """Mark the baseline as one run told five times: what a server makes that always batches alike."""
    return replace(model, name="copied")


def read_records() -> dict[str, Bits]:
    """Read the real runs, right or wrong for each question, from the file that the variable names; none without it."""
    named = os.environ.get(RECORDS_VARIABLE)
    if not named:
        return {}
    document = json.loads(Path(named).read_text(encoding="utf-8"))
    return {name: np.array(run, dtype=bool) for name, run in document["runs"].items()}


def draw(model: Model, change: Change, draws: int, rng: Rng) -> Ints:
    """Draw baselines and passes of a synthetic model."""
    active = ((model.rates > 0) & (model.rates < 1)) | ((model.passes > 0) & (model.passes < 1))
    p, q = model.rates[active], model.passes[active]
    bits = rng.random((draws, p.size, K), dtype=np.float32) < p[:, None]
    if model.name == "copied":
        bits[:] = bits[:, :, :1]
    asked = rng.random((draws, q.size, 3), dtype=np.float32) < q[:, None]
    stable = int((~active & (model.rates == 1)).sum()), int((~active & (model.rates == 0)).sum())
    return _table(bits, asked, q, stable, change, rng)


def draw_records(runs: Sequence[Bits], change: Change, draws: int, rng: Rng) -> Ints:
    """Deal each question's real outcomes anew over baseline and passes: the truth of a model that did not change."""
    outcomes = np.array(runs).T
    rights = outcomes.sum(axis=1)
    active = outcomes[(rights > 0) & (rights < len(runs))]
    dealt = rng.permuted(np.broadcast_to(active, (draws, *active.shape)), axis=2)
    stable = int((rights == len(runs)).sum()), int((rights == 0).sum())
    return _table(dealt[:, :, :K], dealt[:, :, K : K + 3].copy(), active.mean(axis=1), stable, change, rng)


def draw_changed(before: Sequence[Bits], after: Sequence[Bits], change: Change, draws: int, rng: Rng) -> Ints:
    """Deal the baseline from one model's real runs, and take each question's passes from another's at random."""
    both = np.array([*before, *after])
    active = (both.sum(axis=0) > 0) & ~both.all(axis=0)
    outcomes, later = np.array(before).T[active], np.array(after).T[active]
    dealt = rng.permuted(np.broadcast_to(outcomes, (draws, *outcomes.shape)), axis=2)
    picked = rng.integers(len(after), size=(draws, len(later), 3))
    asked = np.take_along_axis(np.broadcast_to(later, (draws, *later.shape)), picked, axis=2)
    stable = int(both.all(axis=0).sum()), int((both.sum(axis=0) == 0).sum())
    return _table(dealt[:, :, :K], asked, later.mean(axis=1), stable, change, rng)


def _table(
    bits: Bits,
    asked: Bits,
    rates: Floats,
    stable: tuple[int, int],
    change: Change,
    rng: Rng,
) -> Ints:
    """Apply the change, exact in its total, and count the questions of each kind."""
    draws = bits.shape[0]
    right = rates.sum() + stable[0]
    broken = rng.random((draws, rates.size)) < change.breaks * N / right
    broken[broken @ rates > change.breaks * N] = False
    asked &= ~broken[:, :, None]
    share = change.fades * N / (right - change.breaks * N)
    if share:
        asked &= rng.random(asked.shape, dtype=np.float32) >= share
    code = (bits @ (1 << np.arange(K))) * 6 + asked[:, :, 0] * 3 + asked[:, :, 1:].sum(axis=2)
    code += np.arange(draws)[:, None] * CELLS
    table = np.bincount(code.ravel(), minlength=draws * CELLS).reshape(draws, CELLS)
    owed = change.breaks * N - broken @ rates
    whole = np.floor(owed).astype(int)
    table[:, _cell(2**K - 1, 0, 0)] += whole + change.churn
    table[:, _cell(0, 1, 2)] += change.churn
    table[:, _cell(0, 0, 0)] += stable[1] - change.churn
    _add_always_right(table, stable[0] - change.churn - 1 - whole, np.full(draws, 1 - share), rng)
    _add_always_right(table, np.ones(draws, dtype=int), (1 - share) * (1 - (owed - whole)), rng)
    return table


def _add_always_right(table: Ints, questions: Ints, rates: Floats, rng: Rng) -> None:
    """Add questions that every run of the baseline got right, and each pass with the given rate."""
    first = rng.binomial(questions, rates)
    for one, count in ((1, first), (0, questions - first)):
        both = rng.binomial(count, rates**2)
        miss = np.where(rates < 1, 2 * rates * (1 - rates) / np.maximum(1 - rates**2, 1e-300), 0.0)
        single = rng.binomial(count - both, np.clip(miss, 0, 1))
        for others, cell in ((2, both), (1, single), (0, count - both - single)):
            table[:, _cell(2**K - 1, one, others)] += cell


def _cell(bits: int, first: int, others: int) -> int:
    return bits * 6 + first * 3 + others
