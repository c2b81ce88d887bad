"""The shipped instructions are well formed, their checks tell right from wrong, and no one reply passes two."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.tasks.instructions import CheckRow, read_checks

PATH = Path(__file__).resolve().parents[2] / "harness/tasks/data/instructions.jsonl"
ROWS = read_checks(PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What real models write to one prompt: all of `right` must pass and none of `wrong`."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]


LIST = "1. Red\n2. White\n3. Blue"
DOUBLE = "def double(x):\n    return x * 2"

REPLIES = {
    "capital of France": Replies(
        right=("Paris", "The capital of France is **Paris**."), wrong=("Lyon", "A Parisian would know.")
    ),
    "days are there in one week": Replies(right=("7", "There are 7 days in a week."), wrong=("5", "Seventy 70")),
    "ice hot or cold": Replies(right=("Cold", "cold.", "**Cold**", "Ice is cold."), wrong=("hot", "hot or cold")),
    "color is healthy grass": Replies(right=("Green.", "Healthy grass is green."), wrong=("brown", "blue or green")),
    "legs does a spider": Replies(right=("8", "A spider has 8 legs."), wrong=("6", "I do not know.")),
    "Repeat this sentence": Replies(
        right=("The blue boat sails at noon.", '"The blue boat sails at noon."\n'),
        wrong=("the blue boat sails at noon.", "The blue boat sails at noon", "The blue boat."),
    ),
    "Copy this code": Replies(right=("K7-942-QX", "`K7-942-QX`"), wrong=("K7-942-QY", "K7 942 QX", "k7-942-qx")),
    "river in capital": Replies(right=("RIVER", "**RIVER**"), wrong=("River", "RIVER RIVER")),
    "banana three times": Replies(
        right=("banana banana banana", "Banana, banana, banana."),
        wrong=("banana banana", "banana banana banana banana", "ban ana banana"),
    ),
    "Sort these numbers": Replies(right=("2, 5, 9", "2,5,9", "The answer: 2, 5, 9."), wrong=("9, 5, 2", "2, 5, 19")),
    "alphabetical order": Replies(
        right=("apple, fig, pear", "Apple\nFig\nPear"), wrong=("pear, apple, fig", "apple, pear, fig")
    ),
    "first in a year": Replies(right=("March", "March."), wrong=("October", "July", "March or July")),
    'key "name"': Replies(
        right=('{"name": "Ada", "age": 36}', '```json\n{\n  "age": 36,\n  "name": "Ada"\n}\n```'),
        wrong=('{"name": "Ada", "age": "36"}', '{"name": "Ada"}', "name: Ada, age: 36", "{'name': 'Ada', 'age': 36}"),
    ),
    "JSON array": Replies(right=("[4, 6, 10]", "```\n[4,6,10]\n```"), wrong=("[4, 10, 6]", "4, 6, 10", "[[4, 6, 10]]")),
    "capital of Italy": Replies(right=('{"capital": "Rome"}',), wrong=('{"capital": "..."}', "Rome", '["Rome"]')),
    "CSV": Replies(
        right=("city,year\nOslo,2020", '```csv\ncity, year\n"Oslo", 2020\n```'),
        wrong=("city,year,Oslo,2020", "city|year\nOslo|2020", "Oslo,2020\ncity,year"),
    ),
    "numbered list": Replies(
        right=(LIST, "1) red\n2) white\n3) blue", "1. **Red**\n\n2. **White**\n\n3. **Blue**"),
        wrong=("- red\n- white\n- blue", "1. red\n2. blue\n3. white", "red, white, blue"),
    ),
    "sum of the variables": Replies(right=("a + b", "```python\na+b\n```", "b + a"), wrong=("a - b", "sum", "a + bc")),
    "number of items in a list": Replies(right=("len", "`len()`", "The function is len()."), wrong=("length", "count")),
    "function named double": Replies(
        right=(
            DOUBLE,
            f"```python\n{DOUBLE}\n```",
            'def double(n: int) -> int:\n    """Twice."""\n    return 2*n',
            "def double(a):\n  return a + a",
        ),
        wrong=("def double(x):\n    return x", "def twice(x):\n    return x * 2", "def double(x):\n    return y * 2"),
    ),
}


def row(fragment: str) -> CheckRow:
    (found,) = (row for row in ROWS if fragment in row.prompt)
    return found


def test_the_file_holds_twenty_rows() -> None:
    """Each line is ASCII and strict; the prompts are short enough for a small context."""
    raw = PATH.read_bytes()
    assert raw.isascii()
    assert raw.endswith(b"}\n")
    assert b"\r" not in raw
    assert len(ROWS) == len(raw.splitlines()) == len(REPLIES) == 20
    assert all(len(row.prompt) < 200 for row in ROWS)


def test_every_kind_of_check_is_used() -> None:
    """A break in one way of checking shows in the shipped set."""
    assert {row.check.kind for row in ROWS} == {"number", "exact", "contains", "regex", "json", "one_of"}


def test_any_chat_template_takes_them_and_any_limit_holds() -> None:
    """No system turn, which some templates refuse, and no limit of a row's own, which a reasoning model would break."""
    assert {(row.system, row.max_tokens) for row in ROWS} == {(None, None)}


@pytest.mark.parametrize("fragment", REPLIES)
def test_right_replies_pass_and_wrong_ones_do_not(fragment: str) -> None:
    """A check takes the forms in which models give the right answer, and no near miss."""
    check, replies = row(fragment).check, REPLIES[fragment]
    assert [reply for reply in replies.right if not check.passes(reply, "stop")] == []
    assert [reply for reply in replies.wrong if check.passes(reply, "stop")] == []


@pytest.mark.parametrize("asked", ROWS, ids=lambda asked: asked.prompt[:40])
def test_a_parrot_passes_nothing(asked: CheckRow) -> None:
    """A server that sends the prompt back, once or twice, is no working one."""
    for reply in (asked.prompt, f"{asked.prompt}\n{asked.prompt}", json.dumps(asked.prompt)):
        assert not asked.check.passes(reply, "stop")


def test_one_stuck_reply_passes_one_check_at_most() -> None:
    """A server that repeats one reply scores 1 of 20."""
    for fragment, replies in REPLIES.items():
        for reply in replies.right:
            assert [other.prompt for other in ROWS if other.check.passes(reply, "stop")] == [row(fragment).prompt]
