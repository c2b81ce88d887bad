"""A run held against its baseline: whether to ask again, the gates, and every answer that changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.baselines import Baseline, binding_of, load, require_same
from harness.config import ModelConfig
from harness.config_lists import ListedConfig
from harness.errors import DataUnavailable
from harness.gates.drift import BITS_PER_BYTE, MARGIN, Drift, PairedChange, drift, judge_increase, paired_change
from harness.gates.flips import FlipResult, flip_test, judge_flips
from harness.gates.history import Pass
from harness.gates.paired import PairedResult, judge_paired, paired_verdict
from harness.gates.threshold import Gate
from harness.servers.vllm import revision
from harness.tasks.base import Task
from harness.tasks.build import build_task
from harness.tasks.scores import ChoiceScore

REPORTED_RATE = 0.01
"""What counts as changed where flips are only reported."""


NOISE_OF_MARGIN = {ChoiceScore.SUM: 0.01, ChoiceScore.PER_TOKEN: 0.005, ChoiceScore.PER_BYTE: 0.001}
"""Nats, nats per token, nats per byte."""
NOISE_OF_BITS_PER_BYTE = 0.001
Values = Mapping[int, float]
"""The score of each question that has one, by its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All passes of a run against the baseline; what a task has no use for is None."""

    paired: PairedResult | None = None
    flips: FlipResult | None = None
    values: PairedChange | None = None
    """Scores that are no right or wrong: margins in nats, bits per byte."""
    drift: Drift | None = None

    @property
    def unclear(self) -> bool:
        """Whether the questions should be asked again."""
        return self.paired is not None and not self.paired.final

    def gates(self, config: ModelConfig) -> tuple[Gate, ...]:
        """Judge what the config asks for; the rest is reported alone."""
        gates: list[Gate] = []
        if config.gate == "paired" and self.paired is not None:
            gates.append(judge_paired(self.paired))
        if config.max_flip_rate is not None and self.flips is not None:
            gates.append(judge_flips(self.flips))
        if config.max_bits_per_byte_increase is not None and self.values is not None:
            gates.append(judge_increase(self.values, maximum=config.max_bits_per_byte_increase, alpha=config.alpha))
        return tuple(gates)


def baseline_for(config: ModelConfig, folder: Path, task: Task) -> Baseline | None:
    """Load a config's baseline, None where it names none.

    Raises ConfigError where there is no such file, BaselineMismatch where it was made from something else.
    """
    if config.baseline is None:
        return None
    baseline = load(folder / config.baseline)
    require_same(baseline.binding, binding_of(config.model_name, revision(config), task.describe()))
    return baseline


def saved_baseline(folder: Path, listed: ListedConfig) -> Path:
    """Name the file that `--save-baseline` adds a config's run to."""
    return folder / f"{listed.folder}.json"


def check_baselines(listed: ListedConfig, *, data_dir: Path | None, save_to: Path | None) -> None:
    """Check, before anything starts, that a config fits the baseline it names and the one it is to be added to.

    Questions that cannot be had yet are not checked here. Raises ConfigError or BaselineMismatch.
    """
    config = listed.config
    saved = saved_baseline(save_to, listed) if save_to is not None else None
    if config.baseline is None and (saved is None or not saved.exists()):
        return
    with contextlib.suppress(DataUnavailable):
        task = build_task(config, folder=listed.path.parent, data_dir=data_dir)
        baseline_for(config, listed.path.parent, task)
        if saved is not None and saved.exists():
            require_same(load(saved).binding, binding_of(config.model_name, revision(config), task.describe()))


def compare(
    baseline: Baseline, passes: Sequence[Pass], config: ModelConfig, *, values: Sequence[Values] = ()
) -> Comparison:
    """Hold one pass, or all `max_repeats`, against the baseline; `values` are the scores of the same passes.

    Raises ValueError where no question has an answer in both.
    """
    scores = _compare_values(baseline, config, values)
    if config.task == "perplexity":
        return scores
    repeats = config.max_repeats if config.gate == "paired" else 1
    share = REPORTED_RATE if config.max_flip_rate is None else config.max_flip_rate
    histories = baseline.histories
    return replace(
        scores,
        paired=paired_verdict(histories, passes, alpha=config.alpha, margin=config.margin, max_repeats=repeats),
        flips=flip_test(histories, passes, alpha=config.alpha, max_flip_rate=share),
    )


def _compare_values(baseline: Baseline, config: ModelConfig, values: Sequence[Values]) -> Comparison:
    before = [answer.values for answer in baseline.answers]
    if not any(before) or not any(values):
        return Comparison()
    now = [[one[index] for one in values if index in one] for index in range(len(before))]
    change = paired_change(before, now)
    perplexity = config.task == "perplexity"
    noise = NOISE_OF_BITS_PER_BYTE if perplexity else NOISE_OF_MARGIN[config.choice_score]
    noise = noise if config.numeric_noise is None else config.numeric_noise
    of = BITS_PER_BYTE if perplexity else MARGIN
    return Comparison(values=change, drift=drift(change, noise=noise, alpha=config.alpha, of=of))


def facts(comparison: Comparison, baseline: Baseline) -> dict[str, Any]:
    """What `result.json` keeps."""
    parts = {
        "paired": comparison.paired,
        "flips": comparison.flips,
        "values": comparison.values,
        "drift": comparison.drift,
    }
    return {
        **{name: asdict(part) for name, part in parts.items() if part is not None},
        "baseline_runs": baseline.runs,
        "baseline_circumstances": dict(baseline.circumstances),
    }


def changed_answers(
    comparison: Comparison, baseline: Baseline, samples: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """List every question that flipped, both ways, with both texts; `samples` are the last pass, in any order."""
    if comparison.flips is None:
        return
    by_index = {sample["index"]: sample for sample in samples}
    for direction, indices in (("to wrong", comparison.flips.to_wrong), ("to right", comparison.flips.to_right)):
        for index in indices:
            sample, before = by_index[index], baseline.answers[index]
            yield {
                "index": index,
                "changed": direction,
                "question": sample["question"],
                "gold": sample["gold"],
                "baseline_right": before.history.right,
                "baseline_runs": before.history.runs,
                "baseline_text": before.text,
                "text": sample["text"],
                "extracted": sample["extracted"],
            }
