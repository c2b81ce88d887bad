"""Scoring over HTTP: sums are what the model is known to say, and whatever is no score never becomes one."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopbackServer, Reply, completion, loopback_server

from harness.backends.base import (
    Failure,
    GenerateRequest,
    Generation,
    Loglikelihoods,
    Request,
    RequestKind,
    Response,
    RollingLoglikelihood,
    RollingRequest,
    Sampling,
)
from harness.backends.base import LoglikelihoodRequest as Scored
from harness.backends.scoring_formats import Echo, PromptLogprobs
from harness.backends.server import RetryPolicy, ServerBackend
from harness.backends.server_scoring import MOST_PROMPTS, MOST_TOKENS, parts
from harness.backends.tokens import ScoredPrompt
from harness.config import load_config
from harness.errors import ServerError
from harness.servers.endpoint import Endpoint

AT_ONCE = RetryPolicy(first_wait=0.0)
BOS, EOS = 1, 2
LENGTH = 64
MODELS = Reply(body={"data": [{"id": "m", "max_model_len": LENGTH}]})
INFO = Reply(body={"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}})
Edit = Callable[[dict[str, Any]], Any]


def spell(text: str) -> list[int]:
    """The toy tokenizer: a token a letter."""
    return [10 + ord(letter) for letter in text]


def tokenize(body: dict[str, Any]) -> Reply:
    special = {"<s>": [BOS], "</s>": [EOS]}
    tokens = special.get(body["prompt"]) or [BOS] * body.get("add_special_tokens", True) + spell(body["prompt"])
    return Reply(body={"tokens": tokens, "count": len(tokens), "max_model_len": LENGTH})


def bigram(before: int, token: int) -> float:
    return -((before * 131 + token * 7) % 4000 + 1) / 1000


def likeliest(before: int, token: int) -> bool:
    """Whether the toy model would have written it."""
    return (before + token) % 3 != 0


def entries(tokens: Sequence[int]) -> list[dict[str, Any] | None]:
    """What vLLM says of a prompt: each token with its rank, and the likeliest where that is another."""
    told: list[dict[str, Any] | None] = [None]
    for before, token in itertools.pairwise(tokens):
        value = bigram(before, token)
        entry = {str(token): {"logprob": value, "rank": 1, "decoded_token": "?"}}
        if not likeliest(before, token):
            entry[str(token)]["rank"] = 3
            entry["9"] = {"logprob": value / 2, "rank": 1, "decoded_token": "?"}
        told.append(entry)
    return told


def scores(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as vLLM does."""
    choices = [
        {"index": i, "text": "x", "finish_reason": "length", "prompt_logprobs": entries(tokens)}
        for i, tokens in enumerate(body["prompt"])
    ]
    return {"choices": choices, "usage": {"prompt_tokens": sum(map(len, body["prompt"])), "completion_tokens": 1}}


