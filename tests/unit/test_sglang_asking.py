"""An `sglang.Engine` asked in process: a stand-in that answers in the shapes that were recorded of the real one."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from harness.backends.base import (
    ChatMessage,
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
from harness.backends.engine_loop import EngineLoop
from harness.backends.sglang_asking import SglangOfflineBackend
from harness.errors import CountersUnavailable, ServerDied, ServerError

CONTEXT = 40


class Tokenizer:
    """One token a word, by its number; a template that writes roles before the turns."""

    bos_token_id = 1
    eos_token_id = 2

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)]

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False
        assert kwargs.pop("add_generation_prompt") is True
        marks = {"system": "91", "user": "92", "assistant": "93"}
        turns = " ".join(f"{marks[turn['role']]} {turn['content']}" for turn in messages)
        return f"{turns} {'94' if kwargs.get('enable_thinking') else '93'}"


Made = Callable[[dict[str, Any], list[int]], Any]


class Engine:
    """Answers on the event loop that it was made on, and on no other."""

    def __init__(self, made: Made | None = None, *, deterministic: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.made = made
        self.asked: list[dict[str, Any]] = []
        self.under_way = self.most = 0
        self.server_args = SimpleNamespace(
            dtype="bfloat16", quantization=None, api_key="secret", enable_deterministic_inference=deterministic
        )
        defaults = {"temperature": 0.6, "top_p": 0.95}
        model = SimpleNamespace(context_len=CONTEXT, get_default_sampling_params=lambda: defaults)
        self.tokenizer_manager = SimpleNamespace(tokenizer=Tokenizer(), model_config=model)

    async def async_generate(self, **keywords: Any) -> list[dict[str, Any]]:
        assert asyncio.get_running_loop() is self.loop
        self.asked.append(keywords)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(random.random() / 100)
        self.under_way -= 1
        ids = keywords.get("input_ids") or [Tokenizer().encode(text) for text in keywords["prompt"]]
        return [self.reply(keywords, tokens) for tokens in ids]

    def reply(self, keywords: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        about: dict[str, Any] = {
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": len(tokens),
            "completion_tokens": 3,
        }
        if keywords.get("return_logprob"):
            about["input_token_logprobs"] = [[-token / 8 if i else None, token, None] for i, token in enumerate(tokens)]
            about["input_top_logprobs"] = [[[-0.5, 4, None]] if i else None for i in range(len(tokens))]
        reply = {"text": f"to {tokens[-1]}", "output_ids": [3], "meta_info": about}
        return reply if self.made is None else self.made(reply, tokens)


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    with EngineLoop() as running:
        yield running


def asked(text: str, **keys: Any) -> GenerateRequest:
    sampling = {"max_tokens": 5, **keys.pop("sampling", {})}
    return GenerateRequest(prompt=text, sampling=Sampling(**sampling), **keys)


def answers(backend: SglangOfflineBackend, requests: Sequence[Request]) -> list[Response]:
    async def talk() -> list[Response]:
        async with backend:
            found = {index: response async for index, response in backend.run(requests)}
        return [found[index] for index in range(len(requests))]

    return asyncio.run(talk())


def made(loop: EngineLoop, make: Made | None = None, **options: Any) -> tuple[Engine, SglangOfflineBackend]:
    deterministic = options.pop("deterministic", False)
    engine = loop.do(lambda: Engine(make, deterministic=deterministic))
    return engine, SglangOfflineBackend(engine, loop, model="m", **options)


def test_every_request_gets_its_own_answer(loop: EngineLoop) -> None:
    """A thousand requests come back in the order they were asked, no more under way at once than allowed."""
    engine, backend = made(loop, concurrency=50)
    found = answers(backend, [asked(f"w {number}") for number in range(1000)])
    assert [reply.text for reply in found if isinstance(reply, Generation)] == [f"to {n}" for n in range(1000)]
    assert engine.most <= 50


def test_one_engine_is_asked_from_one_loop_after_the_other(loop: EngineLoop) -> None:
    """Each task has an event loop of its own; the engine keeps the one it was made on."""
    _, backend = made(loop)
    assert [answers(backend, [asked("7")])[0].attempts for _ in range(3)] == [1, 1, 1]


def test_a_reply_is_read_whole(loop: EngineLoop) -> None:
    """Text, reason, both counts of tokens, and a latency."""
    _, backend = made(loop)
    (found,) = answers(backend, [asked("5 6 7")])
    assert isinstance(found, Generation)
    assert (found.text, found.finish_reason, found.prompt_tokens, found.generated_tokens) == ("to 7", "stop", 3, 3)
    assert found.latency > 0


SAMPLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"temperature": 0.0, "top_p": 0.95, "max_new_tokens": 5}),
    "the model's own": ({"temperature": None}, {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 5}),
    "all": (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ("x",), "seed": 3},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_new_tokens": 5, "stop": ["x"]},
    ),
}


@pytest.mark.parametrize(("given", "expected"), SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampling_is_what_the_server_would_make_of_it(
    loop: EngineLoop, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """What is left out comes from the model's generation config; a seed goes only where it has an effect."""
    engine, backend = made(loop)
    answers(backend, [asked("1", sampling=given)])
    assert engine.asked[0]["sampling_params"] == expected


