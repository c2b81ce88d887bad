"""A remote API asked through its official client: everything in order, every fault named, no key ever shown."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from loopback import LoopbackServer, Reply, completion, loopback_server

from harness.backends.base import (
    ChatMessage,
    Failure,
    GenerateRequest,
    Generation,
    LoglikelihoodRequest,
    Request,
    RequestKind,
    Response,
    Sampling,
)
from harness.backends.openai_api import api_url, check_openai, openai_engine
from harness.backends.openai_client import OpenaiBackend, is_loopback
from harness.backends.posting import RetryPolicy
from harness.config import ModelConfig
from harness.errors import ConfigError, CountersUnavailable, ServerError

KEY = "sk-test-0123456789abcdefghij"
QUICK = RetryPolicy(first_wait=0.01, longest_wait=0.05)


def asked(text: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt=text, sampling=Sampling(max_tokens=5, **sampling))


def said(text: str = "Hi?") -> GenerateRequest:
    return GenerateRequest(prompt=(ChatMessage(role="user", content=text),), sampling=Sampling(max_tokens=5))


def chat(content: str | None, finish_reason: str = "stop", **message: Any) -> Reply:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return Reply(body={"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def fault(status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> Reply:
    return Reply(status=status, body={"error": {"message": message, **more}}, headers=headers or {})


def backend_for(url: str, **options: Any) -> OpenaiBackend:
    return OpenaiBackend(
        **{"model": "m", "api_key": KEY, "key_name": "OPENAI_API_KEY", "retry": QUICK, **options, "base_url": url}
    )


async def collect(backend: OpenaiBackend, requests: Sequence[Request]) -> list[Response]:
    responses: dict[int, Response] = {}
    async with backend:
        async for index, response in backend.run(requests):
            assert index not in responses
            responses[index] = response
    return [responses[index] for index in range(len(requests))]


def answers(server: LoopbackServer, requests: Sequence[Request], **options: Any) -> list[Response]:
    return asyncio.run(collect(backend_for(f"{server.base_url}/v1", **options), requests))


def test_every_request_gets_its_own_answer() -> None:
    """A thousand requests, answered in any order, come back in the order they were asked."""
    delays = [index % 10 / 200 for index in range(1000)]
    random.Random(0).shuffle(delays)

    def echo(body: dict[str, Any], number: int) -> Reply:
        reply = completion(f"answer to {body['prompt']}")
        return Reply(body=reply.body, delay=delays[number])

    with loopback_server(echo) as server:
        found = answers(server, [asked(str(index)) for index in range(1000)], concurrency=64)
    texts = [reply.text for reply in found if isinstance(reply, Generation)]
    assert texts == [f"answer to {index}" for index in range(1000)]


def test_what_is_asked_reaches_the_api_whole() -> None:
    """Sampling, a setting that the client has no name for, and the key travel as they are told."""
    request = GenerateRequest(
        prompt=(ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")),
        sampling=Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=("x",)),
        reasoning_effort="low",
        chat_template_kwargs={"thinking": False},
    )
    with loopback_server(lambda body, number: chat("yes")) as server:
        (reply,) = answers(server, [request])
    assert isinstance(reply, Generation)
    assert (reply.text, reply.prompt_tokens, reply.generated_tokens) == ("yes", 3, 2)
    assert server.paths == ["/v1/chat/completions"]
    sent = {name.lower(): value for name, value in server.headers[0].items()}
    assert sent["authorization"] == f"Bearer {KEY}"
    assert server.requests[0] == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "stop": ["x"],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"thinking": False},
    }


WITHOUT_ANSWER = {
    "refusal": (chat(None, refusal="I cannot help with that"), "the model refused: I cannot help with that"),
    "content filter": (chat("Half a sen", "content_filter"), "the content filter stopped it"),
    "content filter without text": (chat(None, "content_filter"), "the content filter stopped it"),
}


@pytest.mark.parametrize(("reply", "why"), WITHOUT_ANSWER.values(), ids=WITHOUT_ANSWER)
def test_a_refusal_is_a_reply_without_an_answer(reply: Reply, why: str) -> None:
    """What a model refused or a filter stopped has no text to grade, and says why."""
    with loopback_server(lambda body, number: reply) as server:
        (found,) = answers(server, [said()])
    assert isinstance(found, Generation)
    assert (found.text, found.refusal) == (None, why)


def test_a_filtered_completion_has_no_answer_either() -> None:
    """Completions have no message: their finish reason alone tells of the filter."""
    with loopback_server(lambda body, number: completion("", "content_filter")) as server:
        (found,) = answers(server, [asked("q")])
    assert isinstance(found, Generation)
    assert (found.text, found.refusal) == (None, "the content filter stopped it")


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_a_passing_fault_is_asked_again(status: int) -> None:
    """Overload and server faults are tried again, and the answer says how often."""

    def once(body: dict[str, Any], number: int) -> Reply:
        return fault(status, "busy", {"Retry-After": "0"}) if number == 0 else completion("ok")

    with loopback_server(once) as server:
        (found,) = answers(server, [asked("q")])
    assert isinstance(found, Generation)
    assert (found.text, found.attempts, len(server.requests)) == ("ok", 2, 2)


def test_the_apis_own_wait_is_honoured() -> None:
    """Retry-After is waited for, up to the longest wait."""
    policy = RetryPolicy(first_wait=0.01, longest_wait=5.0)

    def once(body: dict[str, Any], number: int) -> Reply:
        return fault(429, "slow down", {"Retry-After": "1"}) if number == 0 else completion("ok")

    async def timed(server: LoopbackServer) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await collect(backend_for(f"{server.base_url}/v1", retry=policy), [asked("q")])
        return loop.time() - began

    with loopback_server(once) as server:
        assert asyncio.run(timed(server)) >= 1.0


LASTING = {
    "server fault": (fault(500, "boom"), "status", 500, 3, "HTTP 500: boom"),
    "rejected": (fault(400, "too long"), "rejected", 400, 1, "HTTP 400: too long"),
    "unknown model": (fault(404, "no model m"), "rejected", 404, 1, "HTTP 404: no model m"),
    "no JSON": (Reply(body="<html>"), "invalid_response", 200, 1, "<html>"),
    "no choices": (Reply(body={"choices": []}), "invalid_response", 200, 1, "without a reply"),
}


@pytest.mark.parametrize(("reply", "kind", "status", "tries", "detail"), LASTING.values(), ids=LASTING)
def test_a_lasting_fault_is_a_failure(reply: Reply, kind: str, status: int, tries: int, detail: str) -> None:
    """Each is one request's failure of its own kind, tried again only where that can help."""
    with loopback_server(lambda body, number: reply) as server:
        (found,) = answers(server, [asked("q")])
    assert isinstance(found, Failure)
    assert (found.kind, found.status, found.attempts, len(server.requests)) == (kind, status, tries, tries)
    assert detail in found.detail


