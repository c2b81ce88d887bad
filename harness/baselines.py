"""Baselines: how often each question was answered right over several runs, bound to what was asked of what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import BaselineMismatch, ConfigError, Position
from harness.gates.history import QuestionHistory
from harness.records import EvalResult, now, write_json
from harness.tasks.answers import GRADER_VERSION

SCHEMA_VERSION = 2
"""2 keeps scores beside right and wrong; what 1 wrote is read as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """One question of a baseline."""

    history: QuestionHistory
    text: str | None
    """The reply of its last run, shown where a later run answers otherwise."""
    values: tuple[float, ...] = ()
    """Its score in each run, for tasks that have one: a margin in nats, bits per byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A model's answers as they are known to be."""

    binding: Mapping[str, Any]
    """What a run must share to be compared: model, revision, questions, prompts, sampling settings, grader."""
    circumstances: Mapping[str, Any]
    """What may differ, and is shown: engine version, GPUs, server arguments."""
    answers: tuple[KeptAnswer, ...]

    @property
    def histories(self) -> tuple[QuestionHistory, ...]:
        return tuple(answer.history for answer in self.answers)

    @property
    def runs(self) -> int:
        return max((answer.history.runs for answer in self.answers), default=0)

    def plus(self, other: Baseline) -> Baseline:
        """Add the runs of another baseline of the same binding.

        Raises BaselineMismatch naming what differs.
        """
        require_same(self.binding, other.binding)
        answers = tuple(_added(mine, theirs) for mine, theirs in zip(self.answers, other.answers, strict=True))
        return replace(other, answers=answers)


def _added(mine: KeptAnswer, theirs: KeptAnswer) -> KeptAnswer:
    before, after = mine.history, theirs.history
    history = QuestionHistory(right=before.right + after.right, runs=before.runs + after.runs)
    text = theirs.text if theirs.text is not None else mine.text
    return KeptAnswer(history=history, text=text, values=mine.values + theirs.values)


def binding_of(model: str, revision: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Say what answers depend on, as far as a later run must share it; `task` is what `Task.describe` says."""
    return {
        "model": model,
        "revision": revision,
        "task": task["name"],
        "questions": task["questions"],
        "questions_sha256": task["questions_sha256"],
        "prompts_sha256": task["prompts_sha256"],
        "sampling": task["sampling"],
        "grader": f"{task['scorer']}, version {GRADER_VERSION}",
    }


def baseline_of(result: EvalResult, passes: Sequence[Sequence[Mapping[str, Any]]]) -> Baseline:
    """Make a baseline of one or several passes; each is the samples of all questions, in their order."""
    answers = tuple(
        KeptAnswer(
            history=QuestionHistory(
                right=sum(bool(sample["correct"]) for sample in samples if sample["status"] != "error"),
                runs=sum(sample["status"] != "error" for sample in samples),
            ),
            text=samples[-1]["text"],
            values=tuple(sample["value"] for sample in samples if sample.get("value") is not None),
        )
        for samples in zip(*passes, strict=True)
    )
    server = result.server
    circumstances = {
        "created": now(),
        "config_id": result.config_id,
        "engine_version": server.get("version", "unknown"),
        "command": server.get("command", "unknown"),
        "env": server.get("env", {}),
        "gpus": server.get("gpus", []),
    }
    binding = binding_of(result.model_name, server.get("revision", "unknown"), result.task)
    return Baseline(binding=binding, circumstances=circumstances, answers=answers)


def require_same(baseline: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Check that a run may be compared with a baseline.

    Raises BaselineMismatch naming each thing that differs, with both values.
    """
    different = [
        f"{key}: {json.dumps(baseline.get(key))} in the baseline, {json.dumps(run.get(key))} here"
        for key in sorted({*baseline, *run})
        if baseline.get(key) != run.get(key)
    ]
    if different:
        raise BaselineMismatch("the baseline was made from something else:", *different)


def save(path: Path, baseline: Baseline) -> None:
    """Write a baseline, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": SCHEMA_VERSION,
        "binding": dict(baseline.binding),
        "circumstances": dict(baseline.circumstances),
        "answers": [
            [answer.history.right, answer.history.runs, answer.text, *([list(answer.values)] if answer.values else [])]
            for answer in baseline.answers
        ],
    }
    write_json(path, document)


def add_to(path: Path, baseline: Baseline) -> None:
    """Write a baseline, adding its runs to those that the file holds already.

    Raises BaselineMismatch where the file was made from something else.
    """
    save(path, load(path).plus(baseline) if path.exists() else baseline)


def load(path: Path) -> Baseline:
    """Read what `save` wrote.

    Raises ConfigError where there is no such file or it is no baseline.
    """
    at = Position(path=path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] not in range(1, SCHEMA_VERSION + 1):
            raise ConfigError.at(at, f"is a baseline of version {document['schema']}; this reads 1 to {SCHEMA_VERSION}")
        answers = tuple(
            KeptAnswer(history=QuestionHistory(right=right, runs=runs), text=text, values=tuple(*values))
            for right, runs, text, *values in document["answers"]
        )
        return Baseline(binding=document["binding"], circumstances=document["circumstances"], answers=answers)
    except FileNotFoundError as error:
        raise ConfigError.at(
            at, "no such baseline: make one with --save-baseline or `accuracy-gate calibrate`"
        ) from error
    except OSError as error:
        raise ConfigError.at(at, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError.at(at, f"is no baseline: {error}") from error
