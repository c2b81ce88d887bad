"""JSON lines: a user's own questions, read strictly, and the rows of a file already known to be right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from harness.errors import ConfigError, Position
from harness.tasks.answers import gold

FAULTS_SHOWN = 20
QUESTION_LIKE = '{"question": "…", "answer": "…"}'
CHOICE_LIKE = '{"question": "…", "choices": ["…", "…"], "answer": "…"}'
TEXT_LIKE = '{"text": "…"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question with its worked answer or bare number."""

    question: str
    answer: str
    line_index: int
    """The row's line in its file, counted from 0, blank lines included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """One question with its choices."""

    question: str
    choices: tuple[str, ...]
    answer: int
    """Which choice is right, counted from 0."""
    line_index: int

    @property
    def gold(self) -> str:
        return self.choices[self.answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """One document."""

    text: str
    """As it stands in the file, white space at its ends included."""
    line_index: int


class Numbered(Protocol):
    """A row that knows its line."""

    @property
    def line_index(self) -> int: ...


AnyRow = TypeVar("AnyRow", bound=Numbered)


class JsonNumber(str):
    """A JSON number kept as it was written, told apart from a JSON string."""

    __slots__ = ()


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield every line that is not blank with its index; a byte order mark is dropped.

    Only a newline ends a line: U+2028, U+2029 and U+0085 may stand unescaped inside a JSON string.
    """
    for index, line in enumerate(text.removeprefix("\ufeff").split("\n")):
        if line.strip(" \t\r"):
            yield index, line


def parse_rows(content: bytes) -> tuple[Row, ...]:
    """Parse a file whose digest has been checked."""
    records = ((index, json.loads(line)) for index, line in lines(content.decode()))
    return tuple(Row(question=r["question"], answer=r["answer"], line_index=i) for i, r in records)


def read_jsonl(path: Path) -> tuple[Row, ...]:
    """Read a user's questions: JSON objects, one a line, with `question` and `answer`.

    An answer ends in `#### N`, or is a number alone, as a string or as a JSON number. Other keys are ignored.
    Raises ConfigError with one line per fault, each naming the file and its line.
    """
    return read_rows(path, _row, lambda row: row.question.strip(), like='{"question": "…", "answer": "#### 42"}')


def read_choices(path: Path) -> tuple[ChoiceRow, ...]:
    """Read questions with choices: JSON objects, one a line, with `question`, `choices` and `answer`.

    An answer is the text of a choice, or its place counted from 0 as a JSON number. Other keys are ignored.
    Raises ConfigError with one line per fault, each naming the file and its line.
    """
    return read_rows(path, _choice_row, lambda row: (row.question.strip(), frozenset(row.choices)), like=CHOICE_LIKE)


def read_texts(path: Path) -> tuple[TextRow, ...]:
    """Read documents: JSON objects, one a line, with `text`. Other keys are ignored.

    Raises ConfigError with one line per fault, each naming the file and its line.
    """
    return read_rows(path, _text_row, lambda row: row.text.strip(), like=TEXT_LIKE, repeats="holds the text")


def read_rows(
    path: Path,
    parse: Callable[[str, int], AnyRow],
    key: Callable[[AnyRow], Hashable],
    *,
    like: str,
    repeats: str = "asks the question",
) -> tuple[AnyRow, ...]:
    """Read rows with `parse`, which raises ValueError for a fault; no two may have the same `key`.

    Raises ConfigError with one line per fault, each naming the file and its line.
    """
    rows: list[AnyRow] = []
    faults: list[str] = []
    for index, line in lines(_text(path)):
        try:
            rows.append(parse(line, index))
        except ValueError as error:
            faults.append(f"{_position(path, index)}: {error}")
    faults += _repeated(path, rows, key, repeats)
    if not rows and not faults:
        raise ConfigError(f"{path}: holds no rows; write {like}, one a line")
    if len(faults) > FAULTS_SHOWN:
        faults[FAULTS_SHOWN:] = [f"{path}: and {len(faults) - FAULTS_SHOWN} more faults"]
    if faults:
        raise ConfigError(*faults)
    return tuple(rows)


