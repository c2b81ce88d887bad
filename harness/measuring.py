"""Asking the same questions several times of one server, to learn how much runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.config_lists import ListedConfig
from harness.gates.calibration import refusals
from harness.gates.threshold import Verdict
from harness.pipeline import evaluate, raise_for_verdict
from harness.placement import find_placement
from harness.records import ConfigRecord, EvalResult, read_samples
from harness.reports.terminal import LiveLine
from harness.serving import RunOptions, Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Several passes over the same questions on one server."""

    results: tuple[EvalResult, ...]
    passes: tuple[tuple[Mapping[str, Any], ...], ...]
    """The samples of each pass, in the questions' order."""

    @property
    def answers(self) -> tuple[tuple[bool, ...], ...]:
        """Right or wrong for each question of each pass."""
        return tuple(tuple(bool(sample["correct"]) for sample in samples) for samples in self.passes)

    @property
    def refusals(self) -> list[str]:
        """Why nothing can be derived from these passes."""
        lengths = [result.acceptance.length if result.acceptance else None for result in self.results]
        return refusals([result.counts for result in self.results], lengths)


def measure(entry: ListedConfig, runs: int, options: RunOptions, folder: Path) -> Measured:
    """Ask everything several times of one server; records go to `folder`/run-1 and so on.

    Raises InfrastructureError where a run came to no verdict.
    """
    placed = entry
    if options.base_url is None:
        command = entry.config.serve_command or options.serve_command
        placement = find_placement(options.gpu_choice, serve_command=command)
        placed, options = placement.place(entry), replace(options, gpus=placement.gpus)
    results: list[EvalResult] = []
    passes: list[tuple[Mapping[str, Any], ...]] = []
    with Serving(placed.config, folder / "server.log", options) as serving:
        for number in range(1, runs + 1):
            record = ConfigRecord(folder / f"run-{number}")
            result = evaluate(placed, record, options, LiveLine(f"{entry.id}, run {number}"), serving)
            if result.verdict is Verdict.INFRASTRUCTURE:
                raise_for_verdict(result)
            samples = sorted(read_samples(record.folder / "samples.jsonl"), key=lambda sample: sample["index"])
            results.append(result)
            passes.append(tuple(samples))
            counts = result.counts
            print(f"run {number}: accuracy {counts.accuracy:.4f} ({counts.correct} of {counts.graded})")
    return Measured(results=tuple(results), passes=tuple(passes))
