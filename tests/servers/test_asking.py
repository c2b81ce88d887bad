"""Asking a server that misbehaves: every fault is classified, retried only where that helps, never a wrong answer."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

import pytest
from loopback import Reply, completion, loopback_server

from harness.backends.base import Failure, GenerateRequest, Generation, Response, Sampling
from harness.backends.server import RetryPolicy, ServerBackend, retry_after, root_url
from harness.errors import ServerDied, ServerError

AT_ONCE = RetryPolicy(first_wait=0.0)


def requests(n: int) -> list[GenerateRequest]:
    return [GenerateRequest(prompt=f"q{i}", sampling=Sampling(max_tokens=8)) for i in range(n)]


def ask(url: str, asked: Sequence[GenerateRequest], **options: Any) -> dict[int, Response]:
    """Ask everything and return the responses by index."""

    async def run() -> dict[int, Response]:
        async with ServerBackend(url, model="m", **{"retry": AT_ONCE, **options}) as backend:
            return {index: response async for index, response in backend.run(asked)}

    return asyncio.run(run())


def one(url: str, **options: Any) -> Response:
    return ask(url, requests(1), **options)[0]


def test_every_response_belongs_to_its_request() -> None:
    """A thousand answers in any order come back under the index of their question."""

    def script(body: dict[str, Any], n: int) -> Reply:
        return Reply(body=completion(body["prompt"]).body, delay=0.001 * (n % 7))

    with loopback_server(script) as server:
        responses = ask(server.base_url, requests(1000), concurrency=64)
    assert {i: r.text for i, r in responses.items() if isinstance(r, Generation)} == {i: f"q{i}" for i in range(1000)}


def test_concurrency_is_the_harnesss_own() -> None:
    """No more than `concurrency` requests are under way, and as many as that."""
    under_way, most = 0, 0

    def script(body: dict[str, Any], n: int) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.02)
        under_way -= 1
        return completion("x")

    with loopback_server(script) as server:
        ask(server.base_url, requests(60), concurrency=12)
    assert 10 <= most <= 12


def test_a_requests_clock_starts_when_it_is_sent() -> None:
    """Waiting for one's turn is no time-out: 40 requests of 0.2 s, 4 at once, all finish within 1 s each."""
    with loopback_server(lambda body, n: Reply(body=completion("x").body, delay=0.2)) as server:
        responses = ask(server.base_url, requests(40), concurrency=4, timeout=1.0)
    assert all(isinstance(r, Generation) for r in responses.values())


RETRIED = {
    "429": Reply(status=429, body={"error": {"message": "slow down"}}),
    "502": Reply(status=502, body="<html>bad gateway</html>"),
    "503": Reply(status=503),
    "504": Reply(status=504),
    "reset mid-body": Reply(body=completion("x").body, cut=20),
    "closed before the body": Reply(body=completion("x").body, cut=0),
}


@pytest.mark.parametrize("fault", RETRIED.values(), ids=RETRIED)
def test_a_passing_fault_is_retried_and_counted(fault: Reply) -> None:
    """What another try can cure is tried again, and the answer says at which attempt it came."""
    with loopback_server(lambda body, n: fault if n < 2 else completion("#### 18")) as server:
        response = one(server.base_url)
    assert isinstance(response, Generation)
    assert (response.text, response.attempts) == ("#### 18", 3)


@pytest.mark.parametrize("fault", RETRIED.values(), ids=RETRIED)
def test_retries_end(fault: Reply) -> None:
    """After three tries a request has failed, with the last reason; it does not go on for ever."""
    with loopback_server(lambda body, n: fault) as server:
        response = one(server.base_url)
        assert len(server.requests) == 3
    assert isinstance(response, Failure)
    assert response.attempts == 3
    assert response.kind == ("status" if fault.cut is None else "connection")


FINAL = {
    "400": (Reply(status=400, body={"error": {"message": "seed is not supported"}}), "rejected", "seed is not supp"),
    "401": (Reply(status=401, body={"error": "Unauthorized"}), "rejected", "HTTP 401: Unauthorized"),
    "404": (Reply(status=404, body={"message": "The model `m` does not exist."}), "rejected", "does not exist"),
    "500": (Reply(status=500, body="boom"), "status", "HTTP 500: boom"),
    "HTML with 200": (Reply(body="<html>login</html>"), "invalid_response", "<html>login"),
    "empty choices": (Reply(body={"choices": []}), "invalid_response", "IndexError"),
    "truncated JSON": (Reply(body='{"choices": [{"te'), "invalid_response", "JSONDecodeError"),
}


