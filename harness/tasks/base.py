"""What a task is: requests to ask, and a scored sample for each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from harness.backends.base import GenerateRequest, Response


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


class Task(Protocol):
    """Questions and how their answers are scored; pure once built."""

    @property
    def name(self) -> str: ...

    @property
    def requests(self) -> Sequence[GenerateRequest]: ...

    def score(self, index: int, response: Response) -> Sample: ...

    def describe(self) -> Mapping[str, Any]: ...
