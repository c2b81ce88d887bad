"""SGLang as it was recorded: started, found ready, asked, scored and stopped, with its oddities seen through."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sglang_replay import CONTEXT, VERSION, likeliest, logprob, replay

from harness.backends.base import (
    ChatMessage,
    Failure,
    GenerateRequest,
    Generation,
    LoglikelihoodRequest,
    Loglikelihoods,
    Request,
    Response,
    RollingLoglikelihood,
    RollingRequest,
    Sampling,
)
from harness.backends.posting import RetryPolicy
from harness.backends.sglang_http import SglangBackend
from harness.backends.tokens import ScoredPrompt, TokenScores
from harness.config import ModelConfig
from harness.errors import ConfigError, CountersUnavailable, ServerError, ServerNotReady
from harness.metrics import acceptance, difference
from harness.servers.sglang import attached, check_sglang, sglang_server

SERVER = Path(__file__).with_name("sglang_replay.py")
SERVE = f"{sys.executable} {SERVER} --model-path {{model}} --host {{host}} --port {{port}} {{args}}"


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(**{"model_name": "toy", "accuracy_threshold": 0.5, "backend": "sglang", **keys})


def asked(text: str, max_tokens: int = 2) -> GenerateRequest:
    return GenerateRequest(prompt=text, sampling=Sampling(max_tokens=max_tokens))


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[SglangBackend]:
    quick = RetryPolicy(first_wait=0.01, longest_wait=0.02)
    async with SglangBackend(url, **{"model": "toy", "retry": quick, **options}) as backend:
        yield backend


async def collect(backend: SglangBackend, requests: Sequence[Request]) -> list[Response]:
    found = {index: response async for index, response in backend.run(requests)}
    return [found[index] for index in range(len(requests))]


def test_a_server_is_started_asked_and_stopped(tmp_path: Path) -> None:
    """Both health checks must pass first; the key is the server's own, and masked where the server printed it."""
    server_args = "--random-seed 2 --stream-interval 2"
    log = tmp_path / "server.log"

    async def talk(backend: SglangBackend) -> tuple[Any, list[Response]]:
        async with backend:
            return await backend.describe(), await collect(backend, [asked("w3")])

    with sglang_server(config(server_args=server_args, serve_command=SERVE), log) as server:
        assert server.startup_seconds is not None
        key = server.api_key
        assert key
        info, (reply,) = asyncio.run(talk(server.backend(config())))
        assert server.death() is None
        described = str(server.description)
    assert server.death() is not None
    assert isinstance(reply, Generation)
    assert reply.text == f" w{likeliest(3)} w{likeliest(likeliest(3))}"
    assert (info.engine, info.version, info.model, info.details["dtype"]) == ("sglang", VERSION, "toy", "auto")
    assert key not in str(info)
    assert key not in described
    assert "api_key='***'" in log.read_text()
    assert key not in log.read_text()


def test_a_server_whose_engine_is_silent_is_not_ready(tmp_path: Path) -> None:
    """A server that lists its model but gets no token out of its engine in time is an outage, and says so."""
    stuck = config(server_args="--stream-interval 1000", serve_command=SERVE, startup_max_wait_seconds=3.0)
    with (
        pytest.raises(ServerNotReady, match=r"no token came through its engine: /health_generate answers 503"),
        sglang_server(stuck, tmp_path / "server.log"),
    ):
        pass


def test_what_cannot_run_is_a_mistake(tmp_path: Path) -> None:
    """It is known before anything starts."""
    missing = config(serve_command="zzz {model} {port} {args}")
    with pytest.raises(ConfigError, match="there is no command zzz"), sglang_server(missing, tmp_path / "server.log"):
        pass
    assert not (tmp_path / "server.log").exists()


def test_without_sglang_there_is_a_remedy() -> None:
    """Where neither the package nor a command is there, the message says what to install."""
    with pytest.raises(ConfigError, match=r"no sglang in .*: pip install sglang"):
        check_sglang(None)


