"""Scores from an LLM in process: sums known by construction, mixed with text, and faults that stay their request's."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from llm_like import Asked, LlmLike, Logprob, Reply, TokenizerLike, likelihood

from harness.backends.base import (
    ChatMessage,
    ContinuationScore,
    Failure,
    GenerateRequest,
    Generation,
    LoglikelihoodRequest,
    Loglikelihoods,
    Request,
    RequestKind,
    Response,
    RollingLoglikelihood,
    RollingRequest,
    Sampling,
)
from harness.backends.vllm_offline import VllmOfflineBackend
from harness.errors import ConfigError, ServerError

BRIEF = Sampling(max_tokens=8)


def ask(llm: LlmLike, asked: Sequence[Request], **options: Any) -> list[Response]:
    """Ask everything and return the responses in the order of the requests, each of which must have one."""

    async def run() -> list[tuple[int, Response]]:
        async with VllmOfflineBackend(llm, **options) as backend:
            return [answer async for answer in backend.run(asked)]

    answers = asyncio.run(run())
    assert sorted(index for index, _ in answers) == list(range(len(asked)))
    return [response for _, response in sorted(answers, key=lambda answer: answer[0])]


def choice(context: str, *continuations: str, **keys: Any) -> LoglikelihoodRequest:
    return LoglikelihoodRequest(context=context, continuations=continuations, **keys)


def score(tokenizer: TokenizerLike, before: str, text: str) -> ContinuationScore:
    """What the model that is made up thinks of words after another word."""
    tokens = [tokenizer.encode(before)[-1] if before else tokenizer.bos_token_id, *tokenizer.encode(text)]
    found = [likelihood(*pair) for pair in pairwise(tokens)]
    return ContinuationScore(
        logprob=math.fsum(each.logprob for each in found),
        tokens=len(found),
        bytes=len(text.encode()),
        greedy=all(each.rank == 1 for each in found),
    )


def mixed(index: int) -> Request:
    """One of four kinds, unlike any other by its number."""
    match index % 4:
        case 0:
            return GenerateRequest(prompt=f"q{index}", sampling=Sampling(max_tokens=1 + index % 7))
        case 1:
            return choice(f"the context {index}", " yes", f" no never {index}", " perhaps")
        case 2:
            return RollingRequest(text=" ".join(f"w{index + i}" for i in range(index % 41 + 1)), max_window=10)
        case _:
            message = ChatMessage(role="user", content=f"q{index}")
            return GenerateRequest(prompt=(message,), sampling=Sampling(max_tokens=3, temperature=0.5))


def test_a_thousand_mixed_requests_are_answered_in_their_places() -> None:
    """Text, conversations, continuations and windows in one call: every answer is its own request's, to the bit."""
    llm = LlmLike(lambda asked: Reply(text=f"{asked.prompt} {asked.parameters.max_tokens}"))
    asked = [mixed(index) for index in range(1000)]
    responses = ask(llm, asked, concurrency=64)
    for index, (request, response) in enumerate(zip(asked, responses, strict=True)):
        match request:
            case GenerateRequest(prompt=str(prompt)):
                assert isinstance(response, Generation)
                assert response.text == f"{prompt} {1 + index % 7}"
            case GenerateRequest():
                assert isinstance(response, Generation)
                assert response.text == f"{[{'role': 'user', 'content': f'q{index}'}]} 3"
            case LoglikelihoodRequest():
                assert isinstance(response, Loglikelihoods)
                expected = [score(llm.tokenizer, f"x {index}", text) for text in request.continuations]
                assert list(response.scores) == expected
            case RollingRequest():
                assert isinstance(response, RollingLoglikelihood)
                whole = score(llm.tokenizer, "", request.text)
                assert response.logprob == pytest.approx(whole.logprob, abs=1e-9)
                assert (response.tokens, response.bytes) == (whole.tokens, whole.bytes)
                assert response.windows == math.ceil(1 + max(0, whole.tokens - 9) / 9)
    assert llm.llm_engine.most == 64
    assert not llm.llm_engine.pending


