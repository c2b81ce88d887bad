"""Judge calibration runs against each other: `paired_runs.py RECORDS` prints JSON.

RECORDS holds NAME/<run>/run-1 … as `accuracy-gate calibrate --results-dir RECORDS/NAME` leaves them. Each config's runs
are judged against the baseline of bf16's: the bf16 runs with the judged one left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from harness.gates.calibration import calibrate
from harness.gates.flips import flip_test
from harness.gates.history import histories
from harness.gates.paired import paired_verdict
from harness.records import read_samples

BASELINE = "bf16"
Answers = list[bool]
FLOOR_BEFORE = 0.08
"""The YAMLs' floor before they were calibrated."""


def runs_of(folder: Path) -> list[Answers]:
    """Read right or wrong for each question of each run, in order; unfinished runs are left out."""
    found = []
    for path in sorted(folder.glob("*/run-*/samples.jsonl")):
        samples = sorted(read_samples(path), key=lambda sample: int(sample["index"]))
        found.append([bool(sample["correct"]) for sample in samples])
    longest = max(map(len, found), default=0)
    return [run for run in found if len(run) == longest]


def noise(runs: Sequence[Answers]) -> dict[str, Any]:
    """Say what calibrate makes of the runs, and how many answers differ between two of them."""
    totals = [fmean(run) for run in runs]
    between = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in combinations(runs, 2)]
    found = calibrate(runs, floor_before=FLOOR_BEFORE)
    facts = asdict(found)
    facts.pop("histories")
    return {**facts, "accuracies": totals, "deviation": stdev(totals), "flips_between_runs": fmean(between)}


def against(baseline: Sequence[Answers], run: Answers) -> dict[str, Any]:
    before = histories(baseline)
    flips, paired = flip_test(before, [run]), paired_verdict(before, [run])
    return {
        "flips": flips.flips,
        "expected": flips.expected,
        "changed": flips.changed,
        "loss": paired.loss,
        "p_value": paired.p_value,
        "verdict": str(paired.verdict),
    }


def three_passes(baseline: Sequence[Answers], runs: Sequence[Answers]) -> dict[str, Any]:
    """Judge as the gate does where one pass is unclear: again with three."""
    first = paired_verdict(histories(baseline), runs[:1])
    if first.final or len(runs) < 3:
        return {"passes": 1, "verdict": str(first.verdict), "loss": first.loss, "p_value": first.p_value}
    then = paired_verdict(histories(baseline), runs[:3])
    return {"passes": 3, "verdict": str(then.verdict), "loss": then.loss, "p_value": then.p_value}


def judged(records: Path) -> dict[str, dict[str, Any]]:
    """Judge everything that has two runs or more, by the name of its folder."""
    folders = {path.name: path for path in sorted(records.iterdir()) if path.is_dir()}
    runs = {name: found for name, path in folders.items() if len(found := runs_of(path)) > 1}
    reference = runs.get(BASELINE, [])
    document: dict[str, dict[str, Any]] = {}
    for name, own in runs.items():
        facts: dict[str, Any] = {"noise": noise(own)}
        if reference and len(own[0]) == len(reference[0]):
            mine = name == BASELINE
            others = [[r for k, r in enumerate(reference) if not mine or k != i] for i in range(len(own))]
            facts["against_bf16"] = [against(base, run) for base, run in zip(others, own, strict=True)]
            if not mine:
                facts["gate"] = three_passes(reference, own)
        document[name] = facts
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    print(json.dumps(judged(parser.parse_args().records), indent=2, default=float))


if __name__ == "__main__":
    main()
