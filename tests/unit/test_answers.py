"""Grading: tables of replies, the real gold answers, and equality with vLLM's own reading."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from answer_cases import CUTS, FORMS, REPORTED, WRITINGS, Case, vllm_reading
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.tasks.answers import How, extract, gold, grade, last_number, same

ALL_CASES = [
    pytest.param(case, id=f"{table}-{case.id}")
    for table, cases in {"reported": REPORTED, "cut": CUTS, "form": FORMS, "writing": WRITINGS}.items()
    for case in cases
]


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_reply_is_read_as_a_person_would(case: Case) -> None:
    """Every tabled reply gives its number, its form and its status, and nothing else."""
    found = extract(case.reply, case.finish)
    assert found.status == case.status
    assert same(found.value, case.value) if case.value is not None else found.value is None
    assert case.how in (None, found.how)


JUDGED = [
    pytest.param("#### 3", "#### -3", False, id="B05-sign-lost-by-reply"),
    pytest.param("#### -3", "#### 3", False, id="B05-sign-lost-by-gold"),
    pytest.param("#### -3", "#### -3", True, id="B05-sign-kept"),
    pytest.param("The total is -1,234.5", "#### -1,234.5", True, id="B05-sign-commas-decimals"),
    pytest.param("The answer is " + "9" * 7945, "18", False, id="B10-thousands-of-digits"),
    pytest.param("#### " + "9" * 7945, "9" * 7945, True, id="B10-thousands-of-digits-right"),
    pytest.param("#### " + "9" * 7945, "1" + "9" * 7944, False, id="B10-thousands-of-digits-off"),
    pytest.param("100", "10", False, id="B11-trailing-zero"),
    pytest.param("10", "100", False, id="B11-missing-zero"),
    pytest.param("150", "150.0", True, id="B11-decimal-gold"),
    pytest.param("9007199254740993", "9007199254740992", False, id="B11-beyond-floats"),
    pytest.param("0.1000000000000000055511151231257827", "0.1", False, id="B11-below-floats"),
    pytest.param("8.5", "9", False, id="B11-not-rounded"),
    pytest.param("8.999999999999999999", "9", False, id="B11-not-rounded-up"),
    pytest.param("the answer is 1/2", "0.5", True, id="B13-half"),
    pytest.param("the answer is 2 2/3", "2", False, id="B13-mixed-is-not-its-whole"),
    pytest.param("the answer is 2 2/3", "8/3", True, id="B13-mixed"),
    pytest.param("the answer is 1/2", "2", False, id="B13-not-the-denominator"),
    pytest.param("the answer is 1/2", "1", False, id="B13-not-the-numerator"),
    pytest.param("It is 1/0", "0", False, id="B13-no-value"),
    pytest.param("\\boxed{10,000}", "10,000", True, id="B04-commas-in-both"),
    pytest.param("The final value is 13.20%", "13.2", True, id="B14-percent-decimal"),
    pytest.param("So she saves 50%.", "50", True, id="B14-percent-stays-whole"),
    pytest.param("", "#### 105", False, id="B17-emptied-by-a-stop-string"),
    pytest.param(None, "#### 0", False, id="nothing-is-not-zero"),
]


@pytest.mark.parametrize(("reply", "gold_text", "right"), JUDGED)
def test_numbers_are_compared_exactly(reply: str | None, gold_text: str, right: bool) -> None:
    """A reply is right when its number is the gold one, and not when it is near it or looks like it."""
    assert grade(reply, "stop", gold_text).numeric_correct is right


GOLDS = [
    pytest.param(
        "80,000*1.5=<<80000*1.5=120000>>120,000\nSo he made a profit of "
        "200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70000",
        70000,
        id="B19-marks",
    ),
    pytest.param(
        "So the total cost was 1,350,000+100,000=$<<1350000+100000=1450000>>1,450,000\n#### 1,450,000",
        1450000,
        id="B19-commas",
    ),
    pytest.param("#### 1\n#### 2", 2, id="last-marker"),
    pytest.param("70,000", 70000, id="bare"),
    pytest.param("-3", -3, id="bare-negative"),
    pytest.param(" 150.0\n", 150, id="bare-decimal"),
    pytest.param("$18", 18, id="bare-currency"),
    pytest.param("-$18", -18, id="bare-negative-currency"),
    pytest.param("1/2", Fraction(1, 2), id="bare-fraction"),
    pytest.param("####-10", -10, id="glued"),
    pytest.param("5 + 6\n#### 11\r\n", 11, id="crlf"),
]


@pytest.mark.parametrize(("answer", "value"), GOLDS)
def test_gold_is_what_follows_its_marker(answer: str, value: int | Fraction) -> None:
    """A gold answer is the number after its last marker, or a number that stands alone."""
    assert same(gold(answer), Fraction(value))


NO_GOLD = [
    pytest.param("no marker here 5", "no #### marker", id="B19-no-marker"),
    pytest.param("", "no #### marker", id="empty"),
    pytest.param("18 dollars", "no #### marker", id="bare-with-words"),
    pytest.param("3 5", "no #### marker", id="bare-two-numbers"),
    pytest.param("5\n####", "after its last ####", id="nothing-after-marker"),
    pytest.param("#### five", "after its last ####", id="words-after-marker"),
    pytest.param("#### 5 or 6", "after its last ####", id="two-after-marker"),
    pytest.param("#### 1/0", "after its last ####", id="no-value"),
    pytest.param("#### 1e999999999", "after its last ####", id="beyond-bounds"),
]


@pytest.mark.parametrize(("answer", "fault"), NO_GOLD)
def test_a_gold_answer_without_a_number_is_an_error(answer: str, fault: str) -> None:
    """A label is never guessed; the message quotes the answer and says what to write."""
    with pytest.raises(ValueError, match=fault) as raised:
        gold(answer)
    assert repr(answer) in str(raised.value)
    assert "'#### <number>'" in str(raised.value)


LAST_RUNS = {
    "plain": ("so 18", 18),
    "commas": ("1,234,567", 1234567),
    "comma_list": ("1,2", 12),
    "sign_lost": ("#### -3", 3),
    "decimals_alone": ("$18.00", 0),
    "decimals_leading_zero": ("18.05", None),
    "half": ("8.5", 5),
    "leading_zero": ("08", None),
    "zero": ("0", 0),
    "zeros": ("00", 0),
    "many_zeros": ("0" * 5000, 0),
    "fraction": ("1/2", 2),
    "arabic": ("٣", None),
    "arabic_then_ascii": ("٣ 3", 3),
    "mixed_digits": ("1٣", None),
    "wide": ("３", None),
    "superscript": ("9 m²", 9),
    "longest": ("9" * 4300, 10**4300 - 1),
    "too_long": ("9" * 4301, None),
    "far_too_long": ("9" * 100_000, None),
    "long_behind_zeros": ("0" * 4301 + "1", None),
    "fell_back_to_none": ("18 and 08", None),
    "underscore": ("1_000", 0),
    "exponent": ("1e3", 3),
    "none": ("eighteen", None),
    "empty": ("", None),
}


@pytest.mark.parametrize(("text", "value"), LAST_RUNS.values(), ids=LAST_RUNS)
def test_last_number_reads_as_vllms_script(text: str, value: int | None) -> None:
    """The reading that published thresholds rest on is kept with its faults, sign and decimals lost."""
    assert last_number(text) == value == vllm_reading(text)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(st.text(alphabet="0123456789٣３²½,.-_ eEx\n", max_size=20))
def test_last_number_equals_vllms_reading_of_any_text(text: str) -> None:
    """No text tells the two apart."""
    assert last_number(text) == vllm_reading(text)


def test_no_text_has_no_last_number() -> None:
    """A reply without content is invalid, not a crash."""
    assert last_number(None) is None


def test_readings_do_not_hang_on_pythons_digit_limit() -> None:
    """PYTHONINTMAXSTRDIGITS in a job's environment changes no score."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert last_number("9" * 4300) == 10**4300 - 1
        assert last_number("9" * 4301) is None
        assert extract("#### " + "9" * 5000, "stop").value == Decimal("9" * 5000)
        assert grade("#### " + "9" * 5000, "stop", "#### 18").numeric_correct is False
    finally:
        sys.set_int_max_str_digits(limit)


