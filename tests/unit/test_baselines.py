"""Baselines: what they are bound to, how runs are added, and files that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.baselines import Baseline, KeptAnswer, baseline_of, binding_of, load, require_same, save
from harness.commands.calibrate_command import with_values
from harness.config import ModelConfig
from harness.errors import BaselineMismatch, ConfigError
from harness.gates.history import QuestionHistory
from harness.gates.threshold import Counts, Verdict
from harness.records import EvalResult
from harness.tasks.build import build_task

TASK = {
    "name": "gsm8k",
    "questions": 3,
    "questions_sha256": "q",
    "prompts_sha256": "p",
    "sampling": {"temperature": 0.0, "stop": ["\nQuestion:"]},
    "scorer": "numeric",
}


def result(**keys: Any) -> EvalResult:
    facts: dict[str, Any] = {
        "config_id": "M",
        "model_name": "org/M",
        "task": TASK,
        "verdict": Verdict.PASS,
        "reason": "",
        "counts": Counts(asked=3, correct=2),
        "threshold": 0.5,
        "tolerance": 0.1,
        "floor": 0.4,
        "server": {"version": "0.32.0", "revision": "r1", "command": ["vllm"]},
    }
    return EvalResult(**{**facts, **keys})


def binding(run: EvalResult) -> dict[str, Any]:
    return binding_of(run.model_name, run.server["revision"], run.task)


def samples(*right: bool | None) -> list[dict[str, Any]]:
    return [
        {"correct": bool(r), "status": "error" if r is None else "ok", "text": None if r is None else f"reply {r}"}
        for r in right
    ]


def test_a_baseline_counts_right_answers_over_its_runs(tmp_path: Path) -> None:
    """Each question keeps how often it was answered and how often right; a failed request is neither."""
    baseline = baseline_of(result(), [samples(True, False, None), samples(True, True, True)])
    assert [(h.right, h.runs) for h in baseline.histories] == [(2, 2), (1, 2), (1, 1)]
    assert [answer.text for answer in baseline.answers] == ["reply True"] * 3
    save(tmp_path / "b/M.json", baseline)
    assert load(tmp_path / "b/M.json") == baseline


def test_runs_are_added_to_a_baseline_of_the_same_binding() -> None:
    """Saving again makes the baseline better instead of forgetting what it knew."""
    one, two = baseline_of(result(), [samples(True, False, True)]), baseline_of(result(), [samples(True, True, None)])
    both = one.plus(two)
    assert [(h.right, h.runs) for h in both.histories] == [(2, 2), (1, 2), (1, 1)]
    assert both.runs == 2
    assert both.answers[2].text == "reply True"


DIFFERENT: dict[str, dict[str, Any]] = {
    "model": {"model_name": "org/N"},
    "revision": {"server": {"revision": "r2"}},
    "questions_sha256": {"task": {**TASK, "questions_sha256": "other"}},
    "prompts_sha256": {"task": {**TASK, "prompts_sha256": "other"}},
    "sampling": {"task": {**TASK, "sampling": {"temperature": 1.0}}},
    "grader": {"task": {**TASK, "scorer": "last-number"}},
}


@pytest.mark.parametrize(("key", "change"), DIFFERENT.items(), ids=DIFFERENT)
def test_a_run_of_something_else_is_refused_with_what_differs(key: str, change: dict[str, Any]) -> None:
    """Model, revision, questions, prompts, sampling or grader: whatever differs is named with both values."""
    with pytest.raises(BaselineMismatch, match=f"{key}: .* in the baseline, .* here"):
        require_same(binding(result()), binding(result(**{"server": {"revision": "r1"}, **change})))


@pytest.mark.parametrize("task", ["gsm8k", "smoke", "checks"])
def test_every_task_can_be_bound(gsm8k_dir: Path, task: str) -> None:
    """Whatever a config may ask says what a baseline must be bound to."""
    config = ModelConfig(model_name="m", accuracy_threshold=0.5, task=task)
    described = build_task(config, folder=gsm8k_dir, data_dir=gsm8k_dir).describe()
    assert binding_of("m", "r1", described)["sampling"]["max_tokens"] == 256


def test_circumstances_may_differ() -> None:
    """Another engine version or other server arguments are what one wants to compare."""
    other = result(server={"version": "0.33.0", "revision": "r1", "command": ["vllm", "--quantization", "fp8"]})
    require_same(binding(result()), binding(other))
    assert baseline_of(other, [samples(True)]).circumstances["engine_version"] == "0.33.0"


def test_adding_a_run_of_something_else_is_refused() -> None:
    """A baseline never mixes two models."""
    one = baseline_of(result(), [samples(True)])
    with pytest.raises(BaselineMismatch, match="model: "):
        one.plus(replace(one, binding={**one.binding, "model": "org/N"}))


FILES = {
    "missing": (None, "no such baseline: make one with --save-baseline"),
    "not JSON": ("{", "is no baseline: "),
    "something else": ("[]", "is no baseline: "),
    "of another version": (json.dumps({"schema": 99}), "is a baseline of version 99; this reads 1"),
    "more right than runs": (
        json.dumps({"schema": 1, "binding": {}, "circumstances": {}, "answers": [[2, 1, None]]}),
        "is no baseline: 2 right of 1 runs",
    ),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_baseline_is_an_error(tmp_path: Path, text: str | None, expected: str) -> None:
    """The file is named with what is wrong."""
    path = tmp_path / "b.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"b\.json: ") as caught:
        load(path)
    assert expected in str(caught.value)


def test_an_empty_baseline_has_no_runs() -> None:
    """Nothing asked is nothing known."""
    assert Baseline(binding={}, circumstances={}, answers=()).runs == 0
    assert KeptAnswer(history=QuestionHistory(right=0, runs=0), text=None).history.runs == 0


YAMLS = {
    "both there": "# c\na: 1\naccuracy_threshold: 0.5  # why\ntolerance: 0.08\nb: 2\n",
    "no tolerance": "accuracy_threshold: 0.5\nb: 2\n",
    "CRLF kept": "accuracy_threshold: 0.5\r\nb: 2\r\n",
}


@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_calibrated_values_are_written_in_place(text: str) -> None:
    """Comments, order and other keys stay as they are."""
    written = with_values(text, {"accuracy_threshold": "0.75", "tolerance": "0.02"})
    assert "accuracy_threshold: 0.75" in written
    assert "tolerance: 0.02" in written
    assert "0.5" not in written
    kept = [line for line in text.splitlines() if not line.startswith(("accuracy", "tolerance"))]
    assert [line for line in written.splitlines() if not line.startswith(("accuracy", "tolerance"))] == kept
    assert ("# why" in written) is ("# why" in text)
