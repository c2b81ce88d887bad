"""Nothing a model can print makes grading raise, contradict itself or take more than a millisecond a kilobyte."""

from __future__ import annotations

import os
import time

import pytest
from answer_cases import vllm_reading
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.tasks.answers import Grade, How, grade, same

EXAMPLES = os.environ.get("ACCURACY_GATE_FUZZ_EXAMPLES")

FRAGMENTS = [
    *("0", "1", "08", "12", "345", "000", "9007199254740993", "9" * 4301, ".5", "5.", "3.14", "1,234", "12,34"),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", ",", ".", ". ", ":", ";", "?", "!", "-", "+", "*", "/", "=", "^", "_"),
    *("####", "#### ", "\n#### ", "###", "#####", "#### Step 2: ", "#### 2. "),
    *("\\boxed{", "\\boxed {", "\\fbox{", "\\boxed", "{", "}", "\\{", "\\}", "\\boxed{\\boxed{", "}}"),
    *("answer", "answer is", "The answer is ", "The final answer is: ", "Answer: ", "answer = ", "<answer>"),
    *("answer to the ", "answer (in $) is ", "Final Answer\n", "is", " not ", " and ", " of ", "because", "Rs. "),
    *("Question:", "\nQuestion: ", "\nQ: ", "\nProblem 2:", "Questions Mark ", "\n**Question:**", "\n\nHuman: "),
    *("<think>", "</think>", "<thinking>", "</thinking>", "<reflection>", "</reflection>", "</reasoning>"),
    *("\u25c1think\u25b7", "\u25c1/think\u25b7", "[THINK]", "[/THINK]", "<THINK>", "<", ">", "</"),
    *("<<", ">>", "<<3+4=7>>", "<<3+4=", "<<=>>"),
    *("$", "\\$", "€", "₹", "USD ", "%", "\\%", "-$", "$-", "($", ")"),
    *("1/2", "1/0", "2 2/3", "2½", "½", "⅞", "\u2044", "\\frac{1}{2}", "\\dfrac{", "\\frac12", "\\frac{-1}{0}"),
    *("e", "e9", "1e999999999", "E+3", "×10^", "\\times 10^{", " x 10", "³", "⁻²", "²", "**", "`", "~"),
    *("\u2212", "\uff0d", "\u2013", "٣", "３", "𝟑", "٬", "٫", "，", "\u00a0", "\u202f", "\u2009", "\u200b", "'", "’"),
    *("{,}", "\\,", "\\!", "\\text{", "minus ", "negative ", "x", " apples ", "é", "\ud800", "\x00", "😀", "\u2028"),
]
PIECES = st.one_of(
    st.sampled_from(FRAGMENTS),
    st.sampled_from(FRAGMENTS),
    st.builds(
        lambda piece, times: (piece * times)[:9000], st.sampled_from(FRAGMENTS), st.sampled_from([2, 3, 40, 400])
    ),
    st.text(max_size=6),
)
REPLIES = st.lists(PIECES, max_size=16).map("".join)

# In CPU time, so that a busy machine does not count; three tries, so that one page fault does not either.
FLOOR_SECONDS = 0.005
SECONDS_PER_KILOBYTE = 0.001
TRIES = 3


def graded_in_time(text: str, finish_reason: str) -> Grade:
    limit = max(FLOOR_SECONDS, len(text) / 1024 * SECONDS_PER_KILOBYTE)
    for _ in range(TRIES):
        started = time.process_time()
        graded = grade(text, finish_reason, "#### 18")
        seconds = time.process_time() - started
        if seconds <= limit:
            return graded
    pytest.fail(f"{seconds * 1000:.1f} ms for {len(text)} characters: {text[:80]!r}")


def assert_consistent(graded: Grade, finish_reason: str) -> None:
    """A status says whether there is a value, a form whether there is a text, and "length" forbids guessing."""
    found = graded.extraction
    assert (found.status == "ok") is (found.value is not None)
    assert (found.matched is None) is (found.how is How.NONE)
    assert found.value is None or (found.matched and str(found.value) and same(found.value, found.value))
    assert found.status != ("unanswered" if finish_reason == "length" else "truncated")
    assert not (finish_reason == "length" and found.how is How.LAST_NUMBER)
    assert graded.numeric_correct is (found.value == 18)


@settings(
    max_examples=int(EXAMPLES or 500),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(text=REPLIES, finish_reason=st.sampled_from(["stop", "length"]))
def test_any_reply_is_graded_in_time(text: str, finish_reason: str) -> None:
    """Replies pieced together from every mark the grader knows are graded without fault, by both scorers."""
    graded = graded_in_time(text, finish_reason)
    assert_consistent(graded, finish_reason)
    assert graded.last_number == vllm_reading(text)


LONG = 100_000
REPEATED = [
    *FRAGMENTS,
    *("(", "[", "\\", "a", " a", "1,", "1/", "2 ", "1=", "1 = ", "1.", "1x", "1:", "-1", "1e", "1×10", "1×10^", "(1"),
    *("#### 1x ", "#### x=", "#### the ", "#### -", "####\n", "#### Step 2\n", "\\boxed{x^2", "\\boxed{\\frac{"),
    *("answer is answer ", "answer to ", "answer (", "answer: 1+", "answer is 1?", "answer is\n", "1 gallon x pint = "),
    *("<think></think>", "</think><think>", "<reflection><think>", "<think", "Question: 1\n", "<<1=", "<<1>>"),
    *("1 000", "1\u202f000", "1,000,", "1’", "１，", "2 1/2 ", "½ ", "1 / ", "1 and ", "* ", "\\text{1}", "| 1 "),
]
NESTS = [
    *(("\\boxed{", "}"), ("{", "}"), ("\\frac{", "}{2}"), ("(", ")"), ("<think>", "</think>"), ("<<", ">>")),
    *(("\\boxed{\\text{", "}}"), ("answer (", ")"), ("<analysis><think>", "</think></analysis>"), ("**", "**")),
]
WRAPPERS = {
    "alone": "{}",
    "hash": "1 #### {}",
    "statement": "The answer is {}",
    "boxed": "\\boxed{{{}}}",
    "before": "{}x^2}}}}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_long_repetition_is_graded_in_time(wrapper: str) -> None:
    """100 KB of any one mark, a loop that models do fall into, costs no more than its length."""
    for unit in REPEATED:
        text = wrapper.format((unit * (LONG // len(unit) + 1))[:LONG])
        assert_consistent(graded_in_time(text, "stop"), "stop")


@pytest.mark.parametrize(("opening", "closing"), NESTS)
def test_deep_nesting_is_graded_in_time(opening: str, closing: str) -> None:
    """100 KB of brackets within brackets, closed as they should be, costs no more than its length."""
    depth = LONG // len(opening + closing)
    for middle in ("x^2", "18"):
        text = opening * depth + middle + closing * depth
        assert_consistent(graded_in_time(text, "stop"), "stop")