def test_a_server_of_somebody_elses_is_attached_to() -> None:
    """Its address and key are given, and it is asked as one of ours."""

    async def describe(backend: SglangBackend) -> str:
        async with backend:
            return (await backend.describe()).version

    with replay(key="k" * 20) as (url, _):
        endpoint = attached(config(), f"{url}/v1", "k" * 20)
        assert asyncio.run(describe(endpoint.backend(config()))) == VERSION
        assert endpoint.check_workers([]) == ()
        with pytest.raises(ServerError, match="SGLang's workers cannot be asked"):
            endpoint.check_workers(["method"])


def test_what_is_no_address_is_a_mistake() -> None:
    """It is known before anything is asked."""
    with pytest.raises(ConfigError, match="no http:// address"):
        attached(config(), "ftp://somewhere", None)


def test_a_wrong_model_is_found_out() -> None:
    """SGLang answers a request for any model with 200: only its list tells which one it has."""

    async def talk(url: str) -> None:
        async with opened(url, model="other") as backend:
            (reply,) = await collect(backend, [asked("w3")])
            assert isinstance(reply, Generation)
            await backend.describe()

    with replay() as (url, _), pytest.raises(ServerError, match="serves toy, not other"):
        asyncio.run(talk(url))


def test_its_faults_are_read() -> None:
    """SGLang puts its message at the top of the body, and a refused request is that request's failure."""

    async def talk(url: str) -> list[Response]:
        async with opened(url) as backend:
            chat = GenerateRequest(prompt=(ChatMessage(role="user", content="w1 w2"),), sampling=Sampling(max_tokens=1))
            return await collect(backend, [asked("w3", max_tokens=9000), chat])

    with replay() as (url, _):
        long, chat = asyncio.run(talk(url))
    assert isinstance(long, Failure)
    assert (long.kind, long.status) == ("rejected", 400)
    assert long.detail == f"HTTP 400: 9001 tokens are more than the context length of {CONTEXT}"
    assert isinstance(chat, Generation)
    assert (chat.text, chat.prompt_tokens) == (f" w{likeliest(2)}", 2)


def test_counters_are_read() -> None:
    """Requests, tokens and cache hits come from counters, whatever other gauge is NaN."""

    async def talk(url: str) -> Any:
        async with opened(url) as backend:
            before = await backend.counters()
            await collect(backend, [asked("w1 w2 w3")])
            cold = difference(before, await backend.counters())
            await collect(backend, [asked("w1 w2 w3")])
            return cold, difference(before, await backend.counters())

    with replay() as (url, _):
        cold, warm = asyncio.run(talk(url))
    assert (cold.finished, cold.prefix_cache_hit_rate) == (1, 0.0)
    assert (warm.finished, warm.prefix_cache_hit_rate) == (2, 0.5)
    assert warm.kv_cache_use == 0.25
    assert (warm.totals["sglang:prompt_tokens"], warm.totals["sglang:generation_tokens"]) == (6, 4)
    with pytest.raises(CountersUnavailable, match="SGLang counts no drafts: its gauge"):
        acceptance(warm)


def test_the_prefix_cache_is_dropped_once_nothing_holds_it() -> None:
    """A refusal while requests are under way is waited out; afterwards nothing is found in the cache."""

    async def talk(url: str) -> float | None:
        async with opened(url) as backend:
            await collect(backend, [asked("w1 w2 w3")])
            await backend.drop_prefix_cache()
            before = await backend.counters()
            await collect(backend, [asked("w1 w2 w3")])
            return difference(before, await backend.counters()).prefix_cache_hit_rate

    with replay(busy=2) as (url, state):
        assert asyncio.run(talk(url)) == 0.0
        assert [path for path, _ in state.asked].count("/flush_cache") == 3