def test_both_words_occur() -> None:
    """The model that is made up finds some continuations greedy and others not, so that the flag is put to the test."""
    llm = LlmLike()
    (response,) = ask(llm, [choice("a b", *(f" w{i}" for i in range(12)))])
    assert isinstance(response, Loglikelihoods)
    flags = [each.greedy for each in response.scores]
    assert set(flags) == {True, False}
    assert flags == [score(llm.tokenizer, "a b", f" w{i}").greedy for i in range(12)]


def test_scoring_asks_for_scores_alone() -> None:
    """One token is written at temperature 0 and scores are asked for, whatever the model's own settings are."""
    seen: list[Asked] = []
    llm = LlmLike(lambda asked: seen.append(asked) or Reply(), temperature=0.7, repetition_penalty=1.3)  # type: ignore[func-returns-value]
    ask(llm, [choice("a", " b")])
    (asked,) = seen
    told = asked.parameters
    assert (told.max_tokens, told.temperature, told.prompt_logprobs, told.repetition_penalty) == (1, 0.0, 1, 1.0)
    assert not told.detokenize
    assert asked.prompt == {"prompt_token_ids": llm.tokenizer.encode("a b")}


def spoilt(change: Callable[[list[Any]], Any], *, of: str) -> LlmLike:
    """Make an LLM that answers as ever, except that scores of one last word are spoilt."""
    llm = LlmLike()
    word = llm.tokenizer.encode(of)[0]

    def answer(asked: Asked) -> Reply:
        last = asked.prompt["prompt_token_ids"][-1] if isinstance(asked.prompt, dict) else None
        return Reply(text="x", spoil=change) if last == word else Reply(text="x")

    llm.llm_engine._answer = answer
    return llm


def with_last(value: float) -> Callable[[list[Any]], Any]:
    def change(entries: list[Any]) -> list[Any]:
        return [*entries[:-1], {token: Logprob(logprob=value, rank=1) for token in entries[-1]}]

    return change


SPOILT = [
    pytest.param(with_last(math.nan), "has the log probability nan", id="nan"),
    pytest.param(with_last(-math.inf), "has the log probability -inf", id="infinite"),
    pytest.param(with_last(-9999.0), "has the log probability -9999.0", id="clamped"),
    pytest.param(with_last(0.5), "has the log probability 0.5", id="above-zero"),
    pytest.param(lambda entries: None, "scored 0 tokens of a prompt of 3", id="none"),
    pytest.param(lambda entries: entries[1:], "scored 2 tokens of a prompt of 3", id="one-short"),
    pytest.param(lambda entries: [*entries[:-1], None], "no score for token 3, number 2 of the prompt", id="hole"),
    pytest.param(lambda entries: [*entries[:-1], {7777: Logprob(logprob=-1.0, rank=1)}], "no score", id="another's"),
]


@pytest.mark.parametrize(("change", "says"), SPOILT)
def test_values_that_are_none_fail_their_request_alone(change: Callable[[list[Any]], Any], says: str) -> None:
    """What is no log probability of the token is never summed: that request has no answer, the others do."""
    llm = spoilt(change, of=" bad")
    asked: list[Request] = [
        choice("a b", " good", " fine"),
        choice("a b", " good", " bad"),
        GenerateRequest(prompt="q", sampling=BRIEF),
    ]
    good, bad, text = ask(llm, asked)
    assert isinstance(bad, Failure)
    assert (bad.kind, bad.attempts) == ("invalid_response", 1)
    assert says in bad.detail
    assert isinstance(good, Loglikelihoods)
    assert isinstance(text, Generation)


def test_a_value_of_the_context_is_none_of_ours() -> None:
    """Only scored tokens are looked at: whatever is said of the context changes nothing."""

    def change(entries: list[Any]) -> list[Any]:
        return [*(None for _ in entries[:-1]), entries[-1]]

    (response,) = ask(spoilt(change, of=" bad"), [choice("a b", " bad")])
    assert isinstance(response, Loglikelihoods)


