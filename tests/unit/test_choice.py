"""Choices are asked as continuations, compared by three scores, and read strictly from JSON lines."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t as student

from harness.backends.base import ContinuationScore, Failure, Generation, Loglikelihoods
from harness.errors import ConfigError
from harness.jsonl import ChoiceRow, read_choices
from harness.tasks.base import Status
from harness.tasks.choice import Choice, summary_of_choices
from harness.tasks.scores import ChoiceScore

DATA = Path(__file__).resolve().parents[2] / "harness" / "tasks" / "data"
QUESTIONS = read_choices(DATA / "choice.jsonl")
EXEMPLARS = read_choices(DATA / "choice_exemplars.jsonl")

ROWS = (
    ChoiceRow(question="Sky?", choices=("green", "blue as ever"), answer=1, line_index=0),
    ChoiceRow(question="Ice?", choices=("cold", "hot", "loud"), answer=0, line_index=1),
)
SHOT = (ChoiceRow(question="Sun?", choices=("hot", "cold"), answer=0, line_index=0),)


def task(**keys: Any) -> Choice:
    return Choice(**{"name": "t", "problems": ROWS, "exemplars": SHOT, **keys})


def likely(*scores: tuple[float, int, int], **keys: Any) -> Loglikelihoods:
    """Answer with (logprob, tokens, bytes) of each choice."""
    return Loglikelihoods(
        scores=tuple(ContinuationScore(logprob=p, tokens=t, bytes=b, greedy=False) for p, t, b in scores),
        latency=0.25,
        **keys,
    )


def test_choices_continue_a_few_shot_prompt() -> None:
    """The prompt has the word problems' format, and each choice follows it after one space."""
    first = task(pairwise=True, move_spaces=False).requests[0]
    assert first.context == "Question: Sun?\nAnswer: hot\n\nQuestion: Sky?\nAnswer:"
    assert first.continuations == (" green", " blue as ever")
    assert (first.pairwise, first.move_spaces) == (True, False)
    assert (task().requests[1].pairwise, task().requests[1].move_spaces) == (False, True)


def test_a_worked_example_is_never_asked() -> None:
    """A question whose answer stands in the prompt is refused."""
    with pytest.raises(ConfigError, match="both worked example and question: 'Sky\\?'"):
        task(exemplars=ROWS[:1])


DISAGREEING = likely((-4.0, 2, 6), (-6.0, 3, 13))
"""The long right choice: behind by the sum, a tie by tokens, ahead by bytes."""


@pytest.mark.parametrize(
    ("score", "right", "margin", "text"),
    [
        (ChoiceScore.SUM, False, -2.0, "green"),
        (ChoiceScore.PER_TOKEN, False, 0.0, "green"),
        (ChoiceScore.PER_BYTE, True, 4 / 6 - 6 / 13, "blue as ever"),
    ],
)
def test_the_score_that_gates_is_the_configs(score: ChoiceScore, right: bool, margin: float, text: str) -> None:
    """All three scores are recorded; the one chosen says what is right, what was chosen and by how much."""
    sample = task(choice_score=score).score(0, DISAGREEING)
    assert (sample.status, sample.correct, sample.text, sample.extracted) == (Status.OK, right, text, text)
    assert sample.scores == {"sum": False, "per_token": False, "per_byte": True}
    assert sample.value == pytest.approx(margin, abs=1e-15)
    assert sample.found_by == score.value
    assert sample.measures is not None
    assert sample.measures["tie"] is (score is ChoiceScore.PER_TOKEN)


def test_bytes_gate_by_default() -> None:
    """No tokenizer changes what a byte is, so that models compare."""
    assert task().score(0, DISAGREEING).correct


def test_a_tie_with_one_of_several_is_not_right() -> None:
    """The right choice must be better than every other, and what is shown as chosen is the other."""
    sample = task(choice_score=ChoiceScore.SUM).score(1, likely((-1.0, 1, 5), (-9.0, 1, 4), (-1.0, 1, 5)))
    assert (sample.correct, sample.value, sample.text) == (False, 0.0, "loud")


def test_a_sample_holds_what_it_takes_to_score_it_again() -> None:
    """Every choice's figures, what was cut and what was done instead of a clean split, all of it JSON."""
    answer = likely((-2.0, 2, 6), (-6.0, 3, 12), context_tokens_cut=7, fallbacks=("joined",), attempts=2)
    sample = task().score(0, answer)
    kept = json.loads(json.dumps(asdict(sample), allow_nan=False))
    assert kept["measures"] == {
        "choices": ["green", "blue as ever"],
        "gold": 1,
        "sum": [-2.0, -6.0],
        "per_token": [-1.0, -2.0],
        "per_byte": [-2 / 6, -0.5],
        "margins": {"sum": -4.0, "per_token": -1.0, "per_byte": -0.5 + 2 / 6},
        "tokens": [2, 3],
        "bytes": [6, 12],
        "greedy": [False, False],
        "tie": False,
        "fallbacks": ["joined"],
    }
    assert (kept["prompt_tokens_cut"], kept["attempts"], kept["latency"], kept["gold"]) == (7, 2, 0.25, "blue as ever")


