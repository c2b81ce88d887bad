"""False alarms and power of the gates, simulated: `python benchmarks/gate_power.py`, a few minutes on two cores.

Prints the tables of docs/statistics.md. Every scenario has its own fixed seed, so the tables are the same every time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
from gate_draws import (
    RECORDS_VARIABLE,
    Change,
    Ints,
    K,
    N,
    copied,
    draw,
    draw_changed,
    draw_records,
    noisier,
    read_records,
    synthetic,
)
from gate_twin import ALPHA, Look, by_totals, check, one_look, two_looks

from harness.gates.flips import flip_test
from harness.gates.history import histories
from harness.gates.intervals import wilson
from harness.gates.paired import paired_verdict
from harness.gates.sequential import ExactStop, Prior, SequentialStop, Stop, sequential_verdict
from harness.gates.threshold import Verdict

ACCURACIES = (0.3, 0.55, 0.88, 0.95)
FLIPS = 21.0
"""Answers that differ between two runs of the measured model; the deviation of its accuracy is then 0.0025."""
NOISE = {"quiet": 5.0, "as measured": FLIPS, "deviation 0.0037": 47.6, "deviation 0.0053": 98.0}
LOSSES = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08)
DRAWS, BATCH = 10_000, 10_000
NULL_DRAWS, NOISE_DRAWS = 100_000, 40_000
"""More where the answer is about one in a thousand."""
PAIRED = "paired k = 5"
RULES = (
    "threshold 0.08",
    "TensorRT-LLM",
    "Wilson bound",
    "paired k = 1",
    "one pass, k = 5",
    PAIRED,
    "calibrated",
)
SHAPES = {
    "1 point that fades: every pass loses other answers": Change(fades=0.01),
    "1 point: half breaks, half fades": Change(breaks=0.005, fades=0.005),
    "1 point, and 15 questions turn each way": Change(breaks=0.01, churn=15),
    "no loss, 15 questions turn each way": Change(churn=15),
    "no loss, 40 questions turn each way": Change(churn=40),
}
DISTANCES = (-30, -20, -12, -8, -5, -3, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 3, 5, 8, 10, 12)
"""Points from the floor at which early stopping is tried."""

Draw = Callable[[Change, int, np.random.Generator], Ints]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One model, one change, and how often to draw them; `full` asks every rule, not only the paired one."""

    model: str
    source: Draw
    change: Change = field(default_factory=Change)
    draws: int = DRAWS
    note: str = ""
    full: bool = False


@dataclass(slots=True, kw_only=True)
class Tally:
    """Red verdicts of each rule, passes of the paired ones, and how often the bounds of the loss held."""

    scenario: Scenario
    red: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    held: list[int] = field(default_factory=lambda: [0, 0])

    def share(self, rule: str) -> str:
        return f"{self.red[rule] / self.scenario.draws:.1%}"

    def passes(self, rule: str) -> str:
        return f"{self.asked[rule] / self.scenario.draws:.2f}" if rule in self.asked else "1"


