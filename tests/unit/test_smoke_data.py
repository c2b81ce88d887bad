"""The shipped smoke set is well formed, its arithmetic is right, and no example gives an answer away."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "harness" / "tasks" / "data"
FILES = {"questions": DATA / "smoke.jsonl", "exemplars": DATA / "smoke_exemplars.jsonl"}
SIZES = {"questions": 20, "exemplars": 5}
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
OPERATIONS = {
    "+": Fraction.__add__,
    "-": Fraction.__sub__,
    "*": Fraction.__mul__,
    "/": Fraction.__truediv__,
}


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in FILES[name].read_text(encoding="utf-8").splitlines()]


ROWS = [pytest.param(row, id=f"{name}-{i}") for name in FILES for i, row in enumerate(rows(name))]


def equations(answer: str) -> list[tuple[str, str, str, str]]:
    return EQUATION.findall(answer)


@pytest.mark.parametrize("name", FILES)
def test_files_hold_the_promised_rows(name: str) -> None:
    """Each file is ASCII, escapes included, ends in a newline and holds the promised number of rows."""
    raw = FILES[name].read_bytes()
    assert raw.isascii()
    assert b"\\u" not in raw
    assert raw.endswith(b"}\n")
    assert b"\r" not in raw
    assert len(rows(name)) == SIZES[name]


def test_every_question_is_asked_once() -> None:
    """No question is repeated, and no exemplar is among the questions."""
    texts = [" ".join(row["question"].lower().split()) for name in FILES for row in rows(name)]
    assert len(set(texts)) == len(texts) == sum(SIZES.values())


def test_one_stuck_answer_is_right_at_most_once() -> None:
    """The twenty answers differ, and none is an exemplar's, so a server that repeats one reply scores nothing."""
    finals = [row["answer"].splitlines()[-1] for row in rows("questions")]
    copied = {row["answer"].splitlines()[-1] for row in rows("exemplars")}
    assert len(set(finals)) == len(finals)
    assert copied.isdisjoint(finals)


@pytest.mark.parametrize("row", ROWS)
def test_row_has_gsm8k_shape(row: dict[str, str]) -> None:
    """A row is a one-line question and one to three worked sentences above a last line `#### N`."""
    assert set(row) == {"question", "answer"}
    assert re.fullmatch(r"[A-Z][^\n]*\?", row["question"])
    worked, final = row["answer"].split("\n")
    assert re.fullmatch(r"#### -?\d+", final)
    assert re.fullmatch(r"([A-Z0-9][^.]*\.(?: |$)){1,3}", worked)


@pytest.mark.parametrize("row", ROWS)
def test_worked_arithmetic_is_right(row: dict[str, str]) -> None:
    """Every equation holds in exact arithmetic, and the last one yields the final answer."""
    worked, final = row["answer"].split("\n")
    steps = equations(worked)
    assert len(steps) == worked.count("=") > 0
    for left, operator, right, result in steps:
        assert OPERATIONS[operator](Fraction(left), Fraction(right)) == int(result)
    assert final == f"#### {steps[-1][3]}"


@pytest.mark.parametrize("row", ROWS)
def test_worked_numbers_come_from_the_question_or_an_earlier_step(row: dict[str, str]) -> None:
    """No operand falls from the sky: it is said in the question (half is 2, Four is 4) or computed before."""
    words = {"half": "2", "four": "4"}
    known = set(re.findall(r"\d+", row["question"]))
    known |= {digit for word, digit in words.items() if re.search(rf"\b{word}\b", row["question"].lower())}
    for left, _, right, result in equations(row["answer"]):
        assert {left, right} <= known
        known.add(result)


def test_every_operation_is_asked_and_shown() -> None:
    """Questions and exemplars each use all four operations, and some need two steps."""
    for name in FILES:
        steps = [equations(row["answer"]) for row in rows(name)]
        assert {operator for row in steps for _, operator, _, _ in row} == set(OPERATIONS)
        assert max(map(len, steps)) >= 2