def test_silence_is_a_timeout_and_not_asked_again() -> None:
    """Neither a reply that never begins nor one that drips outlasts the request's time."""

    def slow(body: dict[str, Any], number: int) -> Reply:
        reply = completion("late")
        return Reply(body=reply.body, drip=0.05) if body["prompt"] == "drip" else Reply(body=reply.body, delay=1.0)

    with loopback_server(slow) as server:
        found = answers(server, [asked("wait"), asked("drip")], timeout=0.4)
    assert [reply.kind for reply in found if isinstance(reply, Failure)] == ["timeout", "timeout"]
    assert len(server.requests) == 2


def test_a_refused_connection_is_a_failure() -> None:
    """Nothing listens: every try is made, and the failure says what happened."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        (found,) = asyncio.run(collect(backend_for(url), [asked("q")]))
    assert isinstance(found, Failure)
    assert (found.kind, found.attempts) == ("connection", 3)


WHOLE_RUN = {
    "wrong key": (fault(401, f"Incorrect API key: {KEY}"), "refuses the key in OPENAI_API_KEY"),
    "spent quota": (
        fault(429, "you are out of credit", code="insufficient_quota"),
        "quota of the key in OPENAI_API_KEY is spent",
    ),
}


@pytest.mark.parametrize(("reply", "message"), WHOLE_RUN.values(), ids=WHOLE_RUN)
def test_a_key_that_is_no_good_ends_the_run(reply: Reply, message: str) -> None:
    """It is one infrastructure error that names the variable and never the key, not a failure for each request."""
    with loopback_server(lambda body, number: reply) as server, pytest.raises(ServerError, match=message) as caught:
        answers(server, [asked(str(index)) for index in range(50)], concurrency=1)
    assert KEY not in str(caught.value)
    assert len(server.requests) == 1


def test_the_token_limit_takes_the_name_that_the_model_wants() -> None:
    """A model that refuses max_tokens is asked with max_completion_tokens, and so is all that follows."""

    def newer(body: dict[str, Any], number: int) -> Reply:
        if "max_tokens" in body:
            return fault(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return chat(f"up to {body['max_completion_tokens']}")

    with loopback_server(newer) as server:
        found = answers(server, [said(), said(), said()], concurrency=1)
    assert [reply.text for reply in found if isinstance(reply, Generation)] == ["up to 5"] * 3
    assert len(server.requests) == 4


def test_scores_cannot_be_asked_for() -> None:
    """Only text is a kind of this backend's, and a stray request for scores is refused, not answered."""
    assert OpenaiBackend.kinds == {RequestKind.GENERATE}
    request = LoglikelihoodRequest(context="a", continuations=("b",))
    with loopback_server(lambda body, number: completion("x")) as server:
        (found,) = answers(server, [request])
    assert isinstance(found, Failure)
    assert "no log-probabilities" in found.detail
    assert server.requests == []


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy variables hold for addresses elsewhere alone."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with loopback_server(lambda body, number: completion("direct")) as server:
        (found,) = answers(server, [asked("q")])
    assert isinstance(found, Generation)
    assert found.text == "direct"


