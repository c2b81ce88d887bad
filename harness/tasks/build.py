"""From a config to its task: loads the questions and the worked examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from harness.config import ModelConfig
from harness.datasets import load_gsm8k
from harness.errors import ConfigError
from harness.jsonl import Row, read_jsonl
from harness.tasks.gsm8k import WordProblems
from harness.tasks.instructions import Checks, read_checks

SHIPPED = Path(__file__).parent / "data"
AnyRow = TypeVar("AnyRow")


def build_task(config: ModelConfig, *, folder: Path, data_dir: Path | None) -> WordProblems | Checks:
    """Build the task of a config whose YAML lies in `folder`.

    Raises ConfigError for a user's own data that is wrong or too short, DataUnavailable where GSM8K cannot be had.
    """
    name = config.task if config.dataset is None else Path(config.dataset).stem
    if config.task == "checks":
        rows = read_checks(folder / config.dataset if config.dataset else SHIPPED / "instructions.jsonl")
        return Checks(name=name, config=config, problems=_first(rows, config.num_questions, f"num_questions: {name}"))
    questions, exemplars = _rows(config, folder, data_dir)
    return WordProblems(
        name=name,
        config=config,
        problems=_first(questions, config.num_questions, f"num_questions: {name}"),
        exemplars=_first(exemplars, config.num_fewshot, f"num_fewshot: the worked examples of {name}"),
    )


def check_own_data(config: ModelConfig, *, folder: Path) -> None:
    """Check a user's own questions before anything starts; GSM8K and the shipped sets are known.

    Raises ConfigError.
    """
    if config.dataset is not None:
        build_task(config, folder=folder, data_dir=None)


def _rows(config: ModelConfig, folder: Path, data_dir: Path | None) -> tuple[Sequence[Row], Sequence[Row]]:
    if config.dataset is not None:
        questions = read_jsonl(folder / config.dataset)
        return questions, read_jsonl(folder / config.fewshot_dataset) if config.fewshot_dataset else ()
    if config.task == "smoke":
        return read_jsonl(SHIPPED / "smoke.jsonl"), read_jsonl(SHIPPED / "smoke_exemplars.jsonl")
    gsm8k = load_gsm8k(data_dir)
    return gsm8k.test, gsm8k.train


def _first(rows: Sequence[AnyRow], wanted: int | None, what: str) -> Sequence[AnyRow]:
    if wanted is not None and wanted > len(rows):
        raise ConfigError(f"{what}: {wanted} wanted, there are {len(rows)}")
    return rows[:wanted]