@pytest.mark.parametrize(("reply", "kind", "detail"), FINAL.values(), ids=FINAL)
def test_a_lasting_fault_is_not_retried(reply: Reply, kind: str, detail: str) -> None:
    """What another try cannot cure is asked once; the message quotes the server."""
    with loopback_server(lambda body, n: reply) as server:
        response = one(server.base_url)
        assert len(server.requests) == 1
    assert isinstance(response, Failure)
    assert response.kind == kind
    assert detail in response.detail


def test_retry_after_is_honoured() -> None:
    """A server that names a wait gets it."""
    busy = Reply(status=429, headers={"Retry-After": "0.4"})
    with loopback_server(lambda body, n: busy if n == 0 else completion("x")) as server:
        started = time.monotonic()
        response = one(server.base_url)
    assert isinstance(response, Generation)
    assert time.monotonic() - started >= 0.4


def test_retry_after_is_bounded() -> None:
    """A server that asks for a year does not get it."""
    policy = RetryPolicy(longest_wait=60.0)
    assert policy.wait(1, 3e7) == 60.0
    assert policy.wait(1, 7.0) == 7.0
    assert 0.25 <= policy.wait(1, None) <= 0.75


def test_retry_after_is_read_in_both_forms() -> None:
    """Seconds or an HTTP date; nonsense is no wait."""
    assert retry_after("3") == 3.0
    assert retry_after(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=2)
    assert [retry_after(text) for text in (None, "soon", "-5")] == [None, None, 0.0]


def test_a_slow_reply_is_a_timeout_and_not_asked_again() -> None:
    """A request that got no reply in time failed; sending it again would double the load that made it slow."""
    with loopback_server(lambda body, n: Reply(body=completion("x").body, delay=1.0)) as server:
        response = one(server.base_url, timeout=0.2)
        assert len(server.requests) == 1
    assert isinstance(response, Failure)
    assert response.kind == "timeout"


def test_nobody_there_is_a_failed_connection() -> None:
    """A refused connection is a failure that names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        response = one(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert isinstance(response, Failure)
    assert (response.kind, response.attempts) == ("connection", 3)


def test_a_dead_server_ends_the_run_within_seconds() -> None:
    """Once the process is gone, requests that hang are given up and the run says how it ended."""
    death: list[str] = []

    def script(body: dict[str, Any], n: int) -> Reply:
        if n == 5:
            death.append("exited with code 3")
        return completion("x") if n < 5 else Reply(body=completion("x").body, delay=3.0)

    with loopback_server(script) as server:
        started = time.monotonic()
        with pytest.raises(ServerDied, match="exited with code 3"):
            ask(server.base_url, requests(50), concurrency=4, death=lambda: death[0] if death else None)
        assert time.monotonic() - started < 2.5


def test_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy set on the runner does not get loopback requests."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with loopback_server(lambda body, n: completion("x")) as server:
        assert isinstance(one(server.base_url), Generation)


def test_the_key_is_sent_and_the_model_named() -> None:
    """Every request carries the key and the served model's name."""
    with loopback_server(lambda body, n: completion("x")) as server:
        one(server.base_url, api_key="k123")
    assert server.headers[0]["Authorization"] == "Bearer k123"
    assert server.requests[0]["model"] == "m"


def describe(url: str) -> Any:
    async def run() -> Any:
        async with ServerBackend(url, model="m") as backend:
            return await backend.describe()

    return asyncio.run(run())


def test_a_server_says_who_it_is() -> None:
    """Version and models come from the server itself."""
    with loopback_server(lambda body, n: completion("x")) as server:
        info = describe(server.base_url)
    assert (info.version, info.details["models"][0]["max_model_len"]) == ("9.9", 4096)


WRONG_MODELS = {
    "another model": (Reply(body={"data": [{"id": "other"}]}), "serves other, not m"),
    "nothing": (Reply(body={"data": []}), "serves nothing, not m"),
    "401": (Reply(status=401, body={"error": "Unauthorized"}), "HTTP 401: Unauthorized"),
    "HTML": (Reply(body="<html>"), "not a list of models: <html>"),
    "an object": (Reply(body={"data": None}), "not a list of models"),
}