def test_a_proxy_is_asked_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address elsewhere is reached through the proxy, which is asked for it by its whole address."""
    proxied = {"http://api.test/v1/completions": completion("by proxy")}
    with loopback_server(lambda body, number: Reply(status=404), posts=proxied) as server:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, server.base_url)
        for name in ("ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        (found,) = asyncio.run(collect(backend_for("http://api.test/v1"), [asked("q")]))
    assert isinstance(found, Generation)
    assert found.text == "by proxy"


LOOPBACK = {
    "http://127.0.0.1:8000/v1": True,
    "http://127.8.8.8": True,
    "http://localhost:1": True,
    "http://[::1]:8000/v1": True,
    "https://api.openai.com/v1": False,
    "http://10.0.0.1/v1": False,
    "http://localhost.example.com": False,
}


@pytest.mark.parametrize(("url", "expected"), LOOPBACK.items(), ids=LOOPBACK)
def test_loopback_addresses_are_known(url: str, expected: bool) -> None:
    """Only what means this machine itself is loopback."""
    assert is_loopback(url) is expected


URLS = {
    "https://api.example.com": "https://api.example.com/v1",
    "api.example.com/": "http://api.example.com/v1",
    "https://api.example.com/v1/": "https://api.example.com/v1",
    "https://api.example.com/openai/v1beta": "https://api.example.com/openai/v1beta",
}


@pytest.mark.parametrize(("address", "url"), URLS.items(), ids=URLS)
def test_an_address_is_completed(address: str, url: str) -> None:
    """An API lies under /v1 unless its address says where."""
    assert api_url(address) == url


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(model_name="m", accuracy_threshold=0.5, backend="openai", **keys)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCURACY_GATE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_key")
def test_without_a_key_nothing_starts() -> None:
    """The mistake names the variables that would hold one."""
    with pytest.raises(ConfigError, match="ACCURACY_GATE_API_KEY or OPENAI_API_KEY"), openai_engine(config()):
        pass


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "engine settings": ({"engine": {"dtype": "bfloat16"}}, "engine.dtype"),
    "unknown option": ({"engine": {"options": {"colour": 1}}}, "engine.options.colour"),
    "prefix cache": ({"prefix_cache_check": True}, "prefix_cache_check"),
    "truncation": ({"truncate_prompts": True}, "truncate_prompts"),
    "address": ({"engine": {"options": {"base_url": "ftp://x"}}}, "no http:// address"),
}


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize(("keys", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_a_remote_api_cannot_be_told_is_a_mistake(keys: dict[str, Any], message: str) -> None:
    """A setting that would be ignored is refused before anything is asked."""
    with pytest.raises(ConfigError, match=message):
        check_openai(config(**keys), api_key=KEY)


ADDRESSES: dict[str, tuple[str | None, str | None, str | None, str]] = {
    "given": ("http://given", "http://option", "http://variable", "http://given/v1"),
    "option": (None, "http://option", "http://variable", "http://option/v1"),
    "variable": (None, None, "http://variable", "http://variable/v1"),
    "official": (None, None, None, "https://api.openai.com/v1"),
}


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize(("given", "option", "variable", "url"), ADDRESSES.values(), ids=ADDRESSES)
def test_the_nearest_address_wins(
    given: str | None, option: str | None, variable: str | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line comes before the config, the config before the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    if variable:
        monkeypatch.setenv("OPENAI_BASE_URL", variable)
    options = {"engine": {"options": {"base_url": option}}} if option else {}
    with openai_engine(config(**options), base_url=given) as engine:
        assert engine.base_url == url
        assert engine.key_name == "OPENAI_API_KEY"
        assert KEY not in f"{engine}{engine.description}"


def test_the_engine_says_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record holds engine, model and client; what a remote API does not tell is not invented."""

    async def described(make: Callable[[], OpenaiBackend]) -> tuple[str, str, str]:
        async with make() as backend:
            with pytest.raises(CountersUnavailable, match="no counters"):
                await backend.counters()
            info = await backend.describe()
            await backend.check_context([asked("q")], info)
            return info.engine, info.version, info.model

    with (
        loopback_server(lambda body, number: completion("x")) as server,
        openai_engine(config(), base_url=server.base_url, api_key=KEY) as engine,
    ):
        engine_name, version, model = asyncio.run(described(lambda: engine.backend(config())))
        assert engine.death() is None
        assert engine.check_workers([]) == ()
    assert (engine_name, model) == ("openai", "m")
    assert version.startswith("client ")


def test_a_wrong_key_is_known_before_anything_is_asked() -> None:
    """The list of models is asked for first, and its 401 names where the key came from."""

    async def describe(url: str) -> None:
        async with backend_for(url) as backend:
            await backend.describe()

    refused = fault(401, "Incorrect API key")
    with (
        loopback_server(lambda body, number: completion("x"), models=refused) as server,
        pytest.raises(ServerError, match="refuses the key in OPENAI_API_KEY"),
    ):
        asyncio.run(describe(f"{server.base_url}/v1"))