def test_both_scorers_are_recorded() -> None:
    """A reply with the wrong sign shows as right by last-number and wrong by number, in one grade."""
    graded = grade("#### 10", "stop", "#### -10")
    assert (graded.numeric_correct, graded.last_number_correct, graded.last_number) == (False, True, 10)
    assert (graded.status, graded.extraction.matched) == ("ok", "10")


def test_an_invalid_last_number_equals_no_gold() -> None:
    """Two invalid readings are not a match."""
    assert grade("none", "stop", "08").last_number_correct is False


MATCHED = {
    "sign_and_currency": ("#### -$1,234.50 a day", "-$1,234.50"),
    "minus_of_another_script": ("#### \u2212٣", "\u2212٣"),
    "tex": ("\\boxed{2\\frac{2}{3}}", "2\\frac{2}{3}"),
    "no_value": ("the answer is 1/0", "1/0"),
    "result_of_a_sum": ("#### 5 + 3 = 8", "8"),
    "after_reasoning": ("<think>7</think>It is 18.", "18"),
}


@pytest.mark.parametrize(("reply", "matched"), MATCHED.values(), ids=MATCHED)
def test_what_was_read_is_kept_as_it_was_written(reply: str, matched: str) -> None:
    """The record shows a reader the very characters that were taken for the answer."""
    assert extract(reply, "stop").matched == matched


