"""From a config to its task: loads the questions and the worked examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from harness.config import ModelConfig
from harness.datasets import load_gsm8k
from harness.errors import ConfigError
from harness.jsonl import Row, read_choices, read_jsonl, read_texts
from harness.tasks.base import Task
from harness.tasks.choice import Choice
from harness.tasks.gsm8k import WordProblems
from harness.tasks.instructions import Checks, read_checks
from harness.tasks.perplexity import Perplexity

SHIPPED = Path(__file__).parent / "data"
AnyRow = TypeVar("AnyRow")


def build_task(config: ModelConfig, *, folder: Path, data_dir: Path | None) -> Task:
    """Build the task of a config whose YAML lies in `folder`.

    Raises ConfigError for a user's own data that is wrong or too short, DataUnavailable where GSM8K cannot be had.
    """
    name = config.task if config.dataset is None else Path(config.dataset).stem
    own = folder / config.dataset if config.dataset else None
    match config.task:
        case "checks":
            checks = read_checks(own or SHIPPED / "instructions.jsonl")
            return Checks(name=name, config=config, problems=_first(checks, config.num_questions, name))
        case "choice":
            return _choice(config, name, folder)
        case "perplexity":
            texts = read_texts(own or SHIPPED / "documents.jsonl")
            return Perplexity(
                name=name,
                problems=_first(texts, config.num_questions, name),
                context=config.window_context,
                max_window=config.max_window,
            )
        case "gsm8k" | "smoke":
            questions, exemplars = _rows(config, folder, data_dir)
            return WordProblems(
                name=name,
                config=config,
                problems=_first(questions, config.num_questions, name),
                exemplars=_exemplars(exemplars, config, name),
            )


def _choice(config: ModelConfig, name: str, folder: Path) -> Choice:
    if config.dataset is None:
        rows, exemplars = read_choices(SHIPPED / "choice.jsonl"), read_choices(SHIPPED / "choice_exemplars.jsonl")
    else:
        rows = read_choices(folder / config.dataset)
        exemplars = read_choices(folder / config.fewshot_dataset) if config.fewshot_dataset else ()
    return Choice(
        name=name,
        problems=_first(rows, config.num_questions, name),
        exemplars=_exemplars(exemplars, config, name),
        choice_score=config.choice_score,
        pairwise=config.pairwise_tokenization,
        move_spaces=config.move_trailing_spaces,
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


def _first(rows: Sequence[AnyRow], wanted: int | None, name: str) -> Sequence[AnyRow]:
    return _enough(rows, wanted, f"num_questions: {name}")


def _exemplars(rows: Sequence[AnyRow], config: ModelConfig, name: str) -> Sequence[AnyRow]:
    return _enough(rows, config.num_fewshot, f"num_fewshot: the worked examples of {name}")


def _enough(rows: Sequence[AnyRow], wanted: int | None, what: str) -> Sequence[AnyRow]:
    if wanted is not None and wanted > len(rows):
        raise ConfigError(f"{what}: {wanted} wanted, there are {len(rows)}")
    return rows[:wanted]
