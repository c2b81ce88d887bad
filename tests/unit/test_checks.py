"""Checks: what each forgives and what not, rows read strictly, and samples as other tasks keep them."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.backends.base import ChatMessage, Failure, Generation
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.jsonl import parse_record
from harness.tasks import checks
from harness.tasks.base import Sample, Status
from harness.tasks.build import build_task, check_own_data
from harness.tasks.instructions import CheckRow, Checks, read_checks

THINK = "<think>Lyon? 99? No.</think>\n\n"


def one_row(folder: Path, check: dict[str, Any], **keys: Any) -> CheckRow:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", "check": check, **keys}) + "\n")
    (row,) = read_checks(path)
    return row


PASSES: dict[str, tuple[dict[str, Any], str]] = {
    "number, alone": ({"number": 12}, "12"),
    "number in a sentence": ({"number": 1200}, "It costs **$1,200.00**."),
    "number after a slip": ({"number": 12}, "3 + 9 = 12\n#### 12"),
    "negative number": ({"number": -3}, "-3"),
    "decimal number": ({"number": 0.5}, "The answer is 1/2."),
    "number behind reasoning": ({"number": 12}, THINK + "12"),
    "exact": ({"exact": "Ab c."}, "Ab c."),
    "exact behind reasoning": ({"exact": "Paris"}, THINK + "Paris"),
    "exact with spaces at the ends": ({"exact": "Ab"}, "\n  Ab \n"),
    "exact over lines with other line ends": ({"exact": "a\nb"}, "a  \r\nb\r\n"),
    "exact in quotes": ({"exact": "Ab"}, '"Ab"'),
    "exact in curly quotes": ({"exact": "Ab"}, "“Ab”"),
    "exact in bold backticks": ({"exact": "Ab"}, "**`Ab`**"),
    "exact in a fence": ({"exact": "x = 1"}, "```python\nx = 1\n```"),
    "exact in a fence of tildes": ({"exact": "a\n\nb"}, "~~~\na\n\nb\n~~~"),
    "exact where quotes are wanted": ({"exact": '"Ab"'}, '"Ab"'),
    "exact where a fence is wanted": ({"exact": "```\nx\n```"}, "```\nx\n```"),
    "exact where stars are wanted": ({"exact": "*a* and *b*"}, "*a* and *b*"),
    "one_of, other case": ({"one_of": ["yes", "no"]}, "NO"),
    "one_of with a full stop": ({"one_of": ["Paris"]}, "paris."),
    "one_of, bold with a full stop outside": ({"one_of": ["Paris"]}, "**Paris**."),
    "one_of, bold with a full stop inside": ({"one_of": ["Paris"]}, "**Paris.**"),
    "one_of over spaces": ({"one_of": ["New York"]}, "New\n York!"),
    "one_of whose choice ends in a full stop": ({"one_of": ["U.S."]}, "u.s."),
    "contains all": ({"contains": ["red", "blue"]}, "Blue, then RED."),
    "contains over lines": ({"contains": ["New York"]}, "in new\nyork"),
    "contains in bold": ({"contains": ["Paris"]}, "It is **Paris**"),
    "contains what ends in a mark": ({"contains": ["def f("]}, "def f(x):"),
    "contains beside an underscore": ({"contains": ["add"]}, "add_numbers"),
    "contains no letter": ({"contains": ["東京"]}, "東京です"),
    "regex anywhere": ({"regex": "b+"}, "abbc"),
    "regex with its own flags": ({"regex": "(?im)^B$"}, "a\nb\nc"),
    "regex over the whole reply": ({"regex": r"^\d+$"}, " 42\n"),
    "json": ({"json": {"a": 1}}, '{"a": 1}'),
    "json with more keys": ({"json": {"a": {"b": [1, 2]}}}, '{"z": 0, "a": {"b": [1, 2], "c": null}}'),
    "json numbers by value": ({"json": [1, 0.5]}, "[1.0, 5e-1]"),
    "json in a fence among prose": ({"json": {"a": "x"}}, 'Here:\n```json\n{"a": "x"}\n```\nDone.'),
    "json after the form is restated": ({"json": {"a": "x"}}, 'As {"a": "..."}:\n{"a": "x"}'),
    "json after a bracket of prose": ({"json": {"a": True}}, '[note] {"a": true}'),
    "json of nothing": ({"json": {"a": None, "b": {}, "c": []}}, '{"a": null, "b": {"x": 1}, "c": []}'),
}

FAILS: dict[str, tuple[dict[str, Any], str]] = {
    "another number": ({"number": 12}, "120"),
    "a number only thought": ({"number": 99}, THINK + "none"),
    "no number": ({"number": 12}, "twelve"),
    "the other sign": ({"number": -3}, "3"),
    "exact in another case": ({"exact": "Ab"}, "AB"),
    "exact with a full stop": ({"exact": "Ab"}, "Ab."),
    "exact with another inner space": ({"exact": "a b"}, "a  b"),
    "exact with more": ({"exact": "Ab"}, "Sure: Ab"),
    "exact half in quotes": ({"exact": "Ab"}, '"Ab'),
    "exact only thought": ({"exact": "Ab"}, "<think>\nAb"),
    "exact beside a fence": ({"exact": "x"}, "```\nx\n```\nok"),
    "exact in one of two fences": ({"exact": "x"}, "```\nx\n```\n```\ny\n```"),
    "one_of, two": ({"one_of": ["yes", "no"]}, "yes or no"),
    "one_of in a sentence": ({"one_of": ["yes"]}, "I say yes"),
    "contains one of two": ({"contains": ["red", "blue"]}, "red"),
    "contains part of a word": ({"contains": ["cat"]}, "concatenate"),
    "contains part of a number": ({"contains": ["7"]}, "17"),
    "regex in another case": ({"regex": "B"}, "b"),
    "regex over lines": ({"regex": "a.b"}, "a\nb"),
    "regex on a very long reply": ({"regex": "a"}, "a" * 10_001),
    "json that is a text": ({"json": {"a": 1}}, '{"a": "1"}'),
    "json that is true": ({"json": {"a": 1}}, '{"a": true}'),
    "json that is another case": ({"json": {"a": "X"}}, '{"a": "x"}'),
    "json with a key missing": ({"json": {"a": 1, "b": 2}}, '{"a": 1}'),
    "json in another order": ({"json": [1, 2]}, "[2, 1]"),
    "json with more items": ({"json": [1, 2]}, "[1, 2, 3]"),
    "json deeper down": ({"json": [1, 2]}, '{"a": [1, 2]}'),
    "json not closed": ({"json": {"a": 1}}, '{"a": 1'),
    "json with Python's quotes": ({"json": {"a": 1}}, "{'a': 1}"),
    "json null for a key that is missing": ({"json": {"a": None}}, "{}"),
    "json that is not a number": ({"json": {"a": 1}}, '{"a": NaN}'),
}


@pytest.mark.parametrize(("check", "reply"), PASSES.values(), ids=PASSES)
def test_what_is_forgiven(tmp_path: Path, check: dict[str, Any], reply: str) -> None:
    """Forms in which models give a right answer pass."""
    assert one_row(tmp_path, check).check.passes(reply, "stop")


@pytest.mark.parametrize(("check", "reply"), FAILS.values(), ids=FAILS)
def test_what_is_not_forgiven(tmp_path: Path, check: dict[str, Any], reply: str) -> None:
    """What differs in more than form does not pass."""
    assert not one_row(tmp_path, check).check.passes(reply, "stop")


ANY_CHECK = st.sampled_from(
    [
        {"number": 12},
        {"exact": "a"},
        {"contains": ["a", "1"]},
        {"regex": "^a+$"},
        {"json": {"a": [1]}},
        {"one_of": ["a", "b"]},
    ]
)
PIECES = st.sampled_from(["{", "[", '"', "`", "```", "\n", "*", "a", "1", "e9", ":", ",", "<think>", "</think>", "]}"])


@settings(deadline=None)
@given(check=ANY_CHECK, reply=st.one_of(st.text(), st.lists(PIECES, max_size=60).map("".join)))
@example(check={"json": {}}, reply="[" * 20_000)
@example(check={"json": {}}, reply='{"a": 1e999999999999999999999}')
@example(check={"json": []}, reply="[" + "9" * 5_000 + "]")
@example(check={"exact": "a"}, reply="*" * 100_000)
@example(check={"one_of": ["a"]}, reply="`" * 100_000)
@example(check={"exact": "a"}, reply="```\n" + " " * 100_000 + "x")
@example(check={"exact": "a"}, reply="\n" * 100_000 + "x")
@example(check={"contains": ["aa"]}, reply="a" * 100_000)
def test_no_reply_breaks_a_check(check: dict[str, Any], reply: str) -> None:
    """Whatever a model writes is passed or not; nothing raises."""
    assert checks.read_check(_parsed(check)).passes(reply, "stop") in {True, False}


def _parsed(check: dict[str, Any]) -> Any:
    return parse_record(json.dumps({"check": check}))["check"]


def test_a_number_on_its_way_at_the_token_limit_does_not_pass() -> None:
    """12 may have been on its way to 128; after a marker it was the answer."""
    check = checks.read_check(_parsed({"number": 12}))
    assert not check.passes("So it is 12", "length")
    assert check.passes("#### 12\nAnd", "length")


HANGS = {
    "nested repeats": r"(a+)+$",
    "alternatives alike": r"^(a|a)*b",
    "many repeats in a row": r"a*a*a*a*a*a*b",
}


@pytest.mark.parametrize("pattern", HANGS.values(), ids=HANGS)
def test_a_pattern_that_takes_for_ever_does_not_pass(pattern: str) -> None:
    """A search is ended after a second of processor time, and timers and handlers are as they were."""
    before = signal.getsignal(signal.SIGVTALRM)
    began = time.thread_time()
    check = checks.read_check({"regex": pattern})
    assert not check.passes("a" * 2_000 + "!", "stop")
    assert time.thread_time() - began < 20 * checks.REGEX_SECONDS
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


FAULTS: dict[str, tuple[str, str]] = {
    "no object": ('["p"]', 'not a JSON object; write {"prompt": "…", "check": {"number": 42}}'),
    "no JSON": ('{"prompt": ', "not JSON at column 12"),
    "no prompt": ('{"check": {"number": 1}}', 'no "prompt"; a row needs "prompt" and "check"'),
    "no check": ('{"prompt": "p"}', 'no "check"; a row needs "prompt" and "check"'),
    "an empty prompt": ('{"prompt": " ", "check": {"number": 1}}', '"prompt" is empty'),
    "a number as prompt": ('{"prompt": 3, "check": {"number": 1}}', '"prompt" is a number; write it as a string'),
    "an unknown key": ('{"prompt": "p", "check": {"number": 1}, "max_token": 3}', "did you mean max_tokens?"),
    "a key twice": ('{"prompt": "p", "prompt": "q", "check": {"number": 1}}', "the key 'prompt' stands twice"),
    "an unknown check": (
        '{"prompt": "p", "check": {"contain": ["a"]}}',
        "unknown check 'contain'; did you mean contains?",
    ),
    "two checks": (
        '{"prompt": "p", "check": {"number": 1, "exact": "1"}}',
        "must be an object with one of number, exact",
    ),
    "no checks": ('{"prompt": "p", "check": {}}', "must be an object with one of number, exact"),
    "a check that is a text": ('{"prompt": "p", "check": "Paris"}', "must be an object with one of number, exact"),
    "a text as number": ('{"prompt": "p", "check": {"number": "12"}}', '"number" must be a JSON number'),
    "true as number": ('{"prompt": "p", "check": {"number": true}}', '"number" must be a JSON number'),
    "a number too long": ('{"prompt": "p", "check": {"number": 1e99999}}', "is out of range; write one"),
    "a number as exact": ('{"prompt": "p", "check": {"exact": 12}}', '"exact" is a number; write it as a string'),
    "an empty exact": ('{"prompt": "p", "check": {"exact": ""}}', '"exact" is empty'),
    "contains a text": ('{"prompt": "p", "check": {"contains": "a"}}', '"contains" must be an array of strings'),
    "contains nothing": ('{"prompt": "p", "check": {"contains": []}}', '"contains" must be an array of strings'),
    "contains an empty text": ('{"prompt": "p", "check": {"contains": ["a", ""]}}', '"contains" is empty'),
    "one_of with null": ('{"prompt": "p", "check": {"one_of": [null]}}', '"one_of" is null; write it as a string'),
    "a regex that is none": ('{"prompt": "p", "check": {"regex": "(a"}}', "is no pattern of Python's re: missing )"),
    "a regex read two ways": (
        '{"prompt": "p", "check": {"regex": "[[a]"}}',
        "is no pattern of Python's re: Possible nested",
    ),
    "a bare value as json": ('{"prompt": "p", "check": {"json": 5}}', '"json" must be an object or an array'),
    "half a token": ('{"prompt": "p", "check": {"number": 1}, "max_tokens": 0.5}', "whole number from 1"),
    "no token": ('{"prompt": "p", "check": {"number": 1}, "max_tokens": 0}', "whole number from 1"),
    "null tokens": ('{"prompt": "p", "check": {"number": 1}, "max_tokens": null}', "whole number from 1"),
    "an empty system": ('{"prompt": "p", "check": {"number": 1}, "system": ""}', '"system" is empty'),
}


@pytest.mark.parametrize(("line", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_a_row_names_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    """A row that could not be asked or checked as meant is refused before anything starts."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine", "check": {"exact": "x"}}\n\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_checks(path)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}:3: ")
    assert expected in fault


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    """Twenty faults are shown, the rest is counted; the same prompt twice is one."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "check": {"number": 1}}\n' * 2 + "{}\n" * 25)
    with pytest.raises(ConfigError) as caught:
        read_checks(path)
    assert len(caught.value.faults) == 21
    assert caught.value.faults[-1] == f"{path}: and 6 more faults"
    path.write_text('{"prompt": "p", "check": {"number": 1}}\n{"prompt": "p", "check": {"number": 2}}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: asks the question of line 1 again"):
        read_checks(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no rows"):
        read_checks(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checks(tmp_path / "none.jsonl")


def test_one_prompt_may_be_asked_under_two_systems(tmp_path: Path) -> None:
    """What differs in its system turn is another question."""
    row = {"prompt": "p", "check": {"number": 1}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**row, "system": system}) for system in "ab"))
    assert [row.system for row in read_checks(path)] == ["a", "b"]


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(model_name="m", accuracy_threshold=0.5, task="checks", **keys)


def task(folder: Path, check: dict[str, Any], **keys: Any) -> Checks:
    return Checks(name="t", config=config(), problems=(one_row(folder, check, **keys),))


def test_rows_are_asked_as_chat_with_the_configs_sampling(tmp_path: Path) -> None:
    """Whatever use_chat_completions says; a row's own max_tokens goes before the config's."""
    path = tmp_path / "own.jsonl"
    rows = [
        {"prompt": "p", "check": {"number": 1}},
        {"prompt": "q", "check": {"exact": "x"}, "system": "s", "max_tokens": 9},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    own = config(
        dataset="own.jsonl",
        max_tokens=77,
        temperature=0.3,
        seed=5,
        top_p=0.9,
        top_k=3,
        stop=["END"],
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    built = build_task(own, folder=tmp_path, data_dir=None)
    assert isinstance(built, Checks)
    first, second = built.requests
    assert built.name == "own"
    assert first.prompt == (ChatMessage(role="user", content="p"),)
    assert second.prompt == (ChatMessage(role="system", content="s"), ChatMessage(role="user", content="q"))
    assert [request.sampling.max_tokens for request in built.requests] == [77, 9]
    sampling = first.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_p, sampling.top_k) == (0.3, 5, 0.9, 3)
    assert sampling.stop == ("END",)
    assert (first.reasoning_effort, first.chat_template_kwargs) == ("low", {"enable_thinking": False})


def test_without_a_dataset_the_shipped_instructions_are_asked(tmp_path: Path) -> None:
    """`task: checks` alone asks 20; num_questions takes the first of them."""
    assert len(build_task(config(), folder=tmp_path, data_dir=None).requests) == 20
    assert len(build_task(config(num_questions=3), folder=tmp_path, data_dir=None).requests) == 3


def test_own_rows_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """The suite's early check reads them, with file and line."""
    (tmp_path / "own.jsonl").write_text('{"prompt": "p", "check": {"nummer": 1}}\n')
    with pytest.raises(ConfigError, match=r"own\.jsonl:1: unknown check 'nummer'; did you mean number\?"):
        check_own_data(config(dataset="own.jsonl"), folder=tmp_path)