SPELLINGS = {
    "plain": "{}",
    "commas": "{:,}",
    "dollars": "${:,}",
    "bold": "**{:,}**",
    "units": "{:,} apples",
    "decimals": "{:,}.00",
    "tex": "$\\${:,}$",
    "percent": "{}%",
    "science": "{}e0",
    "over_one": "{}/1",
}
PLACES = {
    "hash": "16 - 3 = 13\n#### {}\nSo 7 are left.",
    "boxed": "so \\boxed{{{}}} of 7",
    "statement": "The answer is {} and not 7",
    "last": "16 - 3 = 13, so {}",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@settings(deadline=None, derandomize=True, max_examples=25)
@given(number=st.integers(-(10**12), 10**12))
def test_any_integer_is_read_back(place: str, spelling: str, number: int) -> None:
    """However and wherever an integer is written, it is read as itself."""
    assert same(extract(place.format(spelling.format(number)), "stop").value, Fraction(number))


Rows = dict[tuple[str, int], str]


@pytest.fixture(scope="module")
def golds(gsm8k_dir: Path) -> Rows:
    """The worked answers of all 8,792 rows by (split, index)."""
    return dict(_rows(gsm8k_dir))


def _rows(folder: Path) -> Iterator[tuple[tuple[str, int], str]]:
    for split in ("train", "test"):
        text = (folder / f"{split}.jsonl").read_bytes().decode()
        for index, line in enumerate(line for line in text.split("\n") if line):
            yield (split, index), json.loads(line)["answer"]


def test_every_real_gold_answer_is_right_as_a_reply(golds: Rows) -> None:
    """All 8,792 worked answers, handed in as replies, are right and read from their marker."""
    grades = {row: grade(answer, "stop", answer) for row, answer in golds.items()}
    assert len(grades) == 8792
    assert [row for row, g in grades.items() if not g.numeric_correct or g.extraction.how != How.HASH] == []


def test_last_number_misreads_the_negative_golds_and_no_other(golds: Rows) -> None:
    """Of all real golds, vLLM's reading gives another number for the five negative ones alone."""
    misread = {row for row, answer in golds.items() if last_number(answer) != gold(answer)}
    assert misread == {("train", 5715), ("train", 5844), ("train", 6189), ("test", 489), ("test", 1113)}


def test_no_real_gold_is_right_for_the_next_rows_question(golds: Rows) -> None:
    """Grading tells rows apart: a worked answer is right for another row only where both golds are one number."""
    answers = list(golds.values())
    for answer, other in pairwise(answers):
        assert grade(answer, "stop", other).numeric_correct is (gold(answer) == gold(other))


NEXT_QUESTIONS = [
    "\n\nQuestion: Tom has 5 pens and buys 4. How many has he?\nAnswer: 5 + 4 = 9 #### 999",
    "\nQ: Tom has 5 pens. How many?\nA: 5\n#### 999",
    "\n\n### Problem 2: Tom has 5 pens. How many?\n\\boxed{999}",
]


@pytest.mark.parametrize("addition", NEXT_QUESTIONS)
def test_a_made_up_next_question_changes_no_answer(golds: Rows, addition: str) -> None:
    """A model that goes on to ask and answer itself is graded by its first answer, on all 1,319 rows."""
    tests = {row: answer for row, answer in golds.items() if row[0] == "test"}
    assert len(tests) == 1319
    assert [r for r, a in tests.items() if not grade(a + addition, "length", a).numeric_correct] == []


PHRASINGS = {
    "boxed": "{work}\n\nThe final answer is $\\boxed{{{n}}}$.",
    "statement": "{work}\nThe answer is {n}. Note that 3 + 4 = 7.",
    "bold": "{work}\n\n**Answer: {n}**\n\nLet me know if you want 2 more ways.",
    "dollars": "{work}\n\nTherefore, the final answer is **${n}.00**, not 7.",
    "headings": "#### Step 1: work\n{work}\n#### Step 2: sum up\nSo it is {n}.",
    "answer_heading": "{work}\n#### Answer\n{n} (as 3 of 4)",
    "reasoning": "<think>{work} or 999?</think>\n{work}\n\n#### {n}",
}


@pytest.mark.parametrize("phrasing", PHRASINGS.values(), ids=PHRASINGS)
def test_real_answers_are_right_however_they_are_put(golds: Rows, phrasing: str) -> None:
    """The worked answers of all 1,319 rows, ended in the ways of chat models, stay right."""
    wrong = []
    for row, answer in golds.items():
        work, n = answer.rsplit("\n#### ", 1)
        if row[0] == "test" and not grade(phrasing.format(work=work, n=n), "stop", answer).numeric_correct:
            wrong.append(row)
    assert wrong == []


def test_recited_reasoning_changes_no_answer(golds: Rows) -> None:
    """A closed reasoning block full of other rows' answers is not read, whatever they are."""
    answers = [answer for row, answer in golds.items() if row[0] == "test"]
    for answer, other in pairwise(answers):
        assert grade(f"<think>{other}</think>\n{answer}", "stop", answer).numeric_correct
        assert grade(f"<think>{answer}", "length", answer).status == "truncated"
