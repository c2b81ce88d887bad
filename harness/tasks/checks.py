"""Checks on replies: what each kind forgives, the rows that name them, and the task that asks such rows as chat.

Reasoning between tags and white space at the ends never count. Each check is pure and says what else it forgives.
"""

from __future__ import annotations

import difflib
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
from typing import Any

from harness.jsonl import JsonNumber, refuse_constant, text_value
from harness.tasks.answers import extract, gold, same, without_reasoning
from harness.tasks.numbers import Number

REGEX_CHARACTERS = 10_000
REGEX_SECONDS = 1.0
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
    return tidy(expected) in _layers(reply)


def passes_one_of(reply: str, expected: Sequence[str]) -> bool:
    """Compare the whole reply with each choice, forgiving what `exact` does, case, runs of spaces, a closing . or !"""
    layers = (*_layers(reply), *_layers(tidy(reply).rstrip(".!")))
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
    text = tidy(reply)
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


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip()


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _layers(reply: str) -> tuple[str, ...]:
    """The reply, then what is left as each wrapping around all of it is taken off."""
    layers = [tidy(reply)]
    while len(layers) <= LAYERS and (inner := _unwrapped(layers[-1])) is not None:
        layers.append(tidy(inner))
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


def read_text_value(value: Any, key: str = "exact") -> str:
    text = text_value({key: value}, key)
    if isinstance(text, JsonNumber):
        raise ValueError(f'"{key}" is a number; write it as a string')
    return text


def _read_texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'"{key}" must be an array of strings: {{"{key}": ["a", "b"]}}')
    return tuple(read_text_value(text, key) for text in value)


def _read_pattern(value: Any) -> re.Pattern[str]:
    text = read_text_value(value, "regex")
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
    "exact": read_text_value,
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
        raise ValueError(f"unknown check {kind!r}{nearest(kind, _READERS)}")
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


def nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