def test_a_failure_is_an_error_without_a_score() -> None:
    """A request without a response is neither right nor wrong, and there is nothing to pair."""
    sample = task().score(0, Failure(kind="invalid_response", detail="NaN at token 3", attempts=1))
    assert (sample.status, sample.correct, sample.scores, sample.value) == (Status.ERROR, False, {}, None)
    assert sample.error == {"kind": "invalid_response", "status": None, "detail": "NaN at token 3"}


def test_an_answer_to_something_else_is_a_fault_of_the_backend() -> None:
    """A generation, or scores of other choices, are never graded."""
    written = Generation(text="blue", finish_reason="stop", generated_tokens=1, prompt_tokens=1, latency=0.1)
    with pytest.raises(TypeError, match="answered with Generation, Loglikelihoods was asked for"):
        task().score(0, written)
    with pytest.raises(ValueError, match="question 0: 1 scores for 2 choices"):
        task().score(0, likely((-1.0, 1, 5)))


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "another score": ({"choice_score": ChoiceScore.SUM}, {"scorer"}),
    "pairwise": ({"pairwise": True}, {"sampling"}),
    "spaces stay": ({"move_spaces": False}, {"sampling"}),
    "no example": ({"exemplars": ()}, {"fewshot", "fewshot_prefix", "prompts_sha256"}),
    "another right choice": (
        {"problems": (ChoiceRow(question="Sky?", choices=("green", "blue as ever"), answer=0, line_index=0), ROWS[1])},
        {"questions_sha256"},
    ),
    "another wrong choice": (
        {"problems": (ROWS[0], ChoiceRow(question="Ice?", choices=("cold", "hot", "sad"), answer=0, line_index=1))},
        {"questions_sha256", "prompts_sha256"},
    ),
}


@pytest.mark.parametrize(("keys", "different"), CHANGES.values(), ids=CHANGES)
def test_a_baseline_is_bound_to_what_was_asked(keys: dict[str, Any], different: set[str]) -> None:
    """Whatever changes the answers changes the description, and nothing else of it."""
    one, other = task().describe(), task(**keys).describe()
    assert {key for key in one if one[key] != other[key]} == different


def test_the_summary_gives_margin_interval_and_ties() -> None:
    """The mean margin has a t interval, as scipy computes it; ties are counted and are not right."""
    built = task(choice_score=ChoiceScore.SUM)
    answers = [
        likely((-4.0, 2, 6), (-1.0, 3, 12)),
        likely((-4.0, 2, 6), (-4.0, 3, 12)),
        likely((-1.0, 2, 6), (-5.0, 3, 12)),
    ]
    samples = [built.score(0, answer) for answer in answers]
    summary = summary_of_choices((sample.measures for sample in samples if sample.measures), ChoiceScore.SUM)
    margins = [3.0, 0.0, -4.0]
    mean = sum(margins) / 3
    error = math.sqrt(sum((m - mean) ** 2 for m in margins) / 2 / 3)
    low, high = student.interval(0.95, 2, loc=mean, scale=error)
    assert (summary.questions, summary.ties) == (3, 1)
    assert (summary.mean_margin, summary.low, summary.high) == pytest.approx((mean, low, high), rel=1e-9)
    assert summary.right == {"sum": 1, "per_token": 2, "per_byte": 2}


def test_a_summary_of_nothing_is_refused() -> None:
    """Where nothing was scored there is no figure."""
    with pytest.raises(ValueError, match="no question was scored"):
        summary_of_choices([], ChoiceScore.SUM)


GOOD = '{"question": "Sky?", "choices": ["green", "blue"], "answer": "blue", "id": 7}'


@pytest.mark.parametrize("answer", ['"blue"', "1"])
def test_an_answer_is_a_choice_or_its_place(tmp_path: Path, answer: str) -> None:
    """A text names the choice itself, a number its place counted from 0; other keys are ignored."""
    path = tmp_path / "q.jsonl"
    path.write_text("\n" + GOOD.replace('"blue", "id"', f'{answer}, "id"') + "\n")
    assert read_choices(path) == (ChoiceRow(question="Sky?", choices=("green", "blue"), answer=1, line_index=1),)