@pytest.mark.parametrize(("models", "expected"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_a_server_without_our_model_is_refused_before_the_first_question(models: Reply, expected: str) -> None:
    """Asking the wrong model would be measured as a regression, so it is an error instead."""
    with loopback_server(lambda body, n: completion("x"), models=models) as server:
        with pytest.raises(ServerError, match=expected):
            describe(server.base_url)
        assert server.requests == []


ROOTS = {
    "http://localhost:8000": "http://127.0.0.1:8000",
    "http://localhost:8000/v1/": "http://127.0.0.1:8000",
    "127.0.0.1:8000": "http://127.0.0.1:8000",
    "http://[::1]:8000/v1": "http://[::1]:8000",
    "https://api.example.com/team/v1": "https://api.example.com/team",
    "https://api.example.com": "https://api.example.com",
}


@pytest.mark.parametrize(("given", "root"), ROOTS.items(), ids=ROOTS)
def test_a_base_url_is_taken_in_every_usual_form(given: str, root: str) -> None:
    """With or without scheme, /v1, path or IPv6 brackets; localhost is 127.0.0.1."""
    assert root_url(given) == root


@pytest.mark.parametrize("given", ["ftp://x", "http://", "", "http://x:99999"])
def test_what_is_no_address_is_refused(given: str) -> None:
    """An address that cannot be asked is an error at once."""
    with pytest.raises(ValueError, match=r"no http|out of range"):
        root_url(given)


def test_ipv6_loopback_works() -> None:
    """A server on [::1] is asked like any other."""
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    answered: list[str] = []

    async def serve() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = completion("six").encoded()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "::1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, ServerBackend(f"http://[::1]:{port}", model="m", retry=AT_ONCE) as backend:
            async for _, response in backend.run(requests(1)):
                assert isinstance(response, Generation)
                answered.append(str(response.text))

    asyncio.run(serve())
    assert answered == ["six"]


def test_a_fault_of_the_harness_is_not_swallowed() -> None:
    """A bug while asking surfaces instead of waiting for ever."""

    def broken(attempt: int, after: float | None) -> float:
        raise RuntimeError("bug")

    class Broken(RetryPolicy):
        wait: Callable[[int, float | None], float] = staticmethod(broken)  # type: ignore[assignment]

    with loopback_server(lambda body, n: Reply(status=503)) as server, pytest.raises(RuntimeError, match="bug"):
        one(server.base_url, retry=Broken())


CONTEXT = {
    "fits": (Reply(body={"count": 4088}), None),
    "one too many": (Reply(body={"count": 4089}), "4089 tokens and max_tokens 8 make 4097, more than .* 4096: raise"),
    "no /tokenize": (Reply(status=404), None),
    "HTML": (Reply(body="<html>"), None),
    "no count": (Reply(body={"count": None}), None),
}


@pytest.mark.parametrize(("reply", "expected"), CONTEXT.values(), ids=CONTEXT)
def test_a_prompt_that_cannot_fit_is_found_before_asking(reply: Reply, expected: str | None) -> None:
    """The longest prompts are counted by the server itself; where it cannot count, nothing is claimed."""

    async def check(url: str) -> None:
        async with ServerBackend(url, model="m") as backend:
            await backend.check_context(requests(5), await backend.describe())

    with loopback_server(lambda body, n: completion("x"), posts={"/tokenize": reply}) as server:
        if expected is None:
            asyncio.run(check(server.base_url))
        else:
            with pytest.raises(ServerError, match=expected):
                asyncio.run(check(server.base_url))
        assert server.requests == []


LIMITS = """
import resource, warnings
from harness.backends.server import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
warnings.simplefilter("error" if {quiet} else "default")
print(raise_file_limit(256), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "printed"),
    [(1024, 4096, "256 1024"), (100, 4096, "256 320"), (100, 200, "136 200")],
    ids=["enough", "raised", "too few"],
)
def test_open_files_are_raised_or_concurrency_lowered(soft: int, hard: int, printed: str) -> None:
    """The soft limit is raised as needed; where the hard one is lower, fewer are asked at once, with a warning."""
    quiet = not printed.startswith("136")
    program = LIMITS.format(soft=soft, hard=hard, quiet=quiet)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed
    assert ("asking 136 at once" in done.stderr) is not quiet


def test_a_base_url_with_a_path_is_asked_below_it() -> None:
    """A gateway that serves models below a path gets its requests there."""
    with loopback_server(
        lambda body, n: completion("x"), posts={"/team/v1/completions": completion("below")}
    ) as server:
        response = one(server.base_url + "/team/v1")
    assert isinstance(response, Generation)
    assert response.text == "below"
