"""The contract between tasks and backends: requests in, responses or failures out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, Self

Json = Any
FailureKind = Literal["rejected", "status", "connection", "timeout", "invalid_response", "aborted"]


class RequestKind(StrEnum):
    """What can be asked of a model."""

    GENERATE = "generate"
    LOGLIKELIHOOD = "loglikelihood"
    ROLLING = "loglikelihood_rolling"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings; None leaves a setting to the server's default."""

    max_tokens: int
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Text to continue, or a conversation to answer."""

    prompt: str | tuple[ChatMessage, ...]
    sampling: Sampling
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Json] | None = None
    truncate_prompt: bool = False
    """Cut a completion prompt that leaves no room for `max_tokens` from the left, and count what was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoglikelihoodRequest:
    """How likely is each continuation right after the context? The rules are those of `harness.backends.tokens`."""

    context: str
    continuations: tuple[str, ...]
    pairwise: bool = False
    """Encode context and continuation apart and join them, instead of the whole, split at the context's length."""
    move_spaces: bool = True
    """Spaces at the context's end are put before the continuation instead, where tokenizers expect them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingRequest:
    """How likely is a whole text? Every token is scored exactly once."""

    text: str
    max_window: int | None = None
    """Tokens a window may hold, its context included; the model's length less one where None or larger."""
    context: int = 1
    """Tokens of the text before it that each window after the first sees again, unscored; at least 1."""


Request = GenerateRequest | LoglikelihoodRequest | RollingRequest


def kind_of(request: Request) -> RequestKind:
    """Name the kind of a request."""
    match request:
        case GenerateRequest():
            return RequestKind.GENERATE
        case LoglikelihoodRequest():
            return RequestKind.LOGLIKELIHOOD
        case RollingRequest():
            return RequestKind.ROLLING


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a model wrote for one request."""

    text: str | None
    """None where the server sent `content: null`, as a reasoning parser does."""
    finish_reason: str | None
    generated_tokens: int | None
    """None where the server does not report usage."""
    prompt_tokens: int | None
    latency: float
    """Seconds from sending the successful attempt to its last byte."""
    attempts: int = 1
    reasoning: str | None = None
    refusal: str | None = None
    """Why there is no answer to grade although there was a response: a refusal, or a content filter."""
    prompt_tokens_cut: int = 0
    """Tokens cut from the prompt's left to make room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScore:
    """One continuation's likelihood."""

    logprob: float
    """Sum over its tokens, in nats."""
    tokens: int
    bytes: int
    """In UTF-8, of the continuation as it was asked."""
    greedy: bool
    """Whether greedy decoding would have written exactly these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loglikelihoods:
    """How likely each continuation of one request is, in their order."""

    scores: tuple[ContinuationScore, ...]
    latency: float
    """Seconds from sending the request's first part to the last answer."""
    attempts: int = 1
    """The most that any part of it took."""
    context_tokens_cut: int = 0
    """Tokens cut from the context's left to make room."""
    fallbacks: tuple[str, ...] = ()
    """Where the context's tokens were no prefix of the whole's: what was done instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingLoglikelihood:
    """How likely a whole text is."""

    logprob: float
    """Sum over its tokens, in nats."""
    tokens: int
    bytes: int
    windows: int
    latency: float
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """No answer to one request, and why; never graded."""

    kind: FailureKind
    detail: str
    attempts: int
    status: int | None = None


Response = Generation | Loglikelihoods | RollingLoglikelihood | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What the run record must hold about the engine that answered; "unknown" where it does not tell."""

    engine: str
    version: str = "unknown"
    model: str = "unknown"
    details: Mapping[str, Json] = field(default_factory=dict)


class Backend(Protocol):
    """An async context manager that answers requests.

    `run` yields `(index, response)` as each completes, in any order; response i always belongs to request i.
    One request's fault is a `Failure`. It raises `InfrastructureError` only when the whole backend is gone. A request
    of a kind that is not in `kinds` is refused by the caller before anything starts.
    """

    @property
    def kinds(self) -> frozenset[RequestKind]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]: ...

    async def describe(self) -> BackendInfo: ...
