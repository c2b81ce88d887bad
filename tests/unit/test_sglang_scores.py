"""What SGLang says of given tokens: read, checked against what was sent, and never made up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.backends.sglang_http import SglangNative, read_scores
from harness.backends.tokens import ScoredPrompt, TokenScores
from harness.errors import CountersUnavailable, ServerError
from harness.metrics import Counters, acceptance, read_counters

PROMPT = ScoredPrompt(tokens=(11, 12, 13), first=1)


def reply(**about: Any) -> dict[str, Any]:
    told = {
        "finish_reason": {"type": "length", "length": 1},
        "input_token_logprobs": [[None, 11, None], [-1.5, 12, None], [-0.5, 13, None]],
        "input_top_logprobs": [None, [[-0.25, 40, None]], [[-0.5, 13, None]]],
    }
    return {"text": "x", "output_ids": [1], "meta_info": {**told, **about}}


def test_scores_begin_at_the_first_scored_token() -> None:
    """The context's own scores are left out, the first token's, of which there is none, among them."""
    assert read_scores(reply(), PROMPT) == TokenScores(logprobs=(-1.5, -0.5), greedy=False)
    last = ScoredPrompt(tokens=(11, 12, 13), first=2)
    assert read_scores(reply(), last) == TokenScores(logprobs=(-0.5,), greedy=True)


def test_of_two_equally_likely_tokens_either_is_greedy() -> None:
    """Which of the two an engine names as the likeliest is chance."""
    tied = reply(input_top_logprobs=[None, [[-1.5, 99, None]], [[-0.5, 98, None]]])
    assert read_scores(tied, PROMPT).greedy


NOT_WHAT_WAS_ASKED: dict[str, tuple[Any, str]] = {
    "other tokens": (
        reply(input_token_logprobs=[[None, 11, None], [-1.5, 77, None], [-0.5, 13, None]]),
        "number 1 is 77, 12 was sent",
    ),
    "no number": (
        reply(input_token_logprobs=[[None, 11, None], [None, 12, None], [-0.5, 13, None]]),
        "token 12, number 1 of the prompt, has the log probability None",
    ),
    "true": (
        reply(input_token_logprobs=[[None, 11, None], [True, 12, None], [-0.5, 13, None]]),
        "has the log probability True",
    ),
    "an entry that is none": (reply(input_token_logprobs=[None, [-1.5, 12, None], [-0.5, 13, None]]), "None is not"),
    "no likeliest": (reply(input_top_logprobs=[None, None, [[-0.5, 13, None]]]), "token 12, number 1"),
    "aborted": (reply(finish_reason={"type": "abort", "message": "out of memory"}), "ended it: out of memory"),
    "no meta_info": ({"text": "x"}, "without meta_info"),
    "no object": ("x", "without meta_info"),
}


@pytest.mark.parametrize(("said", "message"), NOT_WHAT_WAS_ASKED.values(), ids=NOT_WHAT_WAS_ASKED)
def test_a_reply_that_is_not_what_was_asked_is_one_prompts_fault(said: Any, message: str) -> None:
    """Scores of other tokens, missing numbers and aborts are told apart by name, and nothing is made of them."""
    with pytest.raises(ValueError, match=message):
        read_scores(said, PROMPT)


IGNORED: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({"input_token_logprobs": None}, "ignored return_logprob"),
    "no likeliest": ({"input_top_logprobs": None}, "ignored top_logprobs_num"),
    "from the end on": ({"input_token_logprobs": [[-0.5, 13, None]]}, "scored 1 of 3 tokens"),
}


@pytest.mark.parametrize(("about", "message"), IGNORED.values(), ids=IGNORED)
def test_a_setting_that_is_ignored_ends_the_run(about: dict[str, Any], message: str) -> None:
    """A server that ignores what it is asked will do so for every prompt."""
    with pytest.raises(ServerError, match=message):
        read_scores(reply(**about), PROMPT)


BODIES = {
    "no JSON": b"<html>",
    "not a list": json.dumps(reply()).encode(),
    "too few": json.dumps([reply()]).encode(),
}


@pytest.mark.parametrize("raw", BODIES.values(), ids=BODIES)
def test_a_batch_must_be_answered_whole(raw: bytes) -> None:
    """Two prompts have two replies, in a list."""
    with pytest.raises(ValueError, match=r"line 1|not 2 replies to 2 prompts"):
        SglangNative().read(raw, [PROMPT, PROMPT])


def test_a_batch_is_read_in_its_order() -> None:
    """The replies of a batch belong to its prompts by position."""
    raw = json.dumps([reply(), reply()]).encode()
    last = ScoredPrompt(tokens=(11, 12, 13), first=2)
    assert [len(score.logprobs) for score in SglangNative().read(raw, [PROMPT, last])] == [2, 1]


def test_hits_of_several_caches_are_summed() -> None:
    """SGLang counts found tokens by where they lay."""
    text = """\
sglang:prompt_tokens_total{model_name="m"} 100
sglang:cached_tokens_total{cache_source="device",model_name="m"} 30
sglang:cached_tokens_total{cache_source="host",model_name="m"} 20
sglang:num_requests_total{model_name="m"} 4
"""
    counters = read_counters(text)
    assert counters.prefix_cache_hit_rate == 0.5
    assert counters.finished == 4


@pytest.mark.parametrize(
    ("gauge", "message"), [(0.0, "shows no speculative decoding"), (2.5, "stood at 2.50 over its last steps")]
)
def test_an_acceptance_length_is_never_read_off_a_gauge(gauge: float, message: str) -> None:
    """A gauge of the last steps says nothing of an evaluation: the gate cannot be judged, and says why."""
    with pytest.raises(CountersUnavailable, match=message):
        acceptance(Counters(sglang_length=gauge))