NO_MEANING: dict[str, dict[str, Any]] = {
    "worked examples": {"dataset": "a.jsonl", "fewshot_dataset": "b.jsonl"},
    "turns of examples": {"fewshot_as_multiturn": True},
    "a prefix of answers": {"gen_prefix": "x"},
    "another reading": {"scorer": "last-number"},
}


@pytest.mark.parametrize("keys", NO_MEANING.values(), ids=NO_MEANING)
def test_keys_of_word_problems_are_refused(keys: dict[str, Any]) -> None:
    """A key that would be without effect is an error, not ignored."""
    with pytest.raises(ValueError, match="remove it there"):
        config(**keys)


def scored(folder: Path, text: str | None, finish_reason: str = "stop") -> Sample:
    reply = Generation(text=text, finish_reason=finish_reason, generated_tokens=5, prompt_tokens=9, latency=0.1)
    return task(folder, {"exact": "Ab"}).score(0, reply)


STATUSES = {
    "passed": ("Ab", "stop", Status.OK, True),
    "failed": ("no", "stop", Status.OK, False),
    "passed at the limit": ("Ab", "length", Status.OK, True),
    "failed at the limit": ("Ab and", "length", Status.TRUNCATED, False),
    "empty": ("", "stop", Status.UNANSWERED, False),
    "white space": (" \n", "stop", Status.UNANSWERED, False),
    "null": (None, "stop", Status.UNANSWERED, False),
    "null at the limit": (None, "length", Status.TRUNCATED, False),
    "reasoning alone": ("<think>Ab</think>", "stop", Status.UNANSWERED, False),
}


