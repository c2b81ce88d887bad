"""Documents are scored whole; their figures are what the formulas say, and they are read strictly."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import Failure, Generation, RollingLoglikelihood
from harness.errors import ConfigError
from harness.gates.threshold import Verdict
from harness.jsonl import TextRow, read_texts
from harness.tasks.base import Status
from harness.tasks.perplexity import Perplexity, Summary, judge_bits_per_byte, summary_of

PATH = Path(__file__).resolve().parents[2] / "harness" / "tasks" / "data" / "documents.jsonl"
DOCUMENTS = read_texts(PATH)
ROWS = (
    TextRow(text="Ein Bär\n isst Brot.", line_index=0),
    TextRow(text="One two three four five six seven.", line_index=1),
)


def task(**keys: Any) -> Perplexity:
    return Perplexity(**{"name": "t", "problems": ROWS, **keys})


def rolled(logprob: float, tokens: int, length: int) -> RollingLoglikelihood:
    return RollingLoglikelihood(logprob=logprob, tokens=tokens, bytes=length, windows=2, latency=0.5, attempts=3)


def test_a_document_is_asked_as_it_stands() -> None:
    """Text, window and context go to the backend unchanged."""
    (first, _) = task(context=16, max_window=128).requests
    assert (first.text, first.context, first.max_window) == ("Ein Bär\n isst Brot.", 16, 128)
    assert (task().requests[1].context, task().requests[1].max_window) == (1, None)


def test_a_document_has_bits_per_byte_and_no_right_or_wrong() -> None:
    """Two bits a byte is a probability of 1/4 a byte; all that it was made from is kept, as JSON."""
    sample = task().score(0, rolled(-20 * math.log(4), 6, 20))
    assert (sample.status, sample.correct, sample.scores, sample.gold) == (Status.OK, False, {}, "")
    assert sample.value == pytest.approx(2.0, rel=1e-15)
    kept = json.loads(json.dumps(asdict(sample), allow_nan=False))
    assert kept["measures"] == {"nll": 20 * math.log(4), "tokens": 6, "bytes": 20, "words": 4, "windows": 2}
    assert (kept["question"], kept["attempts"], kept["latency"]) == ("Ein Bär\n isst Brot.", 3, 0.5)


@pytest.mark.parametrize("kind", ["invalid_response", "connection"])
def test_a_failure_names_its_document(kind: Any) -> None:
    """A value that is no number is an error of that document, told by its number and its first words."""
    sample = task().score(1, Failure(kind=kind, detail="token 3 is NaN", attempts=1))
    assert (sample.status, sample.value, sample.measures) == (Status.ERROR, None, None)
    assert sample.error is not None
    assert sample.error["detail"] == "document 1 ('One two three four five six…'): token 3 is NaN"
    short = task().score(0, Failure(kind=kind, detail="x", attempts=1))
    assert short.error is not None
    assert short.error["detail"] == "document 0 ('Ein Bär isst Brot.'): x"


def test_one_rejection_of_every_document_stays_one() -> None:
    """A server that rejects all alike is recognised by the equal reasons."""
    failure = Failure(kind="rejected", detail="HTTP 400: no prompt_logprobs", attempts=1, status=400)
    errors = [task().score(index, failure).error for index in range(2)]
    assert errors[0] == errors[1] == {"kind": "rejected", "status": 400, "detail": "HTTP 400: no prompt_logprobs"}


def test_a_text_is_no_score() -> None:
    """A backend that writes where it should score breaks the contract."""
    written = Generation(text="x", finish_reason="stop", generated_tokens=1, prompt_tokens=1, latency=0.1)
    with pytest.raises(TypeError, match="answered with Generation, RollingLoglikelihood was asked for"):
        task().score(0, written)


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "more context": ({"context": 2}, {"sampling"}),
    "shorter windows": ({"max_window": 64}, {"sampling"}),
    "another order": ({"problems": ROWS[::-1]}, {"prompts_sha256", "questions_sha256"}),
}


@pytest.mark.parametrize(("keys", "different"), CHANGES.values(), ids=CHANGES)
def test_a_baseline_is_bound_to_what_was_asked(keys: dict[str, Any], different: set[str]) -> None:
    """Whatever changes the figures changes the description, and nothing else of it."""
    one, other = task().describe(), task(**keys).describe()
    assert {key for key in one if one[key] != other[key]} == different


def measures(nll: float, tokens: int, length: int, words: int) -> dict[str, Any]:
    return {"nll": nll, "tokens": tokens, "bytes": length, "words": words, "windows": 1}


def test_totals_are_divided_by_totals() -> None:
    """A long document counts as its length: 30 nats over 10 tokens, 40 bytes and 6 words, by hand."""
    summary = summary_of([measures(10.0, 2, 10, 1), measures(20.0, 8, 30, 5)])
    assert summary == Summary(
        bits_per_byte=pytest.approx(30 / math.log(2) / 40, rel=1e-15),
        token_perplexity=pytest.approx(math.exp(3), rel=1e-15),
        word_perplexity=pytest.approx(math.exp(5), rel=1e-15),
        nll=30.0,
        tokens=10,
        bytes=40,
        words=6,
        documents=2,
    )


def test_a_model_that_foresees_nothing_still_has_bits_per_byte() -> None:
    """A perplexity beyond what a float holds is left out rather than written as infinity, which is no JSON."""
    summary = summary_of([measures(8000.0, 10, 40, 8)])
    assert (summary.token_perplexity, summary.word_perplexity) == (None, None)
    assert "beyond all figures" in judge_bits_per_byte(summary, 1.0).message
    json.dumps(asdict(summary), allow_nan=False)


def test_a_summary_of_nothing_is_refused() -> None:
    """Where no document was scored there is no figure."""
    with pytest.raises(ValueError, match="no document was scored"):
        summary_of([])


@pytest.mark.parametrize(("maximum", "verdict"), [(1.0, Verdict.PASS), (0.999, Verdict.REGRESSION)])
def test_the_maximum_may_be_reached_and_not_passed(maximum: float, verdict: Verdict) -> None:
    """The gate says what was measured over how much."""
    gate = judge_bits_per_byte(summary_of([measures(32 * math.log(2), 10, 32, 6)]), maximum)
    assert (gate.verdict, gate.measured, gate.required) == (verdict, 1.0, maximum)
    assert "1.0000 bits per byte over 1 documents (32 bytes, 10 tokens, token perplexity 9.19)" in gate.message


FAULTS = {
    "no JSON": ("Once upon", "not JSON at column 1"),
    "a list": ('["Once"]', 'not a JSON object; write {"text": "…"}'),
    "no text": ('{"document": "Once"}', 'no "text" (keys here: \'document\'); a row needs "text"'),
    "blank": ('{"text": " \\n"}', '"text" is empty'),
    "a number": ('{"text": 12}', '"text" is a number; write it as a string'),
    "half a character": ('{"text": "\\ud800"}', "half a surrogate pair"),
    "twice": ('{"text": "Once. "}', "holds the text of line 1 again; delete one of the two"),
}


@pytest.mark.parametrize(("line", "message"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_row_is_named_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    """Every fault says where it is and what to write."""
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{"text": "Once."}}\n\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_texts(path)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}:3: ")
    assert message in fault


def test_a_users_document_is_kept_to_the_byte(tmp_path: Path) -> None:
    """White space at the ends is text too, and other keys are ignored."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": 3, "text": "\\tOnce.\\n"}\n')
    assert read_texts(path) == (TextRow(text="\tOnce.\n", line_index=0),)


def test_the_shipped_documents_are_as_promised() -> None:
    """30 documents of 60 to 220 words, all different from the first words on, some in letters that are not Latin.

    Those in Greek and Cyrillic show a weakened attention layer the most: their words are many tokens long.
    """
    raw = PATH.read_bytes()
    assert raw.endswith(b"}\n")
    assert len(raw.splitlines()) == len(DOCUMENTS) == 30
    assert all(60 <= len(row.text.split()) <= 220 for row in DOCUMENTS)
    assert len({row.text[:20] for row in DOCUMENTS}) == 30
    assert 8 <= sum(not row.text.isascii() for row in DOCUMENTS) <= 15
    assert sum(any("\u0370" <= letter <= "\u04ff" for letter in row.text) for row in DOCUMENTS) >= 5
    assert all(row.text == row.text.strip() for row in DOCUMENTS)
