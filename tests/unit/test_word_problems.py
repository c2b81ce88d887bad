"""Few-shot word problems: prompts byte for byte as vLLM's, stop strings, and what a sample keeps."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import ChatMessage, Failure, Generation
from harness.config import ModelConfig, Scorer
from harness.datasets import load_gsm8k
from harness.errors import ConfigError
from harness.jsonl import Row
from harness.tasks.base import Status
from harness.tasks.build import build_task
from harness.tasks.gsm8k import VLLM_STOP, WordProblems

GOLDEN = {
    (0, ""): "68a1fcd692d8a9c995a551609459fb3691ff233a64652fec18ff4c1b26845516",
    (5, ""): "91b5b5202a0674d2fb56254fd20f5e9ad6ef20f3c89874048df8c652ff3e7c56",
    (8, ""): "6dafce99896a02ebcb111cf33ac0f61751d787cec980de6043d708f6f2903867",
    (0, " Let me think."): "c31815184a0268d1a27632d0224fe370dce6267dc704d3d7ad77e0b5a9f227e0",
    (5, " Let me think."): "808c52c91d4cf3c76ce849116e48845c59f828d97e370fbf6a0bfa6a174e9525",
    (8, " Let me think."): "35a90b546b700920c44bb55df3014a0fc5454785c3e93741d23c8ca203fc5f8d",
}
"""sha256 over all 1,319 prompts, each followed by NUL, as vLLM's published script builds them."""

PROBLEMS = (
    Row(question="2+2?", answer="4.\n#### 4", line_index=0),
    Row(question="3+3?", answer="#### 6", line_index=1),
)
EXEMPLARS = (Row(question="1+1?", answer="It is 2.\n#### 2", line_index=0),)


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(model_name="m", accuracy_threshold=0.5, **keys)


def task(**keys: Any) -> WordProblems:
    return WordProblems(name="t", config=config(**keys), problems=PROBLEMS, exemplars=EXEMPLARS)


@pytest.mark.parametrize(("shots", "gen_prefix"), GOLDEN, ids=lambda value: str(value))
def test_prompts_are_vllms_byte_for_byte(gsm8k_dir: Path, shots: int, gen_prefix: str) -> None:
    """All 1,319 prompts hash to what vLLM's script would send for the same settings."""
    built = build_task(config(num_fewshot=shots, gen_prefix=gen_prefix), folder=gsm8k_dir, data_dir=gsm8k_dir)
    digest = hashlib.sha256()
    for request in built.requests:
        assert isinstance(request.prompt, str)
        digest.update(request.prompt.encode() + b"\0")
    assert len(built.requests) == 1319
    assert digest.hexdigest() == GOLDEN[shots, gen_prefix]


def test_no_row_is_both_exemplar_and_question(gsm8k_dir: Path) -> None:
    """Exemplars come from train and questions from test, which share no question; a leak is refused."""
    gsm8k = load_gsm8k(gsm8k_dir)
    assert not {row.question for row in gsm8k.train} & {row.question for row in gsm8k.test}
    with pytest.raises(ConfigError, match="both worked example and question: '2\\+2\\?'"):
        WordProblems(name="t", config=config(), problems=PROBLEMS, exemplars=PROBLEMS[:1])


def test_chat_sends_one_user_message_as_vllm_does() -> None:
    """The whole few-shot prompt is one message, without stop strings."""
    request = task(use_chat_completions=True).requests[0]
    expected = "Question: 1+1?\nAnswer: It is 2.\n#### 2\n\nQuestion: 2+2?\nAnswer:"
    assert request.prompt == (ChatMessage(role="user", content=expected),)
    assert request.sampling.stop == ()


@pytest.mark.parametrize("cut", [False, True])
def test_prompts_are_cut_only_where_the_config_lets_them(cut: bool) -> None:
    """truncate_prompts reaches every completion, and nothing is cut without it."""
    assert {request.truncate_prompt for request in task(truncate_prompts=cut).requests} == {cut}


def test_exemplars_can_be_turns() -> None:
    """With fewshot_as_multiturn each worked example is a question and its answer."""
    request = task(use_chat_completions=True, fewshot_as_multiturn=True).requests[0]
    assert request.prompt == (
        ChatMessage(role="user", content="Question: 1+1?"),
        ChatMessage(role="assistant", content="Answer: It is 2.\n#### 2"),
        ChatMessage(role="user", content="Question: 2+2?"),
    )