def _position(path: Path, index: int) -> Position:
    return Position(path=path, line=index + 1)


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a file of JSON lines") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        where = _position(path, content.count(b"\n", 0, error.start))
        byte = content[error.start]
        raise ConfigError(f"{where}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from error


def _row(line: str, index: int) -> Row:
    record = parse_record(line)
    question = text_value(record, "question")
    if isinstance(question, JsonNumber):
        raise ValueError('"question" is a number; write it as a string')
    answer = str(text_value(record, "answer"))
    gold(answer)  # refuses, with the remedy, what could not be graded
    return Row(question=question, answer=answer, line_index=index)


def _choice_row(line: str, index: int) -> ChoiceRow:
    record = parse_record(line, like=CHOICE_LIKE)
    needs = '"question", "choices" and "answer"'
    question = text_value(record, "question", needs=needs)
    if isinstance(question, JsonNumber):
        raise ValueError('"question" is a number; write it as a string')
    for key in ("choices", "answer"):
        if key not in record:
            raise ValueError(f'no "{key}"; a row needs {needs}')
    choices = _choices(record["choices"])
    return ChoiceRow(question=question, choices=choices, answer=_place(record["answer"], choices), line_index=index)


def _choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f'"choices" is {json.dumps(value)[:60]}; write a list of two or more texts')
    for number, choice in enumerate(value):
        name = f"choices[{number}]"
        if isinstance(choice, JsonNumber):
            raise ValueError(f'"{name}" is a number; write it as a string')
        if text_value({name: choice}, name).strip() != choice:
            raise ValueError(f'"{name}" begins or ends with white space, which would be scored with it; remove it')
        if choice in value[:number]:
            raise ValueError(f'"{name}" is {json.dumps(choice)[:60]} once more; make the choices differ')
    return tuple(value)


def _place(answer: Any, choices: Sequence[str]) -> int:
    """Find the right choice; a number that is also a choice's text is refused, for it may mean either."""
    shown = json.dumps(answer)[:60]
    if not isinstance(answer, JsonNumber):
        if answer in choices:
            return choices.index(answer)
        raise ValueError(f'"answer" is {shown}, which is none of the choices; copy one of them')
    if answer in choices:
        raise ValueError(f'"answer" is the number {answer}, which is a choice\'s text too; write the text in quotes')
    if not re.fullmatch(r"[0-9]{1,9}", answer) or int(answer) >= len(choices):
        raise ValueError(f'"answer" is {answer}; the choices are numbered 0 to {len(choices) - 1}')
    return int(answer)


def _text_row(line: str, index: int) -> TextRow:
    text = text_value(parse_record(line, like=TEXT_LIKE), "text", needs='"text"')
    if isinstance(text, JsonNumber):
        raise ValueError('"text" is a number; write it as a string')
    return TextRow(text=text, line_index=index)


def parse_record(line: str, *, like: str = QUESTION_LIKE) -> dict[str, Any]:
    try:
        record = json.loads(
            line,
            object_pairs_hook=_unique_keys,
            parse_int=JsonNumber,
            parse_float=JsonNumber,
            parse_constant=refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at column {error.colno}: {error.msg}; write one whole object a line") from error
    except RecursionError as error:
        raise ValueError("nested too deeply; write one flat object a line") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object; write {like}")
    return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"the key {key!r} stands twice; keep one")
        record[key] = value
    return record


def refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; write a number or leave the key out")


def text_value(record: dict[str, Any], key: str, *, needs: str = '"question" and "answer"') -> str:
    if key not in record:
        there = ", ".join(repr(k) for k in record) or "none"
        raise ValueError(f'no "{key}" (keys here: {there}); a row needs {needs}')
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f'"{key}" is {json.dumps(value)[:60]}; write it as a string')
    if not value.strip():
        raise ValueError(f'"{key}" is empty; fill it in or delete the row')
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f'"{key}" holds half a surrogate pair, which is no character; write it out whole')
    return value


def _repeated(path: Path, rows: Sequence[AnyRow], key: Callable[[AnyRow], Hashable], repeats: str) -> list[str]:
    first: dict[Hashable, AnyRow] = {}
    faults = []
    for row in rows:
        earlier = first.setdefault(key(row), row)
        if earlier is not row:
            where = _position(path, row.line_index)
            faults.append(f"{where}: {repeats} of line {earlier.line_index + 1} again; delete one of the two")
    return faults
