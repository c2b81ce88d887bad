"""Grading a reply to a GSM8K question: which number it gives, how that was read, and whether it is right.

Two scorers, both pure and both recorded: `extract` reads a signed exact number from the form in which an answer
was given, `last_number` is the reading that published GSM8K thresholds for vLLM were calibrated with.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Literal

from harness.tasks import numbers
from harness.tasks.numbers import Figure, Number

GRADER_VERSION = 1
"""Goes up whenever a reply may be read otherwise than before: baselines are bound to it."""

Status = Literal["ok", "truncated", "unanswered"]


class How(StrEnum):
    """The form an answer was read from, in the order in which they are looked for."""

    HASH = "hash"
    BOXED = "boxed"
    STATEMENT = "statement"
    LAST_NUMBER = "last_number"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """What a reply answers: `status` is "ok" exactly where `value` is a number."""

    value: Number | None
    how: How
    status: Status
    matched: str | None
    """The text that was read; kept where it has no value too ("1/0"). None where nothing was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """One reply under both scorers; which of them gates is not decided here."""

    numeric_correct: bool
    last_number_correct: bool
    extraction: Extraction
    last_number: int | None

    @property
    def status(self) -> Status:
        return self.extraction.status


_TAG = re.compile(
    r"(?i:<\s?/?(?:[a-z]{1,16}:)?(?:think(?:ing)?|thoughts?|reasoning|analysis|reflection)\s?>)"
    r"|◁/?think▷|\[/?THINK\]"
)
_QUESTION = re.compile(
    r"^[ \t>*_#]{0,8}(?:question|problem|exercise|q|human|user|instruction)"
    r"[ \t]?(?:#?[0-9]{1,4})?[*_]{0,2}[ \t]?[:：]",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWERED = re.compile(r"[\d¼-¾⅐-⅞]")
_REPEATED_MARK = re.compile(r"<<[^<>\n]*>>(?=[-−]?[$€£]?\.?\d)")
_MARK = re.compile(r"<<(?:[^<>\n]*=)?([^<>=\n]*)>>")

_HASH = re.compile(r"(?<!#)####(?!#)")
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)[ \t]{0,2}\{)|\\[{}]|(?P<open>\{)|(?P<close>\})")
_STATEMENT = re.compile(
    r"""
    (?P<final>\bfinal[ \t])?+ (?<![\w/])ans(?:wers?)?\b [*_`"']{0,3}
    (?:
        [ \t](?:to|for|in|of)\b
        (?:[ \t](?!(?:is|are|was|will|would|should|must|equals|comes)\b)[^\s.:=?!,]{1,30}+){0,12}+
        | [ \t]?\([^()\n]{0,60}\)
    )?
    [*_`]{0,3}[ \t]{0,2}
    (?:
        (?P<verb>(?:(?:will|would|should|must|can[ \t]only)[ \t]be|is|are|was|equals|comes[ \t]to)\b)
        (?![ \t]+(?:not|found|obtained|calculated|computed|determined|unknown)\b)
        | [:=>]
        | (?(final)\n|(?!))
    )
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LEAD = re.compile(
    r"""
    (?:
        [\s$€£¥￥₹₩₽*_`"'“”#>:=~≈|(){}\[\]+\-]++
        | \\(?![cdt]?frac)(?:[A-Za-z]++|[^A-Za-z0-9])
        | [A-Za-z](?=\s?=)
        | (?:the|so|final|answers?|ans|result|total|is|are|equals|therefore|thus|hence|usd|eur|gbp|inr|rs\.?
            |about|approximately|exactly|only|negative|minus)(?![A-Za-z])
    )*+
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LIST_ITEM = re.compile(r"[1-9][.)][ \t]+[*_]{0,2}[A-Za-z]")
_FORMULA = re.compile(
    r"[ \t]?(?:[A-Za-z%]{1,12}[ \t])?(?:[-+/*×÷=]|x(?![A-Za-z])|\\(?:times|cdot|div))[\s$€£\\(]{0,4}[0-9]"
)
_SENTENCE_END = re.compile(r"(?<!\.)(?<!\bRs)(?<!\bapprox)[.!?]\s")


def extract(text: str | None, finish_reason: str | None) -> Extraction:
    """Read the number a reply answers with.

    Reasoning is dropped and the text cut where the model goes on to ask itself a new question. Then the last
    `####` counts, else the last `\\boxed{}`, else the last "answer is", else the last number. A form that no
    number follows is passed over for the one before it. A reply that ended at its token limit
    (`finish_reason` "length") is not searched for a last number: it had not come to its answer.
    """
    cut_off = finish_reason == "length"
    reply = _answer_part(text or "")
    for how, figure in _candidates(numbers.plain(reply), cut_off=cut_off):
        if figure is not None:
            status: Status = "ok" if figure.value is not None else _nothing(cut_off)
            return Extraction(value=figure.value, how=how, status=status, matched=reply[figure.start : figure.end])
    return Extraction(value=None, how=How.NONE, status=_nothing(cut_off), matched=None)


def gold(answer: str) -> Number:
    """Read a gold answer: what follows its last `####`, or a bare number.

    Raises ValueError where there is neither, since a guessed label would grade every model wrongly.
    """
    text = numbers.plain(answer)
    marker = text.rfind("####")
    value = numbers.entire(text, marker + 4 if marker >= 0 else 0)
    if value is None:
        fault = "no #### marker and is not a bare number" if marker < 0 else "no single number after its last ####"
        raise ValueError(f"gold answer {answer[-80:]!r} has {fault}: end it with '#### <number>'")
    return value


def same(a: Number | None, b: Number | None) -> bool:
    """Compare exactly: 5.0 is 5 and 1/2 is 0.5, 8.5 is not 9, and nothing is the same as no number."""
    return a is not None and b is not None and a == b


def last_number(text: str | None) -> int | None:
    """Read the last run of digits as vLLM's GSM8K script does: no sign, no decimals, commas removed first.

    That script evaluates the run as a Python literal; None stands for what it counts as invalid: no digits,
    leading zeros, digits that are not ASCII, more digits than Python converts by default.
    """
    runs = re.findall(r"\d+", (text or "").replace(",", ""))
    if not runs or not runs[-1].isascii():
        return None
    run = runs[-1]
    if run[0] == "0":
        return None if run.strip("0") else 0
    # int(str) would obey PYTHONINTMAXSTRDIGITS; Decimal reads the same number under any setting.
    return int(Decimal(run)) if len(run) <= sys.int_info.default_max_str_digits else None


def grade(text: str | None, finish_reason: str | None, gold_text: str) -> Grade:
    """Score one reply with both scorers; raises ValueError as `gold` does."""
    extraction = extract(text, finish_reason)
    digits = last_number(text)
    return Grade(
        numeric_correct=same(extraction.value, gold(gold_text)),
        last_number_correct=digits is not None and digits == last_number(gold_text),
        extraction=extraction,
        last_number=digits,
    )


def _nothing(cut_off: bool) -> Status:
    return "truncated" if cut_off else "unanswered"


def _candidates(text: str, *, cut_off: bool) -> Iterator[tuple[How, Figure | None]]:
    yield How.HASH, _last_of(_HASH, text, _after_hash)
    boxes = _boxes(text)
    if cut_off and boxes and boxes[-1].stop == len(text):
        text = text[: boxes.pop().start]  # "the answer is \boxed{1" may have been on its way to 18
    figures = (numbers.first(text, box.start, box.stop) for box in reversed(boxes))
    yield How.BOXED, next((figure for figure in figures if figure is not None), None)
    yield How.STATEMENT, _last_of(_STATEMENT, text, _stated)
    yield How.LAST_NUMBER, None if cut_off else numbers.last(text)


def _answer_part(text: str) -> str:
    """Keep what is answer: no reasoning, no question of the model's own, no calculator marks."""
    text = without_reasoning(text)
    answered = _ANSWERED.search(text)
    if answered is None:
        return ""
    # A heading before which no number stands is the reply restating its question, and cuts nothing.
    question = next((m for m in _QUESTION.finditer(text) if m.start() > answered.start()), None)
    text = text[: question.start()] if question else text
    return _MARK.sub(r"\1", _REPEATED_MARK.sub("", text)) if "<<" in text else text


def without_reasoning(text: str) -> str:
    """Drop closed reasoning, all text before a closing tag that nothing opened, and all where one stays open."""
    kept: list[str] = []
    opened: list[str] = []
    start = 0
    for tag in _TAG.finditer(text):
        name = "think" if "th" in tag[0].lower() else tag[0].strip("</> ").lower()
        if "/" not in tag[0]:
            if not opened:
                kept.append(text[start : tag.start()])
            if name not in opened:
                opened.append(name)
            continue
        start = tag.end()
        if name in opened:
            del opened[opened.index(name) :]
        else:
            kept, opened = [], []
    return "" if opened else " ".join([*kept, text[start:]])


def _last_of(
    marker: re.Pattern[str], text: str, read: Callable[[str, re.Match[str], int], Figure | None]
) -> Figure | None:
    """Read after the last marker that a number follows, each marker's field ending where the next begins."""
    end = len(text)
    for match in reversed(list(marker.finditer(text))):
        figure = read(text, match, end)
        if figure is not None:
            return figure
        end = match.start()
    return None


def _after_hash(text: str, marker: re.Match[str], end: int) -> Figure | None:
    """Read the number directly after a marker; "#### Step 2" and "#### 2. Sum up" are headings."""
    lead = _LEAD.match(text, marker.end(), end)
    start = lead.end() if lead else marker.end()
    return None if _LIST_ITEM.match(text, start, end) else numbers.opening(text, start, end)


def _stated(text: str, statement: re.Match[str], end: int) -> Figure | None:
    """Read the number in the sentence of an "answer is"; a bare "Answer:" must be followed by one at once.

    "Answer:" also opens a worked solution, so a calculation after it is not yet the answer.
    """
    lead = _LEAD.match(text, statement.end(), end)
    start = lead.end() if lead else statement.end()
    if not (statement["verb"] or statement["final"]):
        figure = numbers.opening(text, start, end)
        calculated = figure is not None and (figure.start > start or _FORMULA.match(text, figure.end, end))
        return None if calculated else figure
    line_end = _line_end(text, start, end)
    number = numbers.position(text, start, line_end)
    if number is None or _SENTENCE_END.search(text, start, number):
        return None
    return numbers.first(text, number, line_end)


def _boxes(text: str) -> list[slice]:
    """Find what the boxes hold, of a nest the outermost; one that is never closed ends with its line."""
    boxes: list[slice] = []
    opened: list[int | None] = []
    for brace in _BRACE.finditer(text):
        if brace["box"] or brace["open"]:
            opened.append(brace.end() if brace["box"] else None)
        elif brace["close"] and opened and (start := opened.pop()) is not None:
            # Nested boxes are dropped, so that no text is read twice.
            while boxes and boxes[-1].start > start:
                boxes.pop()
            boxes.append(slice(start, brace.start()))
    left_open = next((start for start in reversed(opened) if start is not None), None)
    if left_open is not None and (not boxes or left_open > boxes[-1].start):
        boxes.append(slice(left_open, _line_end(text, left_open, len(text))))
    return boxes


def _line_end(text: str, start: int, end: int) -> int:
    newline = text.find("\n", start, end)
    return end if newline < 0 else newline
