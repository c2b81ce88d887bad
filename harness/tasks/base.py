"""What a task is: requests to ask, and a scored sample for each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from harness.backends.base import Generation, Loglikelihoods, Request, Response, RollingLoglikelihood

AnyAnswer = TypeVar("AnyAnswer", Generation, Loglikelihoods, RollingLoglikelihood)


class Status(StrEnum):
    """What became of one question."""

    OK = "ok"
    TRUNCATED = "truncated"
    UNANSWERED = "unanswered"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question with its response and score, as `samples.jsonl` keeps it."""

    index: int
    status: Status
    correct: bool
    """By the scorer that gates. False where the status is not `ok`; an `error` is not counted at all."""
    scores: Mapping[str, bool]
    """Right or wrong by every scorer the task knows."""
    question: str
    gold: str
    text: str | None
    extracted: str | None
    found_by: str | None
    finish_reason: str | None
    generated_tokens: int | None
    prompt_tokens: int | None
    latency: float | None
    attempts: int
    error: Mapping[str, Any] | None = None
    reasoning: str | None = None
    prompt_sha256: str | None = None
    value: float | None = None
    """The continuous measure that is paired with a baseline's: the margin of a choice, the bits per byte of a text."""
    measures: Mapping[str, Any] | None = None
    """What `value` was made from, as JSON."""
    unanswered_because: str | None = None
    """Why nothing is graded although there was a response: a refusal, or a content filter."""
    prompt_tokens_cut: int = 0
    """Tokens cut from the prompt's left to make room."""


class Task(Protocol):
    """Questions and how their answers are scored; pure once built."""

    @property
    def name(self) -> str: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    def score(self, index: int, response: Response) -> Sample: ...

    def describe(self) -> Mapping[str, Any]: ...


def answer_as(response: Response, kind: type[AnyAnswer]) -> AnyAnswer:
    """Take a response as what was asked for.

    Raises TypeError where it is something else: a backend that answers so breaks its contract.
    """
    if not isinstance(response, kind):
        raise TypeError(f"the backend answered with {type(response).__name__}, {kind.__name__} was asked for")
    return response
