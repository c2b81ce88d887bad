"""Checks on replies: what each kind forgives, the rows that name them, and the task that asks such rows as chat.

Reasoning between tags and white space at the ends never count. Each check is pure and says what else it forgives.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Response, Sampling
from harness.config import ModelConfig
from harness.jsonl import JsonNumber, parse_record, read_rows, refuse_constant, text_value
from harness.tasks.answers import extract, gold, same, without_reasoning
from harness.tasks.base import Sample, Status
from harness.tasks.gsm8k import digest, failed_sample
from harness.tasks.numbers import Number

REGEX_CHARACTERS = 10_000
REGEX_SECONDS = 1.0
KEYS = ("prompt", "check", "system", "max_tokens")
WRAPPINGS = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`")),
    *(('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"), ("«", "»")),
)
LAYERS = 5
"""Wrappings taken off at most, so that a reply of nothing but asterisks costs no more than another."""

_WHOLE_FENCE = re.compile(r"(`{3,}|~{3,})[^\n`]*\n(.*?)\n?\1", re.DOTALL)
_OPENING = re.compile(r"[{\[]")


def passes_number(reply: str, expected: Number, finish_reason: str | None = None) -> bool:
    """Compare by value, exactly, the number that `harness.tasks.answers.extract` reads: "**$1,200.00**" is 1200."""
    return same(extract(reply, finish_reason).value, expected)


def passes_exact(reply: str, expected: str) -> bool:
    """Compare the whole reply; case, punctuation and inner spaces count.

    Forgiven: what is wrapped around all of it (a code fence, backticks, quotes, bold, italics), white space at line
    ends, and which line ends they are.
    """
    return _tidy(expected) in _layers(reply)


def passes_one_of(reply: str, expected: Sequence[str]) -> bool:
    """Compare the whole reply with each choice, forgiving what `exact` does, case, runs of spaces, a closing . or !"""
    layers = (*_layers(reply), *_layers(_tidy(reply).rstrip(".!")))
    choices = {_folded(choice).rstrip(".!") for choice in expected}
    return any(_folded(layer).rstrip(".!") in choices for layer in layers)


def passes_contains(reply: str, expected: Sequence[str]) -> bool:
    """Look for all of the texts; case and runs of white space do not count.

    A text that begins or ends with a letter or digit is not found inside a longer word or number: 7 is not in 17.
    """
    folded = _folded(reply)
    return all(_as_words(text).search(folded) for text in expected)


def passes_regex(reply: str, expected: re.Pattern[str]) -> bool:
    """Search the reply as it is; case and lines count as the pattern says, `(?i)` and `(?m)` included.

    Some patterns take for ever on some replies. So a reply of more than `REGEX_CHARACTERS` does not pass, nor does
    one on which the pattern was searched for `REGEX_SECONDS` of processor time.
    """
    text = _tidy(reply)
    if len(text) > REGEX_CHARACTERS:
        return False
    try:
        with _processor_limit(REGEX_SECONDS):
            return expected.search(text) is not None
    except _TooSlow:
        return False


def passes_json(reply: str, expected: Any) -> bool:
    """Compare each JSON object or array that stands in the reply, whatever is written around it; one match is enough.

    An object must hold the expected keys with matching values and may hold others; an array must match item by item.
    Texts match exactly and numbers by value: 1 is 1.0, and neither "1" nor true.
    """
    return any(json_matches(expected, found) for found in _json_values(reply))


def json_matches(expected: Any, found: Any) -> bool:
    """Compare two parsed values as `passes_json` says; numbers are Decimals."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(k in found and json_matches(v, found[k]) for k, v in expected.items())
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(map(json_matches, expected, found))
    return type(expected) is type(found) and bool(expected == found)


def answer_part(text: str | None) -> str:
    """Drop reasoning between tags and white space at the ends."""
    return without_reasoning(text or "").strip()


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip()


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _layers(reply: str) -> tuple[str, ...]:
    """The reply, then what is left as each wrapping around all of it is taken off."""
    layers = [_tidy(reply)]
    while len(layers) <= LAYERS and (inner := _unwrapped(layers[-1])) is not None:
        layers.append(_tidy(inner))
    return tuple(layers)


def _unwrapped(text: str) -> str | None:
    if text.startswith(("```", "~~~")):
        fence = _WHOLE_FENCE.fullmatch(text)
        return fence[2] if fence else None
    for opening, closing in WRAPPINGS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            return text[len(opening) : -len(closing)]
    return None


def _as_words(text: str) -> re.Pattern[str]:
    folded = _folded(text)
    before = "(?<![a-z0-9])" if re.match("[a-z0-9]", folded) else ""
    after = "(?![a-z0-9])" if re.search("[a-z0-9]$", folded) else ""
    return re.compile(before + re.escape(folded) + after)


class _TooSlow(Exception):
    """The processor time of a search is over."""


@contextmanager
def _processor_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in the block once this thread has computed so long; off the main thread nothing is limited.

    The timer counts processor time, which a busy machine does not shorten, and is not the one of pytest-timeout.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began, armed = time.thread_time(), True

    def look(*_: object) -> None:
        # The timer counts all threads of the process; only our own time is limited.
        nonlocal armed
        if armed and time.thread_time() - began >= seconds:
            armed = False
            raise _TooSlow

    earlier = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