def echoed(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as other servers echo: the generated token last, offsets that cannot be true."""
    choices = []
    for i, tokens in enumerate(body["prompt"]):
        told = entries(tokens)
        values = [entry[str(token)]["logprob"] if entry else None for entry, token in zip(told, tokens, strict=True)]
        tops = [{k: e["logprob"] for k, e in entry.items()} if entry else None for entry in told]
        logprobs = {
            "token_logprobs": [*values, -0.001],
            "top_logprobs": [*tops, {"9": -0.001}],
            "tokens": ["?"] * (len(tokens) + 1),
            "text_offset": [0] * (len(tokens) + 1),
        }
        choices.append({"index": i, "text": "?", "finish_reason": "length", "logprobs": logprobs})
    return {"choices": choices}


def ask(server: LoopbackServer, asked: Sequence[Request], **options: Any) -> list[Response]:
    async def run() -> dict[int, Response]:
        async with ServerBackend(server.base_url, model="m", **{"retry": AT_ONCE, **options}) as backend:
            return {index: response async for index, response in backend.run(asked)}

    answered = asyncio.run(run())
    return [answered[index] for index in range(len(asked))]


def serve(script: Callable[[dict[str, Any], int], Reply], **options: Any) -> Any:
    usual: dict[str, Any] = {"models": MODELS, "posts": {"/tokenize": tokenize}, "gets": {"/tokenizer_info": INFO}}
    return loopback_server(script, **{**usual, **options})


def expected(before: Sequence[int], scored: Sequence[int]) -> tuple[float, int, bool]:
    pairs = list(zip([before[-1], *scored], scored, strict=False))
    return sum(bigram(a, b) for a, b in pairs), len(scored), all(likeliest(a, b) for a, b in pairs)


def check(request: Request, response: Response) -> None:
    """Compare a response with what the text alone says it must be."""
    if isinstance(request, GenerateRequest):
        assert isinstance(response, Generation)
        assert response.text == f"answer to {request.prompt}"
    elif isinstance(request, RollingRequest):
        assert isinstance(response, RollingLoglikelihood)
        logprob, tokens, _ = expected([BOS], spell(request.text))
        assert (response.logprob, response.tokens) == (pytest.approx(logprob, abs=1e-9), tokens)
        assert (response.bytes, response.windows) == (len(request.text.encode()), math.ceil(tokens / (LENGTH - 2)))
    else:
        assert isinstance(response, Loglikelihoods)
        assert len(response.scores) == len(request.continuations)
        for text, score in zip(request.continuations, response.scores, strict=True):
            logprob, tokens, greedy = expected([BOS, *spell(request.context)], spell(text))
            assert score.logprob == pytest.approx(logprob, abs=1e-9)
            assert (score.tokens, score.bytes, score.greedy) == (tokens, len(text.encode()), greedy)


def test_kinds_are_all_three() -> None:
    """A server is asked for text, for continuations and for whole texts."""
    assert ServerBackend("http://127.0.0.1:1", model="m").kinds == frozenset(RequestKind)


@pytest.mark.parametrize(("scoring", "reply"), [(PromptLogprobs(), scores), (Echo(), echoed)], ids=["vllm", "echo"])
def test_a_thousand_mixed_requests_get_their_own_answers(scoring, reply) -> None:
    """Scores and texts come back under their request's index with the sums of its own text, whatever the order."""
    chance = random.Random(7)
    kinds: list[Callable[[int], Request]] = [
        lambda n: GenerateRequest(prompt=f"q{n}", sampling=Sampling(max_tokens=8)),
        lambda n: Scored(context=f"c{n}:", continuations=(f" a{n}", "é", f"b{n * 7}")),
        lambda n: RollingRequest(text=f"text {n} " * (1 + n % 12)),
    ]
    asked = [chance.choice(kinds)(n) for n in range(1000)]
    delays = random.Random(8)

    def script(body: dict[str, Any], n: int) -> Reply:
        delay = delays.choice([0.0, 0.0, 0.002, 0.01])
        if isinstance(body["prompt"], str):
            return Reply(body=completion(f"answer to {body['prompt']}").body, delay=delay)
        told = reply(body)
        delays.shuffle(told["choices"])
        return Reply(body=told, delay=delay)

    with serve(script) as server:
        responses = ask(server, asked, concurrency=32, scoring=scoring)
        sent = [body for body in server.requests if not isinstance(body["prompt"], str)]
    for request, response in zip(asked, responses, strict=True):
        check(request, response)
    assert len(sent) == sum(not isinstance(request, GenerateRequest) for request in asked)
    assert all((body["max_tokens"], body["temperature"], body["model"]) == (1, 0, "m") for body in sent)
    assert all(len(tokens) < LENGTH for body in sent for tokens in body["prompt"])


def test_choices_of_one_request_go_out_together() -> None:
    """All continuations of a context are one HTTP request, in their order, as token ids."""
    with serve(lambda body, n: Reply(body=scores(body))) as server:
        ask(server, [Scored(context="x", continuations=("a", "b", "c"))])
        (body,) = server.requests
    assert body["prompt"] == [[BOS, *spell("x" + text)] for text in "abc"]


def test_very_many_prompts_are_split_in_order() -> None:
    """What one HTTP request may hold is bounded in prompts and in tokens, and nothing is lost or moved."""
    small = [ScoredPrompt(tokens=(BOS, n), first=1) for n in range(2 * MOST_PROMPTS + 1)]
    assert [len(part) for part in parts(small)] == [MOST_PROMPTS, MOST_PROMPTS, 1]
    assert [prompt for part in parts(small) for prompt in part] == small
    big = [ScoredPrompt(tokens=(n,) * (MOST_TOKENS // 2 + 1), first=1) for n in range(3)]
    assert [list(part) for part in parts(big)] == [[prompt] for prompt in big]
    assert list(parts([])) == []


def first_choice(name: str, value: Any) -> Edit:
    def edit(told: dict[str, Any]) -> Any:
        told["choices"][0][name] = value
        return told

    return edit


def without(name: str) -> Edit:
    def edit(told: dict[str, Any]) -> Any:
        for choice in told["choices"]:
            del choice[name]
        return told

    return edit


def own_value(value: Any) -> Edit:
    """Give the last token of the second prompt another log probability."""

    def edit(told: dict[str, Any]) -> Any:
        entry = told["choices"][1]["prompt_logprobs"][-1]
        entry[next(iter(entry))]["logprob"] = value
        return told

    return edit


def last_entry(entry: Any) -> Edit:
    def edit(told: dict[str, Any]) -> Any:
        told["choices"][1]["prompt_logprobs"][-1] = entry
        return told

    return edit


def fewer(told: dict[str, Any]) -> Any:
    told["choices"].pop()
    return told


def shorter(told: dict[str, Any]) -> Any:
    told["choices"][1]["prompt_logprobs"].pop()
    return told


@pytest.mark.parametrize(
    ("edit", "detail"),
    [
        pytest.param(own_value(math.nan), r"token 2 of the prompt .* nan", id="nan"),
        pytest.param(own_value(-math.inf), r"token 2 of the prompt .* -inf", id="minus-infinity"),
        pytest.param(own_value(None), r"token 2 of the prompt .* None", id="null"),
        pytest.param(own_value("-1"), r"token 2 of the prompt .* -1", id="string"),
        pytest.param(own_value(-9999.0), r"token 2 of the prompt .* -9999", id="clamped"),
        pytest.param(own_value(0.5), r"token 2 of the prompt .* 0.5", id="positive"),
        pytest.param(last_entry(None), r"token 2 of the prompt .* no log probability", id="entry-null"),
        pytest.param(last_entry({"9": {"logprob": -1}}), r"no log probability", id="entry-of-another-token"),
        pytest.param(last_entry(["x"]), r"no log probability", id="entry-no-object"),
        pytest.param(shorter, "2 tokens for a prompt of 3", id="too-few-entries"),
        pytest.param(fewer, "1 choices for 2 prompts", id="too-few-choices"),
        pytest.param(first_choice("index", 1), "2 choices for 2 prompts", id="choice-twice"),
        pytest.param(first_choice("prompt_logprobs", 7), "no scores", id="no-list"),
        pytest.param(lambda told: {"error": {"message": "it broke"}}, "it broke", id="error-with-200"),
        pytest.param(lambda told: "not json", "no JSON: not json", id="no-json"),
    ],
)
def test_what_is_no_score_is_a_failure(edit, detail) -> None:
    """A reply that is damaged in one value fails its own request and no other, and is never summed as something."""

    def script(body: dict[str, Any], n: int) -> Reply:
        told = scores(body)
        told = edit(told) if len(told["choices"]) == 2 else told
        return Reply(body=told if isinstance(told, str) else json.dumps(told))

    with serve(script) as server:
        bad, good = ask(server, [Scored(context="x", continuations=("a", "b")), RollingRequest(text="abc")])
    assert isinstance(bad, Failure)
    assert (bad.kind, bad.status) == ("invalid_response", 200)
    assert re.search(detail, bad.detail), bad.detail
    check(RollingRequest(text="abc"), good)


def values_shorter(told: dict[str, Any]) -> Any:
    for name in ("token_logprobs", "top_logprobs"):
        told["choices"][0]["logprobs"][name] = told["choices"][0]["logprobs"][name][1:]
    return told


def values_only_generated(told: dict[str, Any]) -> Any:
    for name in ("token_logprobs", "top_logprobs"):
        told["choices"][0]["logprobs"][name] = told["choices"][0]["logprobs"][name][-1:]
    return told


def tops_missing(told: dict[str, Any]) -> Any:
    del told["choices"][0]["logprobs"]["top_logprobs"]
    return told


IGNORED = [
    pytest.param(PromptLogprobs(), scores, without("prompt_logprobs"), "ignored prompt_logprobs", id="vllm-missing"),
    pytest.param(
        PromptLogprobs(), scores, first_choice("prompt_logprobs", None), "ignored prompt_logprobs", id="vllm-null"
    ),
    pytest.param(Echo(), echoed, without("logprobs"), "ignored logprobs", id="echo-missing"),
    pytest.param(Echo(), echoed, first_choice("logprobs", None), "ignored logprobs", id="echo-null"),
    pytest.param(Echo(), echoed, values_only_generated, "ignored echo", id="echo-not-echoed"),
    pytest.param(Echo(), echoed, tops_missing, "top_logprobs is missing", id="echo-without-likeliest"),
]


@pytest.mark.parametrize(("scoring", "reply", "edit", "message"), IGNORED)
def test_a_server_that_ignores_what_it_is_asked_ends_the_run(scoring, reply, edit, message) -> None:
    """200 without log probabilities is the server's fault, named, and never a score of zero."""
    with (
        serve(lambda body, n: Reply(body=edit(reply(body)))) as server,
        pytest.raises(ServerError, match=message),
    ):
        ask(server, [Scored(context="x", continuations=("a",))], scoring=scoring)


def test_echo_that_begins_at_the_second_token_is_not_taken_for_whole() -> None:
    """Values shifted by one are refused although their number is the prompt's."""
    with serve(lambda body, n: Reply(body=values_shorter(echoed(body)))) as server:
        (response,) = ask(server, [Scored(context="x", continuations=("a",))], scoring=Echo())
    assert isinstance(response, Failure)
    assert "3 and 3 tokens for a prompt of 3" in response.detail


def test_echo_without_the_generated_token_is_read() -> None:
    """A server that leaves out the token that ended the text says as much of the prompt."""

    def script(body: dict[str, Any], n: int) -> Reply:
        told = echoed(body)
        for name in ("token_logprobs", "top_logprobs"):
            told["choices"][0]["logprobs"][name].pop()
        return Reply(body=told)

    request = Scored(context="x", continuations=("ab",))
    with serve(script) as server:
        (response,) = ask(server, [request], scoring=Echo())
    check(request, response)


def test_two_equally_likely_tokens_are_both_greedy() -> None:
    """A tie for the likeliest, where neither has rank 1, counts as what greedy decoding would have written."""

    def script(body: dict[str, Any], n: int) -> Reply:
        told = scores(body)
        token = str(body["prompt"][0][-1])
        tie = {token: {"logprob": -0.5, "rank": 2}, "9": {"logprob": -0.5, "rank": 2}}
        told["choices"][0]["prompt_logprobs"][-1] = tie
        return Reply(body=told)

    with serve(script) as server:
        (response,) = ask(server, [Scored(context="x", continuations=("a",))])
    assert isinstance(response, Loglikelihoods)
    assert response.scores[0].greedy


def test_scoring_is_retried_and_refused_like_generating() -> None:
    """503 is asked again and counted; 400 fails the request with what the server says."""

    def script(body: dict[str, Any], n: int) -> Reply:
        if n == 0:
            return Reply(status=503, body="busy")
        return Reply(status=400, body={"error": {"message": "too long"}}) if n == 2 else Reply(body=scores(body))

    request = Scored(context="x", continuations=("a",))
    with serve(script) as server:
        retried, refused = ask(server, [request, request], concurrency=1)
    check(request, retried)
    assert isinstance(retried, Loglikelihoods)
    assert retried.attempts == 2
    assert isinstance(refused, Failure)
    assert (refused.kind, refused.status, refused.attempts) == ("rejected", 400, 1)
    assert "too long" in refused.detail


def test_what_cannot_be_scored_is_rejected_without_being_sent() -> None:
    """A continuation longer than the model, or empty, fails alone, with the reason, before any request."""
    with serve(lambda body, n: Reply(body=scores(body))) as server:
        long, empty, good = ask(
            server,
            [
                Scored(context="x", continuations=("a" * LENGTH,)),
                Scored(context="x", continuations=("",)),
                Scored(context="x", continuations=("a",)),
            ],
        )
        assert len(server.requests) == 1
    assert isinstance(long, Failure)
    assert isinstance(empty, Failure)
    assert (long.kind, empty.kind, long.attempts) == ("rejected", "rejected", 0)
    assert "max_model_len 64" in long.detail
    check(Scored(context="x", continuations=("a",)), good)


def test_long_contexts_are_cut_and_counted() -> None:
    """A context that leaves no room loses its left, and the response says how many tokens."""
    request = Scored(context="xy" * 50, continuations=("ab", "abcd"))
    with serve(lambda body, n: Reply(body=scores(body))) as server:
        (response,) = ask(server, [request])
        assert [len(tokens) for tokens in server.requests[0]["prompt"]] == [LENGTH - 1, LENGTH - 1]
    check(request, response)
    assert isinstance(response, Loglikelihoods)
    assert response.context_tokens_cut == 1 + 100 + 4 - (LENGTH - 1)


def generate(prompt: str, max_tokens: int, *, truncate: bool = True) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=Sampling(max_tokens=max_tokens), truncate_prompt=truncate)


def test_prompts_that_may_be_cut_are_cut_from_the_left() -> None:
    """A prompt too long for its reply is sent as its last tokens after BOS, and counted; one that fits, as its text."""
    asked = [generate("z" * 100, 10), generate("z" * 53, 10), generate("y", LENGTH), generate("w" * 99, 10)]
    asked[3] = generate("w" * 99, 10, truncate=False)
    with serve(lambda body, n: completion("x")) as server:
        cut, whole, rejected, left_alone = ask(server, asked, concurrency=1)
        prompts = [body["prompt"] for body in server.requests]
    assert prompts == [[BOS, *spell("z" * 53)], "z" * 53, "w" * 99]
    assert isinstance(cut, Generation)
    assert isinstance(whole, Generation)
    assert isinstance(left_alone, Generation)
    assert (cut.prompt_tokens_cut, whole.prompt_tokens_cut, left_alone.prompt_tokens_cut) == (47, 0, 0)
    assert isinstance(rejected, Failure)
    assert rejected.kind == "rejected"
    assert "lower max_tokens" in rejected.detail


def context_check(server: LoopbackServer, asked: Sequence[Request]) -> None:
    async def run() -> None:
        async with ServerBackend(server.base_url, model="m", retry=AT_ONCE) as backend:
            await backend.check_context(asked, await backend.describe())

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([generate("z" * 100, 10)], None),
        ([generate("z" * 100, 10, truncate=False)], "max_tokens 10 make 111"),
        ([Scored(context="x" * 200, continuations=("a",)), Scored(context="x", continuations=("",))], None),
        ([Scored(context="x", continuations=("a",)), Scored(context="x", continuations=("a" * 63,))], "63 tokens"),
        ([RollingRequest(text="a" * 500)], None),
        ([RollingRequest(text="a" * 500, context=63)], "leaves nothing to score in a window of 63"),
    ],
    ids=["may-be-cut", "may-not", "context-is-cut", "continuation", "windows", "window"],
)
def test_context_is_checked_before_anything_is_asked(asked, message) -> None:
    """What cannot fit is told before the first question; what will be cut or windowed is no fault."""
    with serve(lambda body, n: completion("x")) as server:
        if message is None:
            context_check(server, asked)
        else:
            with pytest.raises(ServerError, match=message):
                context_check(server, asked)
        assert server.requests == []


def test_generating_needs_no_tokenizer() -> None:
    """Where nothing is scored or cut, neither /tokenize nor files are asked for."""

    def refuse(body: dict[str, Any]) -> Reply:
        raise AssertionError("/tokenize was asked")

    with loopback_server(lambda body, n: completion("x"), posts={"/tokenize": refuse}) as server:
        (response,) = ask(server, [generate("q", 8, truncate=False)], tokenizer="/nowhere")
    assert isinstance(response, Generation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"posts": {}}, "set tokenizer to", id="no-tokenize"),
        pytest.param({"gets": {}}, "--enable-tokenizer-info-endpoint", id="no-info"),
        pytest.param({"posts": {"/tokenize": Reply(body={"ids": []})}}, "set tokenizer to", id="other-tokenize"),
        pytest.param({"posts": {"/tokenize": Reply(status=503)}}, "/tokenize: HTTP 503", id="overloaded"),
        pytest.param(
            {"gets": {"/tokenizer_info": Reply(body={"bos_token": "<nope>"})}}, "as one token", id="unknown-bos"
        ),
    ],
)
def test_without_a_tokenizer_nothing_is_scored(options, message) -> None:
    """A server that does not say how it reads texts, and no files: the run ends with the remedy."""
    with serve(lambda body, n: Reply(body=scores(body)), **options) as server:
        with pytest.raises(ServerError, match=message):
            ask(server, [RollingRequest(text="abc")])
        assert server.requests == []