def test_a_cache_that_cannot_be_dropped_is_an_error() -> None:
    """A server that refuses for good reason of its own is not waited for."""

    async def talk(url: str) -> None:
        async with opened(url, api_key="wrong") as backend:
            await backend.drop_prefix_cache()

    with replay(key="right") as (url, _), pytest.raises(ServerError, match="/flush_cache: HTTP 401: Unauthorized"):
        asyncio.run(talk(url))


def scored(url: str, prompts: Sequence[ScoredPrompt]) -> Sequence[TokenScores] | Failure:
    async def talk() -> Sequence[TokenScores] | Failure:
        async with opened(url) as backend:
            posted = await backend._score(prompts)
            return posted if isinstance(posted, Failure) else backend._scoring.read(posted.raw, prompts)

    return asyncio.run(talk())


def test_given_tokens_are_scored() -> None:
    """Each prompt of a batch gets the scores of its own tokens from the first scored one on, and whether greedy."""
    best = [4, likeliest(4), likeliest(likeliest(4))]
    prompts = [ScoredPrompt(tokens=(3, 5, 7, 9), first=2), ScoredPrompt(tokens=tuple(best), first=1)]
    with replay() as (url, state):
        found = scored(url, prompts)
        path, body = state.asked[0]
    assert found == [
        TokenScores(logprobs=(logprob(5, 7), logprob(7, 9)), greedy=False),
        TokenScores(logprobs=(-0.25, -0.25), greedy=True),
    ]
    assert path == "/generate"
    assert body["input_ids"] == [[3, 5, 7, 9], best]


@pytest.mark.parametrize("ignored", ["return_logprob", "logprob_start_len", "top_logprobs_num"])
def test_what_a_server_silently_ignores_is_named(ignored: str) -> None:
    """A version that answers 200 without the scores that were asked for cannot score, and the error names why."""
    with replay(ignored=frozenset({ignored})) as (url, _), pytest.raises(ServerError, match=f"ignored {ignored}"):
        scored(url, [ScoredPrompt(tokens=(3, 5, 7), first=1)])


def test_a_prompt_too_long_to_score_is_rejected() -> None:
    """Its refusal is a failure with the server's own words."""
    with replay() as (url, _):
        found = scored(url, [ScoredPrompt(tokens=tuple(range(CONTEXT)), first=1)])
    assert isinstance(found, Failure)
    assert (found.kind, found.status) == ("rejected", 400)
    assert "context length" in found.detail


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The toy model's tokenizer as a folder: `w7` is token 7, and token 40 is what may stand before all."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {**{f"w{number}": number for number in range(40)}, "<s>": 40, "<?>": 41}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token="<?>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", unk_token="<?>")
    fast.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_choices_and_texts_are_scored(tokenizer: str) -> None:
    """Continuations come after their context; a long text is scored in windows that SGLang has room for."""
    choices = LoglikelihoodRequest(context="w2 w3", continuations=(" w5", f" w{likeliest(3)}"))
    long = [2 + number % 30 for number in range(100)]
    text = RollingRequest(text=" ".join(f"w{number}" for number in long))

    async def talk(url: str) -> list[Response]:
        async with opened(url, tokenizer=tokenizer) as backend:
            requests: list[Request] = [choices, text]
            await backend.check_context(requests, await backend.describe())
            return await collect(backend, requests)

    with replay() as (url, state):
        chosen, rolled = asyncio.run(talk(url))
        scored_at = {path for path, _ in state.asked if path != "/tokenize"}
    assert isinstance(chosen, Loglikelihoods)
    assert [(score.logprob, score.greedy) for score in chosen.scores] == [(logprob(3, 5), False), (-0.25, True)]
    assert isinstance(rolled, RollingLoglikelihood)
    assert (rolled.tokens, rolled.windows) == (100, 2)
    assert rolled.logprob == pytest.approx(sum(map(logprob, [40, *long[:-1]], long)))
    assert scored_at == {"/generate"}