def _json_values(reply: str) -> Iterator[Any]:
    """Yield the outermost objects and arrays; what does not parse is text."""
    decoder = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal, parse_constant=refuse_constant)
    start = 0
    while (opening := _OPENING.search(reply, start)) is not None:
        start = opening.end()
        try:
            value, start = decoder.raw_decode(reply, opening.start())
        except RecursionError:
            return  # so would each bracket inside it, at a millisecond each
        except (ValueError, ArithmeticError):
            continue
        yield value


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a row."""

    kind: str
    expected: Any
    written: str
    """As JSON, to be shown and to tell two graders apart."""

    def passes(self, reply: str, finish_reason: str | None) -> bool:
        if self.kind == "number":
            return passes_number(reply, self.expected, finish_reason)
        return _TESTS[self.kind](answer_part(reply), self.expected)


_TESTS: Mapping[str, Callable[[str, Any], bool]] = {
    "exact": passes_exact,
    "contains": passes_contains,
    "regex": passes_regex,
    "json": passes_json,
    "one_of": passes_one_of,
}


def _read_number(value: Any) -> Number:
    if not isinstance(value, JsonNumber):
        raise ValueError('"number" must be a JSON number: {"number": 12}')
    try:
        return gold(value)
    except ValueError as error:
        raise ValueError(f'"number" {value[:40]} is out of range; write one with a shorter exponent') from error


def _read_text(value: Any, key: str = "exact") -> str:
    text = text_value({key: value}, key)
    if isinstance(text, JsonNumber):
        raise ValueError(f'"{key}" is a number; write it as a string')
    return text


def _read_texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'"{key}" must be an array of strings: {{"{key}": ["a", "b"]}}')
    return tuple(_read_text(text, key) for text in value)


def _read_pattern(value: Any) -> re.Pattern[str]:
    text = _read_text(value, "regex")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(text)
    except (re.error, FutureWarning, DeprecationWarning, OverflowError, RecursionError) as error:
        raise ValueError(f'"regex" {text!r} is no pattern of Python\'s re: {error}') from error


def _read_json(value: Any) -> Any:
    if not isinstance(value, dict | list):
        raise ValueError('"json" must be an object or an array; for a number or a text use "number" or "exact"')
    return _with_decimals(value)


def _with_decimals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_decimals(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_decimals(item) for item in value]
    return Decimal(value) if isinstance(value, JsonNumber) else value


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "number": _read_number,
    "exact": _read_text,
    "contains": lambda value: _read_texts(value, "contains"),
    "regex": _read_pattern,
    "json": _read_json,
    "one_of": lambda value: _read_texts(value, "one_of"),
}


def read_check(value: Any) -> Check:
    """Read what stands under "check".

    Raises ValueError with the remedy.
    """
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f'"check" must be an object with one of {", ".join(_READERS)}: {{"number": 12}}')
    ((kind, expected),) = value.items()
    if kind not in _READERS:
        raise ValueError(f"unknown check {kind!r}{_nearest(kind, _READERS)}")
    return Check(kind=kind, expected=_READERS[kind](expected), written=_written(value))


def _written(value: Any) -> str:
    """Render as JSON, numbers as they were written."""
    if isinstance(value, JsonNumber):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


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
        raise ValueError(f"unknown key {key!r}{_nearest(key, KEYS)}")
    for key in KEYS[:2]:
        if key not in record:
            raise ValueError(f'no "{key}"; a row needs "prompt" and "check"')
    tokens = record.get("max_tokens")
    if "max_tokens" in record and not (isinstance(tokens, JsonNumber) and re.fullmatch(r"[1-9][0-9]{0,8}", tokens)):
        raise ValueError('"max_tokens" must be a whole number from 1')
    return CheckRow(
        prompt=_read_text(record["prompt"], "prompt"),
        check=read_check(record["check"]),
        system=_read_text(record["system"], "system") if "system" in record else None,
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
        sampling = Sampling(
            max_tokens=row.max_tokens or config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            stop=tuple(config.stop or ()),
        )
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
        answer = answer_part(response.text)
        passed = bool(answer) and row.check.passes(response.text or "", response.finish_reason)
        status = Status.OK if passed else _status(answer, response.finish_reason)
        return Sample(
            **common,
            status=status,
            correct=passed,
            scores={"check": passed},
            text=response.text,
            extracted=answer if status is Status.OK else None,
            found_by=row.check.kind if status is Status.OK else None,
            finish_reason=response.finish_reason,
            generated_tokens=response.generated_tokens,
            prompt_tokens=response.prompt_tokens,
            latency=response.latency,
            reasoning=response.reasoning,
        )

    def describe(self) -> dict[str, Any]:
        """What the run record keeps: enough to tell two runs apart."""
        return {
            "name": self.name,
            "questions": len(self.problems),
            "fewshot": 0,
            "scorer": "check",
            "stop": list(self.config.stop or ()),
            "prompts_sha256": _sha256(digest(request.prompt) for request in self.requests),
            "checks_sha256": _sha256(row.check.written for row in self.problems),
        }


def _status(answer: str, finish_reason: str | None) -> Status:
    if finish_reason == "length":
        return Status.TRUNCATED
    return Status.OK if answer else Status.UNANSWERED


def _sha256(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