def test_a_continuation_that_does_not_fit_is_rejected_alone() -> None:
    """What is longer than the model cannot be scored; that request is rejected, and the engine never sees it."""
    llm = LlmLike()
    long = "".join(f" w{i}" for i in range(99))
    fits, fails, empty = ask(llm, [choice("a b", " c"), choice("a b", " c", long), choice("a b", "")])
    assert isinstance(fits, Loglikelihoods)
    assert isinstance(fails, Failure)
    assert fails.kind == "rejected"
    assert "a continuation of 99 tokens" in fails.detail
    assert "max_model_len 100" in fails.detail
    assert empty == Failure(kind="rejected", detail="a continuation to score is empty", attempts=1)
    assert llm._count == 1


def test_a_context_is_cut_from_the_left() -> None:
    """A context that leaves no room is cut to what fits beside the continuation, and the cut is counted."""
    seen: list[Asked] = []
    llm = LlmLike(lambda asked: seen.append(asked) or Reply())  # type: ignore[func-returns-value]
    context = " ".join(f"w{i}" for i in range(200))
    (response,) = ask(llm, [choice(context, " yes it is")])
    assert isinstance(response, Loglikelihoods)
    assert response.context_tokens_cut == 200 + 3 - 99
    assert response.scores == (score(llm.tokenizer, " w199", " yes it is"),)
    assert seen[0].prompt["prompt_token_ids"] == llm.tokenizer.encode(context + " yes it is")[-99:]


def test_nothing_before_is_the_beginning() -> None:
    """Without a context a continuation is scored after the token that texts begin with."""
    llm = LlmLike()
    (response,) = ask(llm, [choice("", "hello there")])
    assert isinstance(response, Loglikelihoods)
    assert response.scores == (score(llm.tokenizer, "", "hello there"),)


def test_a_long_text_is_scored_once_however_many_windows() -> None:
    """Windows that see a context again score every token once, each with at least that context before it."""
    seen: list[list[int]] = []
    llm = LlmLike(lambda asked: seen.append(asked.prompt["prompt_token_ids"]) or Reply())  # type: ignore[func-returns-value]
    text = " ".join(f"w{i}" for i in range(500))
    (response,) = ask(llm, [RollingRequest(text=text, context=20)], concurrency=3)
    assert isinstance(response, RollingLoglikelihood)
    assert response.tokens == 500
    assert response.logprob == pytest.approx(score(llm.tokenizer, "", text).logprob, abs=1e-9)
    assert response.windows == len(seen) > 5
    assert max(map(len, seen)) == 99
    assert llm.llm_engine.most == 3


def test_a_refused_prompt_ends_its_request() -> None:
    """When the engine will not take one continuation, those before are aborted and those after are never asked."""
    llm = LlmLike(lambda asked: None if isinstance(asked.prompt, dict) else Reply(text="x"))
    refused = llm.tokenizer.encode(" three")[0]

    def refuse(prompt: Any) -> None:
        if isinstance(prompt, dict) and prompt["prompt_token_ids"][-1] == refused:
            raise ValueError("not this one")

    llm.refuse = refuse
    asked: list[Request] = [choice("a", " one", " two", " three", " four"), GenerateRequest(prompt="q", sampling=BRIEF)]
    failed, text = ask(llm, asked)
    assert failed == Failure(kind="rejected", detail="not this one", attempts=1)
    assert isinstance(text, Generation)
    assert sorted(llm.llm_engine.aborted) == ["0", "1"]
    assert llm._count == 3


def test_a_prompt_that_takes_too_long_ends_its_request() -> None:
    """One window without an answer is a timeout of the whole text, told once; nothing of it stays in the engine."""
    llm = LlmLike()
    stuck = [llm.tokenizer.encode(word)[0] for word in (" two", " three")]
    llm.llm_engine._answer = lambda asked: (
        None if isinstance(asked.prompt, dict) and asked.prompt["prompt_token_ids"][-1] in stuck else Reply(text="x")
    )
    asked: list[Request] = [choice("a", " one", " two", " three"), GenerateRequest(prompt="q", sampling=BRIEF)]
    failed, text = ask(llm, asked, timeout=0.2)
    assert failed == Failure(kind="timeout", detail="no answer within 0 s", attempts=1)
    assert isinstance(text, Generation)
    assert len(llm.llm_engine.aborted) == 2
    assert not llm.llm_engine.pending