def test_length_is_what_tokenize_says_where_models_does_not() -> None:
    """A server whose list of models has no length may tell it elsewhere."""
    models = Reply(body={"data": [{"id": "m"}]})
    with serve(lambda body, n: Reply(body=scores(body)), models=models) as server:
        (response,) = ask(server, [RollingRequest(text="a" * 100)])
    check(RollingRequest(text="a" * 100), response)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The toy tokenizer as files that transformers reads: a token a letter, BOS before prompts."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    letters = {chr(code): 10 + code for code in range(32, 0x3100)} | {"é": 10 + ord("é")}
    letters |= {letter: 10 + ord(letter) for letter in "\n\t東京😀"}
    vocabulary = {"<s>": BOS, "</s>": EOS, "<unk>": 3, **letters}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    built.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    built.add_special_tokens(["<s>", "</s>"])
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=built, **named).save_pretrained(tmp_path)
    return tmp_path


def test_files_encode_where_they_are_here(folder: Path) -> None:
    """With the tokenizer's files the server is asked to encode one text, to compare, and no other."""
    encoded: list[str] = []

    def counted(body: dict[str, Any]) -> Reply:
        encoded.append(body["prompt"])
        return tokenize(body)

    asked: list[Request] = [Scored(context="x", continuations=("a", " b")), RollingRequest(text="ab c" * 40)]
    with serve(lambda body, n: Reply(body=scores(body)), posts={"/tokenize": counted}, gets={}) as server:
        responses = ask(server, asked, tokenizer=str(folder))
    for request, response in zip(asked, responses, strict=True):
        check(request, response)
    assert len(encoded) == 1