STOPS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "completions": ({}, ("\nQuestion:",)),
    "chat": ({"use_chat_completions": True}, ()),
    "vLLM's reading": ({"scorer": Scorer.LAST_NUMBER}, VLLM_STOP),
    "vLLM's reading in chat": ({"scorer": Scorer.LAST_NUMBER, "use_chat_completions": True}, VLLM_STOP),
    "the config's own": ({"stop": ["END"]}, ("END",)),
    "none": ({"stop": []}, ()),
}


@pytest.mark.parametrize(("keys", "stop"), STOPS.values(), ids=STOPS)
def test_stop_strings_follow_the_config(keys: dict[str, Any], stop: tuple[str, ...]) -> None:
    """A boundary at a line start by default; vLLM's three where its thresholds are to carry over; `stop` overrides."""
    assert task(**keys).requests[0].sampling.stop == stop


def reply(text: str | None, finish_reason: str = "stop") -> Generation:
    return Generation(text=text, finish_reason=finish_reason, generated_tokens=5, prompt_tokens=9, latency=0.1)


def test_a_right_reply_is_scored_by_both_readings() -> None:
    """Both scorers are recorded for every sample, whichever gates."""
    sample = task().score(0, reply("2+2 is 4.\n#### $4.00"))
    assert (sample.status, sample.correct) == (Status.OK, True)
    assert sample.scores == {"numeric": True, "last-number": False}


def test_the_gating_scorer_is_the_configs() -> None:
    """`scorer: last-number` reads as vLLM does, cents and all."""
    sample = task(scorer=Scorer.LAST_NUMBER).score(0, reply("#### $4.00"))
    assert (sample.status, sample.correct, sample.extracted) == (Status.OK, False, "0")


STATUSES = {
    "cut off": ("First 2 and", "length", Status.TRUNCATED),
    "cut off after its answer": ("#### 4\nand", "length", Status.OK),
    "empty": ("", "stop", Status.UNANSWERED),
    "null": (None, "stop", Status.UNANSWERED),
    "null at the limit": (None, "length", Status.TRUNCATED),
    "no number": ("I cannot say.", "stop", Status.UNANSWERED),
}


@pytest.mark.parametrize(("text", "finish_reason", "status"), STATUSES.values(), ids=STATUSES)
def test_a_reply_without_an_answer_is_no_wrong_number(text: str | None, finish_reason: str, status: Status) -> None:
    """Truncated and unanswered replies are told apart, and neither is right."""
    sample = task().score(0, reply(text, finish_reason))
    assert sample.status is status
    assert sample.correct is (status is Status.OK)


def test_a_failure_is_an_error_with_no_score() -> None:
    """A request without a response is never graded."""
    failure = Failure(kind="rejected", detail="HTTP 400: no", attempts=1, status=400)
    sample = task().score(1, failure)
    assert (sample.status, sample.correct, sample.scores) == (Status.ERROR, False, {})
    assert sample.error == {"kind": "rejected", "status": 400, "detail": "HTTP 400: no"}


def test_a_users_own_questions_are_asked(tmp_path: Path) -> None:
    """`dataset` and `fewshot_dataset` are read beside the YAML; all questions are asked where no number is given."""
    (tmp_path / "q.jsonl").write_text('{"question": "7+1?", "answer": "8"}\n{"question": "1+2?", "answer": "#### 3"}\n')
    (tmp_path / "e.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
    own = config(dataset="q.jsonl", fewshot_dataset="e.jsonl", num_fewshot=1)
    built = build_task(own, folder=tmp_path, data_dir=None)
    assert built.name == "q"
    assert [r.prompt for r in built.requests][1] == "Question: 0+1?\nAnswer: #### 1\n\nQuestion: 1+2?\nAnswer:"
    assert built.score(0, reply("8")).correct


def test_more_questions_than_rows_is_an_error(tmp_path: Path) -> None:
    """A set that is shorter than asked for is not silently taken as it is."""
    (tmp_path / "q.jsonl").write_text('{"question": "7+1?", "answer": "8"}\n')
    own = config(dataset="q.jsonl", num_questions=2, num_fewshot=0)
    with pytest.raises(ConfigError, match="num_questions: q: 2 wanted, there are 1"):
        build_task(own, folder=tmp_path, data_dir=None)
    with pytest.raises(ConfigError, match="num_fewshot: the worked examples of q: 5 wanted, there are 0"):
        build_task(config(dataset="q.jsonl"), folder=tmp_path, data_dir=None)