def test_an_aborted_prompt_is_no_score() -> None:
    """What the engine ended itself is a failure of the request, whatever came with it."""
    (response,) = ask(LlmLike(lambda asked: Reply(finish_reason="abort")), [choice("a", " b", " c")])
    assert response == Failure(kind="aborted", detail="the engine ended it: abort", attempts=1)


TRUNCATED = [
    pytest.param(92, 0, id="exactly"),
    pytest.param(93, 1, id="one-too-many"),
    pytest.param(300, 208, id="far-too-many"),
]


@pytest.mark.parametrize(("words", "cut"), TRUNCATED)
def test_a_prompt_may_be_cut_from_the_left(words: int, cut: int) -> None:
    """A completion prompt that asks for it loses its beginning, not its answer, and says how much was cut."""
    seen: list[Asked] = []
    llm = LlmLike(lambda asked: seen.append(asked) or Reply(text="x"))  # type: ignore[func-returns-value]
    text = " ".join(f"w{i}" for i in range(words))
    (response,) = ask(llm, [GenerateRequest(prompt=text, sampling=BRIEF, truncate_prompt=True)])
    assert isinstance(response, Generation)
    assert response.prompt_tokens_cut == cut
    if not cut:
        assert seen[0].prompt == text
        return
    assert seen[0].prompt == {"prompt_token_ids": llm.tokenizer.encode(text)[cut:]}
    assert response.prompt_tokens == 92


def test_no_room_for_any_prompt_is_rejected() -> None:
    """Where `max_tokens` alone fill the model, nothing is left to ask."""
    llm = LlmLike()
    (response,) = ask(llm, [GenerateRequest(prompt="q", sampling=Sampling(max_tokens=100), truncate_prompt=True)])
    assert isinstance(response, Failure)
    assert (response.kind, llm._count) == ("rejected", 0)
    assert "leave no room for a prompt" in response.detail


def test_every_kind_is_answered() -> None:
    """The backend says that it takes all kinds of requests."""
    assert VllmOfflineBackend(LlmLike()).kinds == frozenset(RequestKind)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_no_scores(mode: str) -> None:
    """An engine told to give logits instead of log probabilities is refused for scores, and only for those."""
    llm = LlmLike()
    llm.model_config.logprobs_mode = mode
    ask(llm, [GenerateRequest(prompt="q", sampling=BRIEF)])
    with pytest.raises(ConfigError, match=f"logprobs_mode {mode} gives logits"):
        ask(llm, [choice("a", " b")])


def words(count: int) -> str:
    return "".join(f" w{i}" for i in range(count))


CHECKED = [
    pytest.param(choice(words(500), words(98)), None, id="continuation-fits"),
    pytest.param(choice("a", words(99)), "a continuation of 99 tokens", id="continuation-too-long"),
    pytest.param(choice("a", ""), None, id="empty-is-for-asking"),
    pytest.param(RollingRequest(text=words(500)), None, id="text"),
    pytest.param(RollingRequest(text="a", context=99), "a context of 99 tokens leaves nothing", id="window-full"),
    pytest.param(GenerateRequest(prompt=words(500), sampling=BRIEF, truncate_prompt=True), None, id="may-be-cut"),
    pytest.param(
        GenerateRequest(prompt="a", sampling=Sampling(max_tokens=100), truncate_prompt=True),
        "max_tokens 100 leave no room for a prompt in max_model_len 100",
        id="nothing-left",
    ),
    pytest.param(
        GenerateRequest(prompt=words(93), sampling=BRIEF),
        "a prompt of 93 tokens and max_tokens 8 make 101",
        id="may-not-be-cut",
    ),
]


@pytest.mark.parametrize(("request_", "says"), CHECKED)
def test_all_kinds_are_checked_before_asking(request_: Request, says: str | None) -> None:
    """What cannot fit however it is cut is told before anything is asked, and what can be cut is let through."""
    asked: list[Request] = [
        choice("a", " b"),
        GenerateRequest(prompt="q", sampling=BRIEF),
        RollingRequest(text="c"),
        request_,
    ]
    backend = VllmOfflineBackend(LlmLike())

    async def check() -> None:
        await backend.check_context(asked, await backend.describe())

    if says is None:
        asyncio.run(check())
        return
    with pytest.raises(ServerError, match=re.escape(says)):
        asyncio.run(check())
