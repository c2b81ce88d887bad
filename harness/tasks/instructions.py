"""Instruction prompts with a check each: rows of JSONL, asked as chat, right where the check passes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Generation, Response
from harness.config import ModelConfig
from harness.jsonl import JsonNumber, parse_record, read_rows
from harness.tasks.base import Sample, Status, answer_as
from harness.tasks.checks import Check, answer_part, nearest, read_check, read_text_value
from harness.tasks.gsm8k import digest, facts_of, failed_sample, refused_sample
from harness.tasks.sampling import sampling_facts, sampling_of

KEYS = ("prompt", "check", "system", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One prompt with its check."""

    prompt: str
    check: Check
    system: str | None = None
    max_tokens: int | None = None
    """Instead of the config's."""
    line_index: int
    """The row's line in its file, counted from 0, blank lines included."""

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        user = ChatMessage(role="user", content=self.prompt)
        return (user,) if self.system is None else (ChatMessage(role="system", content=self.system), user)


def read_checks(path: Path) -> tuple[CheckRow, ...]:
    """Read prompts with checks: JSON objects, one a line, with `prompt`, `check` and at will `system`, `max_tokens`.

    Raises ConfigError with one line per fault, each naming the file and its line.
    """
    return read_rows(
        path, _row, lambda row: (row.system, row.prompt.strip()), like='{"prompt": "…", "check": {"number": 42}}'
    )


def _row(line: str, index: int) -> CheckRow:
    if not line.lstrip().startswith("{"):
        raise ValueError('not a JSON object; write {"prompt": "…", "check": {"number": 42}}')
    record = parse_record(line)
    for key in record.keys() - set(KEYS):
        raise ValueError(f"unknown key {key!r}{nearest(key, KEYS)}")
    for key in KEYS[:2]:
        if key not in record:
            raise ValueError(f'no "{key}"; a row needs "prompt" and "check"')
    tokens = record.get("max_tokens")
    if "max_tokens" in record and not (isinstance(tokens, JsonNumber) and re.fullmatch(r"[1-9][0-9]{0,8}", tokens)):
        raise ValueError('"max_tokens" must be a whole number from 1')
    return CheckRow(
        prompt=read_text_value(record["prompt"], "prompt"),
        check=read_check(record["check"]),
        system=read_text_value(record["system"], "system") if "system" in record else None,
        max_tokens=int(tokens) if tokens is not None else None,
        line_index=index,
    )


@dataclass(frozen=True, kw_only=True)
class Checks:
    """A set of prompts, asked as chat and scored by the check of each."""

    name: str
    config: ModelConfig
    problems: Sequence[CheckRow]

    @cached_property
    def requests(self) -> tuple[GenerateRequest, ...]:
        return tuple(self._request(row) for row in self.problems)

    def _request(self, row: CheckRow) -> GenerateRequest:
        config = self.config
        sampling = sampling_of(config, stop=config.stop or (), max_tokens=row.max_tokens)
        return GenerateRequest(
            prompt=row.messages,
            sampling=sampling,
            reasoning_effort=config.reasoning_effort,
            chat_template_kwargs=config.chat_template_kwargs,
        )

    def score(self, index: int, response: Response) -> Sample:
        row = self.problems[index]
        common: dict[str, Any] = {
            "index": index,
            "question": row.prompt,
            "gold": row.check.written,
            "attempts": response.attempts,
            "prompt_sha256": digest(self.requests[index].prompt),
        }
        if isinstance(response, Failure):
            return failed_sample(response, common)
        generation = answer_as(response, Generation)
        common |= facts_of(generation)
        if generation.refusal is not None:
            return refused_sample(common, scorers=("check",))
        answer = answer_part(generation.text)
        passed = bool(answer) and row.check.passes(generation.text or "", generation.finish_reason)
        status = Status.OK if passed else _status(answer, generation.finish_reason)
        return Sample(
            **common,
            status=status,
            correct=passed,
            scores={"check": passed},
            extracted=answer if status is Status.OK else None,
            found_by=row.check.kind if status is Status.OK else None,
        )

    def describe(self) -> dict[str, Any]:
        """What the run record keeps: enough to tell two runs apart."""
        return {
            "name": self.name,
            "questions": len(self.problems),
            "fewshot": 0,
            "scorer": "check",
            "sampling": sampling_facts(self.config, stop=self.config.stop or (), chat=True),
            "prompts_sha256": _sha256(digest(request.prompt) for request in self.requests),
            "questions_sha256": _sha256(f"{row.check.written}\0{row.max_tokens}" for row in self.problems),
        }


def _status(answer: str, finish_reason: str | None) -> Status:
    if finish_reason == "length":
        return Status.TRUNCATED
    return Status.OK if answer else Status.UNANSWERED


def _sha256(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