def test_a_seed_goes_to_a_deterministic_engine(loop: EngineLoop) -> None:
    """SGLang heeds a request's seed only with --enable-deterministic-inference."""
    engine, backend = made(loop, deterministic=True)
    answers(backend, [asked("1", sampling={"seed": 3})])
    assert engine.asked[0]["sampling_params"]["sampling_seed"] == 3


def test_a_conversation_goes_through_the_models_template(loop: EngineLoop) -> None:
    """The template's arguments reach it, and its text gets no special tokens of the tokenizer's."""
    engine, backend = made(loop)
    turns = (ChatMessage(role="system", content="5"), ChatMessage(role="user", content="6"))
    request = GenerateRequest(
        prompt=turns, sampling=Sampling(max_tokens=5), chat_template_kwargs={"enable_thinking": True}
    )
    answers(backend, [request])
    assert engine.asked[0]["input_ids"] == [[91, 5, 92, 6, 94]]


def test_a_prompt_is_cut_only_where_it_must_be(loop: EngineLoop) -> None:
    """Room is made on the left for the reply and what SGLang keeps free, and the cut is counted."""
    engine, backend = made(loop)
    short, long = "3 4", " ".join(map(str, range(3, 53)))
    found = answers(backend, [asked(short, truncate_prompt=True), asked(long, truncate_prompt=True)])
    assert [reply.prompt_tokens_cut for reply in found if isinstance(reply, Generation)] == [0, 50 - (CONTEXT - 6 - 5)]
    sent = [keywords.get("input_ids") for keywords in engine.asked]
    assert [len(ids[0]) for ids in sent if ids] == [CONTEXT - 6 - 5]


def test_continuations_and_texts_are_scored(loop: EngineLoop) -> None:
    """Sums are over the scored tokens alone, and greedy means each was the likeliest."""
    assert SglangOfflineBackend.kinds == frozenset(RequestKind)
    _, backend = made(loop)
    choices = LoglikelihoodRequest(context="7 8", continuations=(" 9 10", " 4"))
    chosen, rolled = answers(backend, [choices, RollingRequest(text="8 16")])
    assert isinstance(chosen, Loglikelihoods)
    assert [(score.logprob, score.tokens, score.greedy) for score in chosen.scores] == [
        (-19 / 8, 2, False),
        (-0.5, 1, True),
    ]
    assert isinstance(rolled, RollingLoglikelihood)
    assert (rolled.logprob, rolled.tokens, rolled.windows) == (-3.0, 2, 1)


def fail(error: Exception) -> Made:
    def raised(reply: dict[str, Any], tokens: list[int]) -> Any:
        raise error

    return raised


def changed(**about: Any) -> Made:
    return lambda reply, tokens: {**reply, "meta_info": {**reply["meta_info"], **about}}


FAULTS: dict[str, tuple[Made, str, str]] = {
    "refused": (fail(ValueError("the input is too long")), "rejected", "the input is too long"),
    "engine's own fault": (fail(RuntimeError("cuda")), "aborted", "RuntimeError: cuda"),
    "aborted": (changed(finish_reason={"type": "abort", "message": "no memory"}), "aborted", "no memory"),
    "no text": (lambda reply, tokens: {"meta_info": {}}, "invalid_response", "no reply"),
}