def simulate(scenario: Scenario) -> Tally:
    seed = zlib.crc32(f"{scenario.model} {scenario.note} {scenario.change}".encode())
    rng, tally = np.random.default_rng(seed), Tally(scenario=scenario)
    for _ in range(scenario.draws // BATCH):
        batch = scenario.source(scenario.change, BATCH, rng)
        looks = Look.at(batch, 5, 1), Look.at(batch, 5, 3)
        found, totals = {PAIRED: two_looks(*looks)}, by_totals(batch)
        if scenario.full:
            found["paired k = 1"] = two_looks(Look.at(batch, 1, 1), Look.at(batch, 1, 3))
            found["one pass, k = 5"] = one_look(looks[0])
        check(batch, 0, found, totals)
        for rule, red in (totals | {name: paired.red for name, paired in found.items()}).items():
            tally.red[rule] += int(red.sum())
        for name, paired in found.items():
            tally.asked[name] += int(paired.passes.sum())
        for at, look in enumerate(looks):
            tally.held[at] += int((look.bound >= scenario.change.loss).sum())
    return tally


def main_scenarios() -> list[Scenario]:
    bf16 = [run for name, run in read_records().items() if name.startswith("bf16")]
    sources: dict[str, Draw] = {f"{a:g}": partial(draw, synthetic(a, FLIPS)) for a in ACCURACIES}
    if bf16:
        sources["bf16 records"] = partial(draw_records, bf16)
    found = []
    for name, source in sources.items():
        found.append(Scenario(model=name, source=source, draws=NULL_DRAWS, full=True))
        found += [Scenario(model=name, source=source, change=Change(breaks=loss), full=True) for loss in LOSSES]
    return found


def changed_scenarios() -> list[Scenario]:
    records = read_records()
    if not records:
        return []
    groups = {
        start: [run for name, run in records.items() if name.startswith(start)]
        for start in ("bf16", "ngram", "fp8", "kv_cache_fp8")
    }
    before = groups.pop("bf16")
    return [
        Scenario(
            model=f"{name}, {float(np.mean(before) - np.mean(after)):.2%} lower",
            source=partial(draw_changed, before, after),
            full=True,
        )
        for name, after in groups.items()
    ]


def sensitivity_scenarios() -> list[Scenario]:
    found = []
    for accuracy, (note, flips) in itertools.product(ACCURACIES, NOISE.items()):
        source = partial(draw, synthetic(accuracy, flips))
        found.append(Scenario(model=f"{accuracy:g}", source=source, note=note, draws=NOISE_DRAWS))
        changes = Change(breaks=0.01), Change(breaks=0.015)
        found += [Scenario(model=f"{accuracy:g}", source=source, change=c, note=note) for c in changes]
    for accuracy in ACCURACIES:
        model = synthetic(accuracy, FLIPS)
        for note, change in SHAPES.items():
            if change.churn <= (model.rates == 0).sum():
                found.append(Scenario(model=f"{accuracy:g}", source=partial(draw, model), change=change, note=note))
        for note, other in (
            ("no loss, passes twice as noisy as the baseline", noisier(model, 2 * FLIPS)),
            ("no loss, passes 3.3 times as noisy, as fp8's are", noisier(model, 3.3 * FLIPS)),
            ("no loss, but the baseline is one run copied", copied(model)),
        ):
            found.append(Scenario(model=f"{accuracy:g}", source=partial(draw, other), note=note))
    return found


def print_main(tallies: Sequence[Tally]) -> None:
    for model, group in itertools.groupby(tallies, key=lambda tally: tally.scenario.model):
        healthy, *lost = group
        at_one = next(tally for tally in lost if tally.scenario.change.loss == 0.01)
        print(f"\nModel {model}: share of runs found red, by loss in points\n")
        losses = [f"{100 * tally.scenario.change.loss:g}" for tally in lost]
        table(["rule", f"no loss, of {NULL_DRAWS:,} (95%)", *losses, "passes at 0", "passes at 1"])
        for rule in RULES:
            interval = wilson(healthy.red[rule], NULL_DRAWS)
            alarms = f"{healthy.red[rule]} ({interval.low:.3%} to {interval.high:.3%})"
            row([rule, alarms, *(t.share(rule) for t in lost), healthy.passes(rule), at_one.passes(rule)])
    print("\nHow often the 95% bound of the loss held (k = 5), after one pass and after three, by loss in points\n")
    table(["model", *(f"{100 * loss:g}" for loss in (0, *LOSSES))])
    for model, group in itertools.groupby(tallies, key=lambda tally: tally.scenario.model):
        row([model, *(", ".join(f"{held / t.scenario.draws:.1%}" for held in t.held) for t in group)])


def print_changed(tallies: Sequence[Tally]) -> None:
    print("\nReal changes against bf16, from their real records: share of runs found red\n")
    table(["rule", *(tally.scenario.model for tally in tallies)])
    for rule in RULES:
        row([rule, *(tally.share(rule) for tally in tallies)])


def print_sensitivity(tallies: Sequence[Tally]) -> None:
    print(
        f"\nNoise of the model ({PAIRED}): red of {NOISE_DRAWS:,} at no loss; at 1 and 1.5 points; passes at no loss\n"
    )
    table(["answers that differ between two runs", *ACCURACIES])
    for note, flips in NOISE.items():
        cells = []
        for accuracy in ACCURACIES:
            found = [t for t in tallies if t.scenario.note == note and t.scenario.model == f"{accuracy:g}"]
            power = ", ".join(tally.share(PAIRED) for tally in found[1:])
            cells.append(f"{found[0].red[PAIRED]}; {power}; {found[0].passes(PAIRED)}")
        row([f"{flips:g} ({note})", *cells])
    print(f"\nShape of the change ({PAIRED}): red of {DRAWS:,}\n")
    table(["change", *ACCURACIES])
    for note in dict.fromkeys(tally.scenario.note for tally in tallies):
        if note not in NOISE:
            red = {t.scenario.model: f"{t.red[PAIRED]:,}" for t in tallies if t.scenario.note == note}
            row([note, *(red.get(f"{accuracy:g}", "-") for accuracy in ACCURACIES)])


def print_records() -> None:
    """Judge every real run against a baseline of real bf16 runs, leaving the judged one out."""
    records = {name: run.tolist() for name, run in read_records().items()}
    if not records:
        print(f"\nReal runs are left out: {RECORDS_VARIABLE} names no file of them")
        return
    bf16 = [name for name in records if name.startswith("bf16") and name != "bf16_second_host"]
    print("\nReal runs against all other bf16 runs of the first host (flips), and against bf16_1 to 5 (loss)\n")
    table(["run", "right", "flips", "expected", "chance up to", "p", "changed", "loss", "p (one pass)", "verdict"])
    for name, run in records.items():
        flips = flip_test(histories([records[other] for other in bf16 if other != name]), [run])
        five = [f"bf16_{i}" for i in range(1, 6)]
        verdict = paired_verdict(histories([records[o] for o in five if o != name]), [run])
        row(
            [
                name,
                sum(run),
                f"{flips.flips:.1f}",
                f"{flips.expected:.1f}",
                f"{flips.bound:.1f}",
                f"{flips.p_value:.2g}",
                "yes" if flips.changed else "no",
                f"{verdict.loss:+.4f}",
                f"{verdict.p_value:.2g}",
                verdict.verdict,
            ]
        )


def stopping(accuracy: float) -> list[tuple[float, float, int, float, int]]:
    """Give distance, share of the questions asked and verdicts differing, for the sequential and the exact rule."""
    floor, prior = Decimal(str(accuracy)) - Decimal("0.08"), Prior.around(accuracy)
    fail, succeed = boundaries(Fraction(floor), prior)
    needed = math.ceil(Fraction(floor) * N)
    rng = np.random.default_rng(zlib.crc32(f"stopping {accuracy}".encode()))
    found = []
    for distance in DISTANCES:
        rights = round(float(floor) * N + distance / 100 * N)
        if not 0 <= rights <= N:
            continue
        order = rng.permuted(np.broadcast_to(np.arange(N) < rights, (DRAWS, N)), axis=1)
        sums = order.cumsum(axis=1, dtype=np.int16)
        red = rights < needed
        stops = (sums <= fail) | (sums >= succeed)
        stops[:, -1] = True
        asked = stops.argmax(axis=1) + 1
        last = sums[np.arange(DRAWS), asked - 1]
        differing = (asked < N) & ((last <= fail[asked - 1]) != red)
        certain = (sums >= needed) | (sums + (N - np.arange(1, N + 1)) < needed)
        certain[:, -1] = True
        asked_exact = certain.argmax(axis=1) + 1
        wrong = (sums[np.arange(DRAWS), asked_exact - 1] >= needed) == red
        assert (follow(SequentialStop(questions=N, floor=floor, prior=prior, alpha=ALPHA), order[0])) == asked[0]
        assert (follow(ExactStop(questions=N, floor=floor), order[0])) == asked_exact[0]
        found.append((distance, asked.mean() / N, int(differing.sum()), asked_exact.mean() / N, int(wrong.sum())))
    return found


def boundaries(floor: Fraction, prior: Prior) -> tuple[Ints, Ints]:
    """Find, for every number of answers, up to how many right the harness stops red, and from how many green."""

    def first(holds: Callable[[int], bool], end: int) -> int:
        low, high = -1, end + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    fail, succeed = [], []
    for graded in range(1, N + 1):

        def verdict(right: int, graded: int = graded) -> Verdict | None:
            return sequential_verdict(right, graded, N, floor=floor, prior=prior, alpha=ALPHA)

        fail.append(first(lambda right: verdict(right) is not Verdict.REGRESSION, graded) - 1)
        succeed.append(first(lambda right: verdict(right) is Verdict.PASS, graded))
    return np.array(fail), np.array(succeed)


def follow(stop: SequentialStop | ExactStop, answers: Iterable[np.bool_]) -> int:
    """Feed a stop rule one answer at a time; return after how many it stopped."""
    asked = 0
    for answer in answers:
        asked += 1
        reached: Stop | None = stop.complete(bool(answer))
        if reached is not None:
            return asked
    return asked


def print_stopping(results: Sequence[list[tuple[float, float, int, float, int]]]) -> None:
    print(f"\nEarly stopping: questions asked, and verdicts of {DRAWS:,} that differ from the full run's\n")
    table(["points from the floor", *(f"{a:g} (floor {a - 0.08:.2f})" for a in ACCURACIES)])
    for distance in DISTANCES:
        cells = []
        for result in results:
            match = [entry for entry in result if entry[0] == distance]
            cells.append(f"{match[0][1]:.1%}, {match[0][2]}; exact {match[0][3]:.1%}, {match[0][4]}" if match else "-")
        row([f"{distance:+g}", *cells])


def table(heads: Sequence[object]) -> None:
    row(heads)
    print("|" + " --- |" * len(heads))


def row(cells: Sequence[object]) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    started = time.monotonic()
    with ProcessPoolExecutor(parser.parse_args().workers) as pool:
        stops = pool.map(stopping, ACCURACIES)
        mains, changes, others = (
            pool.map(simulate, scenarios()) for scenarios in (main_scenarios, changed_scenarios, sensitivity_scenarios)
        )
        print(f"{N} questions, baselines of {K} runs, {DRAWS:,} draws each; losses by questions that break for good")
        print_main(list(mains))
        print_changed(list(changes))
        print_sensitivity(list(others))
        print_records()
        print_stopping(list(stops))
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
