"""A response that is no answer is unanswered, with the reason; what was cut from a prompt is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import Generation, RollingLoglikelihood
from harness.config import ModelConfig
from harness.jsonl import Row
from harness.tasks.base import Status, Task
from harness.tasks.gsm8k import WordProblems
from harness.tasks.instructions import Checks, read_checks

CONFIG = ModelConfig(model_name="m", accuracy_threshold=0.5)


def word_problems(_: Path) -> Task:
    return WordProblems(
        name="t", config=CONFIG, problems=(Row(question="2+2?", answer="#### 4", line_index=0),), exemplars=()
    )


def checks(folder: Path) -> Task:
    path = folder / "c.jsonl"
    path.write_text('{"prompt": "2+2?", "check": {"number": 4}}\n')
    return Checks(name="t", config=CONFIG, problems=read_checks(path))


TASKS = pytest.mark.parametrize(
    ("build", "scorers"), [(word_problems, {"numeric", "last-number"}), (checks, {"check"})], ids=["words", "checks"]
)


def reply(**keys: Any) -> Generation:
    return Generation(
        **{"text": "4", "finish_reason": "stop", "generated_tokens": 1, "prompt_tokens": 9, "latency": 0.1, **keys}
    )


@TASKS
@pytest.mark.parametrize("text", [None, "", "4"])
@pytest.mark.parametrize("finish_reason", ["stop", "length", "content_filter"])
def test_a_refusal_is_unanswered_with_its_reason(
    tmp_path: Path, build: Callable[[Path], Task], scorers: set[str], text: str | None, finish_reason: str
) -> None:
    """Whatever text came with it, a refusal is never graded, and is neither truncated nor a wrong number."""
    answer = reply(text=text, finish_reason=finish_reason, refusal="content filter")
    sample = build(tmp_path).score(0, answer)
    assert (sample.status, sample.correct, sample.extracted) == (Status.UNANSWERED, False, None)
    assert (sample.unanswered_because, sample.text, sample.finish_reason) == ("content filter", text, finish_reason)
    assert sample.scores == dict.fromkeys(scorers, False)


@TASKS
def test_tokens_cut_from_the_prompt_are_recorded(
    tmp_path: Path, build: Callable[[Path], Task], scorers: set[str]
) -> None:
    """A right answer to a prompt that was cut counts, and says so."""
    sample = build(tmp_path).score(0, reply(prompt_tokens_cut=12))
    assert (sample.correct, sample.prompt_tokens_cut, sample.unanswered_because) == (True, 12, None)
    assert sample.scores.keys() == scorers
    assert build(tmp_path).score(0, reply()).prompt_tokens_cut == 0


@TASKS
def test_scores_are_no_text_to_grade(tmp_path: Path, build: Callable[[Path], Task], scorers: set[str]) -> None:
    """A backend that answers with another kind of response breaks the contract."""
    other = RollingLoglikelihood(logprob=-1.0, tokens=1, bytes=1, windows=1, latency=0.1)
    with pytest.raises(TypeError, match="answered with RollingLoglikelihood, Generation was asked for"):
        build(tmp_path).score(0, other)