@pytest.mark.parametrize(("text", "finish_reason", "status", "correct"), STATUSES.values(), ids=STATUSES)
def test_statuses_are_those_of_word_problems(
    tmp_path: Path, text: str | None, finish_reason: str, status: Status, correct: bool
) -> None:
    """Truncated and unanswered replies are told apart from wrong ones."""
    sample = scored(tmp_path, text, finish_reason)
    assert (sample.status, sample.correct, sample.scores) == (status, correct, {"check": correct})
    assert sample.gold == '{"exact": "Ab"}'


def test_a_failure_is_an_error_with_no_score(tmp_path: Path) -> None:
    """A request without a response is never checked."""
    failure = Failure(kind="rejected", detail="HTTP 400: no", attempts=1, status=400)
    sample = task(tmp_path, {"exact": "Ab"}).score(0, failure)
    assert (sample.status, sample.correct, sample.scores) == (Status.ERROR, False, {})
    assert sample.error == {"kind": "rejected", "status": 400, "detail": "HTTP 400: no"}


def test_a_changed_check_changes_the_tasks_digest(tmp_path: Path) -> None:
    """Two runs over the same prompts with other checks are told apart."""
    one, other = (task(tmp_path, {"number": n}).describe() for n in (1, 2))
    assert one["prompts_sha256"] == other["prompts_sha256"]
    assert one["questions_sha256"] != other["questions_sha256"]
    assert (one["name"], one["questions"], one["scorer"]) == ("t", 1, "check")
