"""Whether requests fit into the context of a `vllm.LLM`, told before the first is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.backends.base import GenerateRequest, LoglikelihoodRequest, Request, RollingRequest
from harness.backends.hf_tokenizer import HfTokenizer
from harness.backends.tokens import DoesNotFit, left_truncated, pieces, prompts, window_of
from harness.errors import ServerError

LONGEST_CHECKED = 3
"""Requests of a kind: the longest in characters may not be the longest in tokens."""


def check_room(llm: Any, requests: Sequence[Request], context: int) -> None:
    """Check that requests fit into a context of so many tokens: of each kind the longest.

    Of a conversation the texts are counted and not what the template puts around them. Raises ServerError with the
    remedy.
    """
    written = [request for request in requests if isinstance(request, GenerateRequest)]
    whole = [request for request in written if not _may_be_cut(request)]
    if whole:
        tokenizer = llm.get_tokenizer()
        for request in sorted(whole, key=_length)[-LONGEST_CHECKED:]:
            _check_whole(sum(len(tokenizer.encode(text)) for text in _texts(request)), request, context)
    try:
        for request in filter(_may_be_cut, written):
            left_truncated((), max_new_tokens=request.sampling.max_tokens, max_model_len=context)
        _check_scored(llm, [request for request in requests if not isinstance(request, GenerateRequest)], context)
    except DoesNotFit as error:
        raise ServerError(str(error)) from error


def _check_whole(tokens: int, request: GenerateRequest, context: int) -> None:
    max_tokens = request.sampling.max_tokens
    wanted = tokens + max_tokens
    if wanted > context:
        raise ServerError(
            f"a prompt of {tokens} tokens and max_tokens {max_tokens} make {wanted}, more than the engine's context of "
            f"{context}: raise max_model_len or lower max_tokens or num_fewshot"
        )


def _check_scored(llm: Any, requests: Sequence[LoglikelihoodRequest | RollingRequest], context: int) -> None:
    """Raise DoesNotFit for a window without room, and for a continuation too long: what is before it may be cut."""
    if not requests:
        return
    tokenizer = HfTokenizer(llm.get_tokenizer())
    vocabulary = tokenizer.vocabulary(context)
    scored = [request for request in requests if isinstance(request, LoglikelihoodRequest)]
    checked: list[LoglikelihoodRequest | RollingRequest] = [r for r in requests if isinstance(r, RollingRequest)]
    checked += sorted(scored, key=_longest_continuation)[-LONGEST_CHECKED:]
    for request in checked:
        try:
            if isinstance(request, RollingRequest):
                window_of(request, vocabulary)
            else:
                prompts(request, tokenizer.encoded(pieces(request)), vocabulary)
        except DoesNotFit:
            raise
        except ValueError:
            continue  # It is rejected alone when it is asked.


def _texts(request: GenerateRequest) -> list[str]:
    prompt = request.prompt
    return [prompt] if isinstance(prompt, str) else [message.content for message in prompt]


def _may_be_cut(request: GenerateRequest) -> bool:
    return request.truncate_prompt and isinstance(request.prompt, str)


def _length(request: GenerateRequest) -> int:
    return sum(map(len, _texts(request)))


def _longest_continuation(request: LoglikelihoodRequest) -> int:
    return max(map(len, request.continuations), default=0)
