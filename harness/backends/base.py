"""The contract between tasks and backends: requests in, responses or failures out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

Json = Any
FailureKind = Literal["rejected", "status", "connection", "timeout", "invalid_response", "aborted"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """No answer to one request, and why; never graded."""

    kind: FailureKind
    detail: str
    attempts: int
    status: int | None = None


Response = Generation | Failure


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
    One request's fault is a `Failure`. It raises `InfrastructureError` only when the whole backend is gone.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    def run(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[tuple[int, Response], None]: ...

    async def describe(self) -> BackendInfo: ...