@pytest.mark.parametrize(("make", "kind", "detail"), FAULTS.values(), ids=FAULTS)
def test_one_requests_fault_is_its_own(loop: EngineLoop, make: Made, kind: str, detail: str) -> None:
    """It is a failure of its kind, and the others are answered."""

    def only_seven(reply: dict[str, Any], tokens: list[int]) -> Any:
        return make(reply, tokens) if tokens == [7] else reply

    _, backend = made(loop, only_seven)
    wrong, right = answers(backend, [asked("7"), asked("8")])
    assert isinstance(wrong, Failure)
    assert wrong.kind == kind
    assert detail in wrong.detail
    assert isinstance(right, Generation)


SCORING_FAULTS: dict[str, tuple[Made, str]] = {
    "other tokens": (changed(input_token_logprobs=[[None, 7, None], [-1.0, 9, None]]), "number 1 is 9, 8 was sent"),
    "not a number": (changed(input_token_logprobs=[[None, 7, None], [float("nan"), 8, None]]), "nan"),
}


@pytest.mark.parametrize(("make", "detail"), SCORING_FAULTS.values(), ids=SCORING_FAULTS)
def test_a_score_that_is_none_is_never_made_up(loop: EngineLoop, make: Made, detail: str) -> None:
    """Scores of other tokens, and those that are no numbers, are failures."""
    _, backend = made(loop, make)
    (found,) = answers(backend, [LoglikelihoodRequest(context="7", continuations=(" 8",))])
    assert isinstance(found, Failure)
    assert found.kind == "invalid_response"
    assert detail in found.detail


def test_an_empty_continuation_is_refused(loop: EngineLoop) -> None:
    """What cannot be scored never reaches the engine."""
    engine, backend = made(loop)
    (found,) = answers(backend, [LoglikelihoodRequest(context="7", continuations=("",))])
    assert isinstance(found, Failure)
    assert (found.kind, engine.asked) == ("rejected", [])


def test_an_engine_that_does_not_score_ends_the_run(loop: EngineLoop) -> None:
    """It would ignore the setting for every request."""
    _, backend = made(loop, changed(input_token_logprobs=None))
    with pytest.raises(ServerError, match="ignored return_logprob"):
        answers(backend, [LoglikelihoodRequest(context="7", continuations=(" 8",))])


def test_silence_is_a_timeout(loop: EngineLoop) -> None:
    """A prompt that the engine does not answer in time is given up."""
    engine, backend = made(loop, timeout=0.2)

    async def never(**keywords: Any) -> Any:
        await asyncio.Event().wait()

    engine.async_generate = never  # type: ignore[method-assign]
    (found,) = answers(backend, [asked("7")])
    assert isinstance(found, Failure)
    assert found.kind == "timeout"


def test_an_engine_that_ends_ends_the_run(loop: EngineLoop) -> None:
    """No answer comes from an engine whose processes are gone: the run says how it ended."""
    engine, backend = made(loop, death=lambda: "a process of the engine failed")

    async def never(**keywords: Any) -> Any:
        await asyncio.Event().wait()

    engine.async_generate = never  # type: ignore[method-assign]
    with pytest.raises(ServerDied, match="a process of the engine failed"):
        answers(backend, [asked("7")])


def test_the_engine_says_what_it_is(loop: EngineLoop) -> None:
    """The record holds what it was told, no key among that; counters it has none in process."""
    _, backend = made(loop, version="0.5.16")

    async def talk() -> Any:
        with pytest.raises(CountersUnavailable, match="no /metrics"):
            await backend.counters()
        info = await backend.describe()
        await backend.check_context([asked("7")], info)
        with pytest.raises(ServerError, match="make 35, more than the engine's context of 34"):
            await backend.check_context([asked("7", sampling={"max_tokens": 34})], info)
        return info

    info = asyncio.run(talk())
    assert (info.engine, info.version, info.model) == ("sglang-offline", "0.5.16", "m")
    assert info.details["dtype"] == "bfloat16"
    assert info.details["max_model_len"] == CONTEXT
    assert "secret" not in str(info)
