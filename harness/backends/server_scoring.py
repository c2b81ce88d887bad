"""Log probabilities from a server: a request's prompts go out together; its scores are all there or none is."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.backends.base import Failure, GenerateRequest, LoglikelihoodRequest, Response, RollingRequest
from harness.backends.posting import Posted
from harness.backends.scoring_formats import ScoringFormat
from harness.backends.server_tokens import Encoder
from harness.backends.tokens import (
    DoesNotFit,
    Piece,
    ScoredPrompt,
    TokenScores,
    answer,
    left_truncated,
    pieces,
    prompts,
    window_of,
)
from harness.errors import ServerError

MOST_PROMPTS = 64
"""Prompts of one HTTP request."""
MOST_TOKENS = 32_768
"""Tokens of one HTTP request: vLLM's reply has some 90 bytes for each, so about 3 MB."""
LONGEST_CHECKED = 3

Send = Callable[[Sequence[ScoredPrompt]], Awaitable[Posted | Failure]]


async def score(
    request: LoglikelihoodRequest | RollingRequest, encoder: Encoder, scoring: ScoringFormat, send: Send
) -> Response:
    """Score one request.

    Raises ServerError where the server does not score at all.
    """
    found = await encoder.encoded(pieces(request))
    if isinstance(found, Failure):
        return found
    try:
        asked = prompts(request, found, encoder.vocabulary)
    except ValueError as error:
        return Failure(kind="rejected", detail=str(error), attempts=0)
    began, attempts = time.perf_counter(), 1
    scores: list[TokenScores] = []
    for part in parts(asked):
        reply = await send(part)
        if isinstance(reply, Failure):
            return reply
        attempts = max(attempts, reply.attempts)
        try:
            scores += scoring.read(reply.raw, part)
        except ValueError as error:
            return Failure(kind="invalid_response", detail=str(error), attempts=reply.attempts, status=200)
    try:
        return answer(request, asked, scores, latency=time.perf_counter() - began, attempts=attempts)
    except ValueError as error:
        return Failure(kind="invalid_response", detail=str(error), attempts=attempts, status=200)


def parts(asked: Sequence[ScoredPrompt]) -> Iterator[list[ScoredPrompt]]:
    """Split prompts into what goes out in one HTTP request each: all of them, unless they are very many or long."""
    part: list[ScoredPrompt] = []
    tokens = 0
    for prompt in asked:
        if part and (len(part) == MOST_PROMPTS or tokens + len(prompt.tokens) > MOST_TOKENS):
            yield part
            part, tokens = [], 0
        part.append(prompt)
        tokens += len(prompt.tokens)
    if part:
        yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A prompt that had to be cut."""

    tokens: tuple[int, ...]
    cut: int


async def shortened(request: GenerateRequest, encoder: Encoder) -> Shortened | Failure | None:
    """Cut a completion's prompt so that its reply fits; None where it fits as it is."""
    assert isinstance(request.prompt, str)
    prompt = Piece(text=request.prompt, special=True)
    found = await encoder.encoded([prompt])
    if isinstance(found, Failure):
        return found
    vocabulary = encoder.vocabulary
    try:
        kept, cut = left_truncated(
            found[prompt],
            max_new_tokens=request.sampling.max_tokens,
            max_model_len=vocabulary.max_model_len,
            bos=vocabulary.bos,
        )
    except ValueError as error:
        return Failure(kind="rejected", detail=str(error), attempts=0)
    return Shortened(tokens=kept, cut=cut) if cut else None


async def check_fit(requests: Sequence[LoglikelihoodRequest | RollingRequest], encoder: Encoder) -> None:
    """Check that windows have room for what they score, and that the longest continuations fit.

    Raises ServerError with the remedy.
    """
    scored = [request for request in requests if isinstance(request, LoglikelihoodRequest)]
    longest = sorted(scored, key=lambda request: max(map(len, request.continuations), default=0))[-LONGEST_CHECKED:]
    windowed = [request for request in requests if isinstance(request, RollingRequest)]
    checked: list[LoglikelihoodRequest | RollingRequest] = [*windowed, *longest]
    for request in checked:
        try:
            if isinstance(request, RollingRequest):
                window_of(request, encoder.vocabulary)
            elif not isinstance(found := await encoder.encoded(pieces(request)), Failure):
                prompts(request, found, encoder.vocabulary)
        except DoesNotFit as error:
            raise ServerError(str(error)) from error
        except ValueError:
            continue  # Its own fault: it is rejected alone when it is asked.