def test_files_alone_are_enough(folder: Path) -> None:
    """A server without /tokenize is scored with the files."""
    request = Scored(context="x", continuations=("a",))
    with serve(lambda body, n: Reply(body=scores(body)), posts={}, gets={}) as server:
        (response,) = ask(server, [request], tokenizer=str(folder))
    check(request, response)


def test_length_comes_from_the_files_configuration_or_is_missed(folder: Path) -> None:
    """Where the server tells no length the model's configuration does; without one the run ends with the remedy."""
    models = Reply(body={"data": [{"id": "m"}]})
    request = RollingRequest(text="a" * 100)
    with serve(lambda body, n: Reply(body=scores(body)), models=models, posts={}, gets={}) as server:
        with pytest.raises(ServerError, match="does not tell max_model_len"):
            ask(server, [request], tokenizer=str(folder))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": LENGTH}))
        (response,) = ask(server, [request], tokenizer=str(folder))
    check(request, response)


def test_another_models_tokenizer_is_found_out(folder: Path) -> None:
    """Files that encode a text otherwise than the server does end the run before anything is scored."""

    def other(body: dict[str, Any]) -> Reply:
        return Reply(body={"tokens": [BOS, 5, 6, 7], "count": 4, "max_model_len": LENGTH})

    with serve(lambda body, n: Reply(body=scores(body)), posts={"/tokenize": other}) as server:
        with pytest.raises(ServerError, match=r"is not the one .* from token 1 on .*\(5, 6, 7\)"):
            ask(server, [RollingRequest(text="abc")], tokenizer=str(folder))
        assert server.requests == []


@pytest.mark.parametrize(("scoring_format", "reply"), [("prompt_logprobs", scores), ("echo", echoed)])
def test_an_endpoint_asks_as_its_config_says(
    folder: Path, tmp_path: Path, scoring_format: str, reply: Callable[[dict[str, Any]], Any]
) -> None:
    """The tokenizer is the one that the server was started with, the format the one that the config names."""
    path = tmp_path / "config.yaml"
    path.write_text(f"model_name: org/M\naccuracy_threshold: 0.5\nscoring_format: {scoring_format}\n")
    request = Scored(context="x", continuations=("a",))

    async def run(url: str) -> list[tuple[int, Response]]:
        endpoint = Endpoint(base_url=url, model="m", api_key=None, tokenizer=str(folder))
        async with endpoint.backend(load_config(path)) as backend:
            return [answered async for answered in backend.run([request])]

    with serve(lambda body, n: Reply(body=reply(body)), posts={}, gets={}) as server:
        ((_, response),) = asyncio.run(run(server.base_url))
    check(request, response)
