"""The OpenAI HTTP format: request bodies out, replies read and classified; pure."""

from __future__ import annotations

import json
from typing import Any

from harness.backends.base import Failure, GenerateRequest, Generation, Json

EXCERPT = 300
"""Characters of a body that a message quotes."""


def path_of(request: GenerateRequest) -> str:
    """Name the endpoint below `/v1` that a request goes to."""
    return "/completions" if isinstance(request.prompt, str) else "/chat/completions"


def body_of(request: GenerateRequest, model: str, *, name_model: bool = True) -> dict[str, Json]:
    """Render a request, its keys in the order of vLLM's GSM8K script; settings that are None are left to the server.

    Without `name_model` a completion leaves the model to the server too, as that script does; chat always names it.
    """
    sampling = request.sampling
    body: dict[str, Json] = {}
    if isinstance(request.prompt, str):
        body["prompt"] = request.prompt
    else:
        body["messages"] = [{"role": m.role, "content": m.content} for m in request.prompt]
    body["max_tokens"] = sampling.max_tokens
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    optional = {
        "model": model if name_model or "messages" in body else None,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "reasoning_effort": request.reasoning_effort,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    body.update({key: value for key, value in optional.items() if value is not None})
    return body


def read_reply(raw: bytes, *, latency: float, attempts: int) -> Generation | Failure:
    """Read the body of a 200.

    Whatever is not a whole reply is a Failure with an excerpt: no JSON, an error object, no choices, a choice
    without text, or one the engine aborted. `content: null` is a reply without an answer, as reasoning parsers send.
    """
    try:
        reply = json.loads(raw)
        choice = reply["choices"][0]
        text, reasoning = _text_of(choice)
        finish_reason = choice.get("finish_reason")
        usage = reply.get("usage") or {}
        generated, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"status 200 without a reply ({type(error).__name__}): {excerpt(raw)}"
        return Failure(kind="invalid_response", detail=why, attempts=attempts, status=200)
    if finish_reason in {"abort", "error"}:
        return Failure(kind="aborted", detail=f"the engine ended it: {finish_reason}", attempts=attempts, status=200)
    return Generation(
        text=text,
        finish_reason=finish_reason,
        generated_tokens=generated if isinstance(generated, int) else None,
        prompt_tokens=prompt if isinstance(prompt, int) else None,
        latency=latency,
        attempts=attempts,
        reasoning=reasoning,
    )


def _text_of(choice: dict[str, Any]) -> tuple[str | None, str | None]:
    if "message" not in choice:
        return _string(choice["text"]), None
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return _string(message.get("content"), optional=True), reasoning if isinstance(reasoning, str) else None


def _string(value: Any, *, optional: bool = False) -> str | None:
    if isinstance(value, str) or (value is None and optional):
        return value
    raise TypeError(f"text is {type(value).__name__}")


def error_message(raw: bytes) -> str:
    """Find what a server says is wrong: `error.message`, `message` (SGLang), `detail`, or the body itself."""
    try:
        body = json.loads(raw)
    except ValueError:
        return excerpt(raw)
    if not isinstance(body, dict):
        return excerpt(raw)
    nested = body.get("error")
    candidates = (
        nested.get("message") if isinstance(nested, dict) else nested,
        body.get("message"),
        body.get("detail"),
    )
    return next((c[:EXCERPT] for c in candidates if isinstance(c, str) and c), excerpt(raw))


def excerpt(raw: bytes) -> str:
    """Quote the beginning of a body on one line."""
    text = " ".join(raw[: 4 * EXCERPT].decode("utf-8", "replace").split())
    return (text[:EXCERPT] + "…" if len(text) > EXCERPT else text) or "(empty body)"
