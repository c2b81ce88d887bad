"""A server over HTTP: many requests at once, each retried where that can help, none mistaken for another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from harness.backends.base import BackendInfo, Failure, GenerateRequest, Json, Response
from harness.backends.openai_http import body_of, error_message, excerpt, path_of, read_reply
from harness.errors import CountersUnavailable, ServerDied, ServerError
from harness.metrics import Counters, read_counters

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
PROBE_SECONDS = 0.5
"""How often the server's process is looked at while it is asked: a death ends the run well inside 5 s."""

RESERVED_FILES = 64
"""Open files for everything but connections."""
LONGEST_CHECKED = 3
"""The longest prompts by characters, of which one is nearly always the longest by tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and after what wait a request is sent again."""

    tries: int = 3
    first_wait: float = 0.5
    """Seconds before the second try, doubled for each further one, jittered by half up and down."""
    longest_wait: float = 60.0
    """Seconds; also the most that a server's Retry-After is honoured for."""

    def wait(self, attempt: int, retry_after: float | None) -> float:
        """Seconds to wait after the given attempt (from 1)."""
        backoff: float = self.first_wait * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        return min(self.longest_wait, max(backoff, retry_after or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """An attempt that failed in a way another may not."""

    failure: Failure
    after: float | None = None


class ServerBackend:
    """Asks an OpenAI-compatible server; see `harness.backends.base.Backend` for the contract."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        api_key: str | None = None,
        concurrency: int = 256,
        timeout: float = 600.0,
        death: Callable[[], str | None] = lambda: None,
        retry: RetryPolicy | None = None,
        name_model: bool = True,
    ) -> None:
        """`base_url` is the server's root, with or without `/v1`; `timeout` in seconds counts from when a request is
        sent; `death` says how the server's process ended, or None while it lives; without `name_model` completions
        leave the model to the server, byte for byte as vLLM's script.
        """
        self.root = root_url(base_url)
        self.model = model
        self.concurrency = concurrency
        self.retry = retry or RetryPolicy()
        self._death = death
        self._name_model = name_model
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(30.0, timeout))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        # Not trust_env: a proxy variable would send loopback requests to the proxy.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            headers=self._headers,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def run(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield `(index, response)` as each completes, at most `concurrency` under way.

        Raises ServerDied when the server's process ends.
        """
        done: asyncio.Queue[tuple[int, Response]] = asyncio.Queue()
        todo = iter(enumerate(requests))
        at_once = min(raise_file_limit(self.concurrency), len(requests))
        workers = [asyncio.create_task(self._work(todo, done)) for _ in range(at_once)]
        try:
            for _ in requests:
                yield await self._next(done, workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(
        self, todo: Iterator[tuple[int, GenerateRequest]], done: asyncio.Queue[tuple[int, Response]]
    ) -> None:
        for index, request in todo:
            await done.put((index, await self._ask(request)))

    async def _next(
        self, done: asyncio.Queue[tuple[int, Response]], workers: Sequence[asyncio.Task[None]]
    ) -> tuple[int, Response]:
        """Wait for one response while watching the server and the workers."""
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(done.get(), PROBE_SECONDS)
            if (how := self._death()) is not None:
                raise ServerDied(how)
            for worker in workers:
                if worker.done() and not worker.cancelled() and (fault := worker.exception()) is not None:
                    raise fault

    async def _ask(self, request: GenerateRequest) -> Response:
        url = self.root + "/v1" + path_of(request)
        body = body_of(request, self.model, name_model=self._name_model)
        attempt = 1
        while True:
            outcome = await self._attempt(url, body, attempt)
            if not isinstance(outcome, _Retry):
                return outcome
            if attempt >= self.retry.tries:
                return outcome.failure
            await asyncio.sleep(self.retry.wait(attempt, outcome.after))
            attempt += 1

    async def _attempt(self, url: str, body: dict[str, object], attempt: int) -> Response | _Retry:
        started = time.perf_counter()
        try:
            async with self._session.post(url, json=body) as reply:
                raw = await reply.read()
                latency = time.perf_counter() - started
        except TimeoutError:
            seconds = time.perf_counter() - started
            return Failure(kind="timeout", detail=f"no reply within {seconds:.0f} s", attempts=attempt)
        except (aiohttp.ClientError, OSError) as error:
            detail = f"{type(error).__name__}: {error}"
            return _Retry(failure=Failure(kind="connection", detail=detail, attempts=attempt))
        if reply.status == 200:
            return read_reply(raw, latency=latency, attempts=attempt)
        rejected = 400 <= reply.status < 500 and reply.status not in RETRIED_STATUSES
        failure = Failure(
            kind="rejected" if rejected else "status",
            detail=f"HTTP {reply.status}: {error_message(raw)}",
            attempts=attempt,
            status=reply.status,
        )
        if reply.status in RETRIED_STATUSES:
            return _Retry(failure=failure, after=retry_after(reply.headers.get("Retry-After")))
        return failure

    async def describe(self) -> BackendInfo:
        """Ask the server who it is; what it does not tell is "unknown".

        Raises ServerError where it does not serve our model.
        """
        models = await self.models()
        names = [str(entry.get("id")) for entry in models]
        if self.model not in names:
            raise ServerError(f"{self.root} serves {', '.join(names) or 'nothing'}, not {self.model}")
        version = "unknown"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, AttributeError):
            async with self._session.get(self.root + "/version") as reply:
                version = str((await reply.json(content_type=None)).get("version", "unknown"))
        return BackendInfo(engine="server", version=version, model=self.model, details={"models": models})

    async def models(self) -> list[dict[str, Json]]:
        """List what `/v1/models` serves.

        Raises ServerError where that is no list.
        """
        url = self.root + "/v1/models"
        try:
            async with self._session.get(url) as reply:
                raw = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"GET {url}: {type(error).__name__}: {error}") from error
        if reply.status != 200:
            raise ServerError(f"GET {url}: HTTP {reply.status}: {error_message(raw)}")
        try:
            return [entry for entry in json.loads(raw)["data"] if isinstance(entry, dict)]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"GET {url}: not a list of models: {excerpt(raw)}") from error

    async def check_context(self, requests: Sequence[GenerateRequest], info: BackendInfo) -> None:
        """Check that the longest prompts leave room for `max_tokens` in the server's context.

        Raises ServerError with the remedy. A server that does not tell its context or count tokens is not checked.
        """
        listed: Mapping[str, Json] = next(
            (entry for entry in info.details["models"] if entry.get("id") == self.model), {}
        )
        context = listed.get("max_model_len")
        if not isinstance(context, int):
            return
        for request in sorted(requests, key=prompt_length)[-LONGEST_CHECKED:]:
            tokens = await self._count_tokens(request)
            if tokens is None:
                return
            wanted = tokens + request.sampling.max_tokens
            if wanted > context:
                raise ServerError(
                    f"a prompt of {tokens} tokens and max_tokens {request.sampling.max_tokens} make {wanted}, more "
                    f"than the server's context of {context}: raise --max-model-len or lower max_tokens or num_fewshot"
                )

    async def _count_tokens(self, request: GenerateRequest) -> int | None:
        body = body_of(request, self.model)
        asked = {key: body[key] for key in ("model", "prompt", "messages", "chat_template_kwargs") if key in body}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            async with self._session.post(self.root + "/tokenize", json=asked) as reply:
                count = (await reply.json(content_type=None)).get("count") if reply.status == 200 else None
                return count if isinstance(count, int) else None
        return None

    async def counters(self) -> Counters:
        """Read the engine's counters.

        Raises CountersUnavailable saying why they could not be had.
        """
        text = await self.metrics()
        if isinstance(text, Failure):
            raise CountersUnavailable(text.detail)
        return read_counters(text)

    async def metrics(self) -> str | Failure:
        """Fetch `/metrics` as text, or say why it could not be had."""
        try:
            async with self._session.get(self.root + "/metrics") as reply:
                raw = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Failure(kind="connection", detail=f"/metrics: {type(error).__name__}: {error}", attempts=1)
        if reply.status != 200:
            detail = f"/metrics answered HTTP {reply.status}: {excerpt(raw)}"
            return Failure(kind="status", detail=detail, attempts=1, status=reply.status)
        return raw.decode("utf-8", "replace")


def prompt_length(request: GenerateRequest) -> int:
    """Characters of a prompt, over all its turns."""
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, str) else sum(len(message.content) for message in prompt)


def raise_file_limit(concurrency: int) -> int:
    """Raise the soft limit of open files to what so many connections need; return how many it allows.

    Warns where the hard limit allows fewer.
    """
    needed = concurrency + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return concurrency
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    possible = max(1, allowed - RESERVED_FILES)
    if possible < concurrency:
        warnings.warn(
            f"max_concurrency {concurrency} needs more open files than the limit of {hard}: asking {possible} at once",
            stacklevel=2,
        )
    return min(concurrency, possible)


def root_url(base_url: str) -> str:
    """Strip a trailing slash and `/v1` from a server's address; `localhost` becomes 127.0.0.1.

    On a dual-stack host `localhost` may mean ::1 while servers listen on 127.0.0.1. Raises ValueError for what is no
    http address.
    """
    parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{base_url!r} is no http:// address")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    host = f"[{host}]" if ":" in host else host
    netloc = host if parts.port is None else f"{host}:{parts.port}"
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, netloc, path, "", ""))


def retry_after(header: str | None) -> float | None:
    """Read a Retry-After header (seconds or an HTTP date) as seconds from now, or None."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None
