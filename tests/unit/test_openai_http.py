"""The OpenAI HTTP format: bodies as vLLM's script sends them, and replies that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Generation, Sampling
from harness.backends.openai_http import body_of, error_message, path_of, read_reply


def read(body: Any) -> Generation | Failure:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_reply(raw, latency=0.5, attempts=1)


NO_REPLY: dict[str, Any] = {
    "empty choices": {"choices": []},
    "null choices": {"choices": None},
    "no choices": {},
    "error object": {"object": "error", "message": "boom"},
    "HTML": b"<html>",
    "truncated JSON": b'{"choices": [{"text": "1',
    "empty body": b"",
    "a list": [],
    "text that is a number": {"choices": [{"text": 18}]},
    "null text": {"choices": [{"text": None}]},
    "choice that is text": {"choices": ["18"]},
    "null message": {"choices": [{"message": None}]},
    "not UTF-8": b'{"choices": [{"text": "\xff"}]}',
}


@pytest.mark.parametrize("body", NO_REPLY.values(), ids=NO_REPLY)
def test_a_200_without_a_reply_is_a_failure_with_an_excerpt(body: Any) -> None:
    """A broken body is never an empty, wrong answer."""
    response = read(body)
    assert isinstance(response, Failure)
    assert (response.kind, response.status) == ("invalid_response", 200)
    assert "status 200 without a reply" in response.detail


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_generation_is_a_failure(reason: str) -> None:
    """What the engine broke off says nothing about the model."""
    response = read({"choices": [{"text": "#### 1", "finish_reason": reason}]})
    assert isinstance(response, Failure)
    assert response.kind == "aborted"


REASONING = {
    "null content": ({"content": None, "reasoning_content": "so 18"}, None, "so 18"),
    "the other name": ({"content": None, "reasoning": "so 18"}, None, "so 18"),
    "both": ({"content": "#### 18", "reasoning_content": "maybe 12"}, "#### 18", "maybe 12"),
    "no content": ({"role": "assistant"}, None, None),
}


@pytest.mark.parametrize(("message", "text", "reasoning"), REASONING.values(), ids=REASONING)
def test_only_content_is_the_answer(message: dict[str, Any], text: str | None, reasoning: str | None) -> None:
    """Reasoning is kept beside the answer and never taken for it."""
    response = read({"choices": [{"message": message, "finish_reason": "stop"}]})
    assert isinstance(response, Generation)
    assert (response.text, response.reasoning) == (text, reasoning)


def test_usage_that_is_missing_is_unknown_not_zero() -> None:
    """A server without usage has no token figures, rather than none written."""
    response = read({"choices": [{"text": "x"}]})
    assert isinstance(response, Generation)
    assert (response.generated_tokens, response.prompt_tokens) == (None, None)


def test_a_completion_body_holds_what_vllms_script_sends() -> None:
    """Settings left out are left to the server."""
    request = GenerateRequest(prompt="Q", sampling=Sampling(max_tokens=256, seed=42, stop=("\nQuestion:",)))
    assert path_of(request) == "/completions"
    assert body_of(request, "m") == {
        "prompt": "Q",
        "max_tokens": 256,
        "stop": ["\nQuestion:"],
        "model": "m",
        "temperature": 0.0,
        "seed": 42,
    }


def test_a_chat_body_holds_messages_and_template_arguments() -> None:
    """Chat-only settings go where chat templates find them; a null temperature is not sent."""
    request = GenerateRequest(
        prompt=(ChatMessage(role="user", content="Q"),),
        sampling=Sampling(max_tokens=8, temperature=None, top_p=0.9, top_k=5),
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert path_of(request) == "/chat/completions"
    assert body_of(request, "m") == {
        "messages": [{"role": "user", "content": "Q"}],
        "max_tokens": 8,
        "model": "m",
        "top_p": 0.9,
        "top_k": 5,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_keys_stand_in_the_order_of_vllms_script() -> None:
    """Bodies are compared byte for byte, and JSON keeps the order of its keys."""
    sampling = Sampling(max_tokens=8, temperature=0.5, top_p=0.9, top_k=5, seed=1, stop=("x",))
    settings = ["max_tokens", "stop", "model", "temperature", "seed", "top_p", "top_k"]
    assert list(body_of(GenerateRequest(prompt="Q", sampling=sampling), "m")) == ["prompt", *settings]
    chat = GenerateRequest(
        prompt=(ChatMessage(role="user", content="Q"),),
        sampling=sampling,
        reasoning_effort="low",
        chat_template_kwargs={"b": 1, "a": 2},
    )
    body = body_of(chat, "m")
    assert list(body) == ["messages", *settings, "reasoning_effort", "chat_template_kwargs"]
    assert list(body["chat_template_kwargs"]) == ["b", "a"]


def test_a_completion_can_leave_the_model_to_the_server() -> None:
    """vLLM's script names no model in completions and names it in chat."""
    sampling = Sampling(max_tokens=8)
    completion = GenerateRequest(prompt="Q", sampling=sampling)
    chat = GenerateRequest(prompt=(ChatMessage(role="user", content="Q"),), sampling=sampling)
    assert "model" not in body_of(completion, "m", name_model=False)
    assert body_of(chat, "m", name_model=False)["model"] == "m"


MESSAGES = {
    "OpenAI": (b'{"error": {"message": "seed is not supported"}}', "seed is not supported"),
    "SGLang": (b'{"object": "error", "message": "too long"}', "too long"),
    "FastAPI": (b'{"detail": "Not Found"}', "Not Found"),
    "error as text": (b'{"error": "Unauthorized"}', "Unauthorized"),
    "HTML": (b"<html>\n bad  gateway</html>", "<html> bad gateway</html>"),
    "empty": (b"", "(empty body)"),
    "a list": (b"[1]", "[1]"),
}


@pytest.mark.parametrize(("body", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_what_the_server_says_is_wrong_is_found(body: bytes, expected: str) -> None:
    """Every server's way of naming an error ends up in the message."""
    assert error_message(body) == expected