FAULTS = {
    "no JSON": ("Sky? blue", "not JSON at column 1"),
    "a list": ("[1]", 'not a JSON object; write {"question": "…", "choices": ["…", "…"], "answer": "…"}'),
    "no question": ('{"choices": ["a", "b"], "answer": 0}', "no \"question\" (keys here: 'choices', 'answer'); a row"),
    "a number asked": ('{"question": 3, "choices": ["a", "b"], "answer": 0}', '"question" is a number'),
    "no choices": ('{"question": "Q", "answer": 0}', 'no "choices"; a row needs "question", "choices" and "answer"'),
    "no answer": ('{"question": "Q", "choices": ["a", "b"]}', 'no "answer"; a row needs'),
    "one choice": ('{"question": "Q", "choices": ["a"], "answer": 0}', '"choices" is ["a"]; write a list of two'),
    "choices as text": ('{"question": "Q", "choices": "ab", "answer": 0}', '"choices" is "ab"; write a list of two'),
    "an empty choice": ('{"question": "Q", "choices": ["a", ""], "answer": 0}', '"choices[1]" is empty'),
    "a blank choice": ('{"question": "Q", "choices": ["a", " "], "answer": 0}', '"choices[1]" is empty'),
    "a space before": ('{"question": "Q", "choices": ["a", " b"], "answer": 0}', '"choices[1]" begins or ends with'),
    "a number to choose": ('{"question": "Q", "choices": ["a", 2], "answer": 0}', '"choices[1]" is a number; write it'),
    "null to choose": ('{"question": "Q", "choices": ["a", null], "answer": 0}', '"choices[1]" is null; write it as'),
    "one choice twice": ('{"question": "Q", "choices": ["a", "b", "a"], "answer": 0}', '"choices[2]" is "a" once more'),
    "an answer that is none": (
        '{"question": "Q", "choices": ["a", "b"], "answer": "c"}',
        '"answer" is "c", which is none',
    ),
    "an answer as a list": (
        '{"question": "Q", "choices": ["a", "b"], "answer": ["a"]}',
        '"answer" is ["a"], which is none',
    ),
    "a truth": ('{"question": "Q", "choices": ["a", "b"], "answer": true}', '"answer" is true, which is none'),
    "a place too far": ('{"question": "Q", "choices": ["a", "b"], "answer": 2}', "the choices are numbered 0 to 1"),
    "a place below": ('{"question": "Q", "choices": ["a", "b"], "answer": -1}', "the choices are numbered 0 to 1"),
    "half a place": ('{"question": "Q", "choices": ["a", "b"], "answer": 0.5}', "the choices are numbered 0 to 1"),
    "a place or a text": (
        '{"question": "Q", "choices": ["1", "0"], "answer": 0}',
        "the number 0, which is a choice's text",
    ),
    "asked twice": (f"{GOOD}", "asks the question of line 1 again"),
    "choices in another order": (
        GOOD.replace('"green", "blue"', '"blue", "green"'),
        "asks the question of line 1 again",
    ),
}


@pytest.mark.parametrize(("line", "message"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_row_is_named_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    """Every fault says where it is and what to write."""
    path = tmp_path / "q.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_choices(path)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}:3: ")
    assert message in fault


def test_one_question_may_be_asked_of_other_choices(tmp_path: Path) -> None:
    """ "Which sentence is correct?" is many questions."""
    path = tmp_path / "q.jsonl"
    path.write_text(f"{GOOD}\n{GOOD.replace('green', 'red')}\n")
    assert [row.choices for row in read_choices(path)] == [("green", "blue"), ("red", "blue")]


def test_an_empty_file_says_what_to_write(tmp_path: Path) -> None:
    """A set of no questions is a mistake."""
    path = tmp_path / "q.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r'holds no rows; write \{"question": "…", "choices"'):
        read_choices(path)


def test_the_shipped_set_is_as_promised() -> None:
    """40 questions of 4 choices and 5 examples, ASCII, one row a line; no question is asked twice or shown before."""
    for name, rows in (("choice", QUESTIONS), ("choice_exemplars", EXEMPLARS)):
        raw = (DATA / f"{name}.jsonl").read_bytes()
        assert raw.isascii()
        assert raw.endswith(b"}\n")
        assert len(raw.splitlines()) == len(rows)
    assert (len(QUESTIONS), len(EXEMPLARS)) == (40, 5)
    assert {len(row.choices) for row in (*QUESTIONS, *EXEMPLARS)} == {4}
    assert len({row.question.lower() for row in (*QUESTIONS, *EXEMPLARS)}) == 45


def test_no_place_and_no_length_gives_the_answer_away() -> None:
    """Each place is right ten times; the longest choice, and the shortest, is right less than a third of the time."""
    assert Counter(row.answer for row in QUESTIONS) == dict.fromkeys(range(4), 10)
    lengths = [([len(choice.encode()) for choice in row.choices], len(row.gold.encode())) for row in QUESTIONS]
    assert sum(gold == max(all_of) for all_of, gold in lengths) < 40 / 3
    assert sum(gold == min(all_of) for all_of, gold in lengths) < 40 / 3
    assert all(max(all_of) > min(all_of) for all_of, _ in lengths)


def test_the_shipped_set_makes_a_task() -> None:
    """Each answer of a model that holds the right choice likeliest is right, by every score."""
    built = Choice(name="choice", problems=QUESTIONS, exemplars=EXEMPLARS)
    for index, row in enumerate(QUESTIONS):
        answer = likely(*((-1.0 if i == row.answer else -99.0, 3, 9) for i in range(4)))
        assert built.score(index, answer).scores == {"sum": True, "per_token": True, "per_byte": True}
