"""A server over HTTP: many requests at once, each retried where that can help, none mistaken for another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from harness.backends.base import (
    BackendInfo,
    Failure,
    GenerateRequest,
    Json,
    Request,
    RequestKind,
    Response,
)
from harness.backends.in_flight import answers
from harness.backends.openai_http import body_of, error_message, excerpt, path_of, read_reply
from harness.backends.posting import Posted, post
from harness.backends.posting import RetryPolicy as RetryPolicy
from harness.backends.posting import retry_after as retry_after
from harness.backends.scoring_formats import PromptLogprobs, ScoringFormat
from harness.backends.server_scoring import check_fit, score, shortened
from harness.backends.server_tokens import Encoder, TokenService, encoder_for
from harness.backends.tokens import ScoredPrompt
from harness.errors import CountersUnavailable, ServerError
from harness.metrics import Counters, read_counters

RESERVED_FILES = 64
"""Open files for everything but connections."""
LONGEST_CHECKED = 3
"""The longest prompts by characters, of which one is nearly always the longest by tokens."""


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
        scoring: ScoringFormat | None = None,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`base_url` is the server's root, with or without `/v1`; `timeout` in seconds counts from when a request is
        sent; `death` says how the server's process ended, or None while it lives; without `name_model` completions
        leave the model to the server, byte for byte as vLLM's script. `scoring` is vLLM's where None; `tokenizer`
        is the folder or the hub's name of the model's, asked of the server where it is not here.
        """
        self.root = root_url(base_url)
        self.model = model
        self.concurrency = concurrency
        self.retry = retry or RetryPolicy()
        self._death = death
        self._name_model = name_model
        self._scoring = scoring or PromptLogprobs()
        self._tokenizer = tokenizer
        self._trust_remote_code = trust_remote_code
        self._found: Encoder | None = None
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(30.0, timeout))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def kinds(self) -> frozenset[RequestKind]:
        return frozenset(RequestKind)

    async def __aenter__(self) -> Self:
        # Not trust_env: a proxy variable would send loopback requests to the proxy.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            headers=self._headers,
            trust_env=False,
        )
        self._finding = asyncio.Lock()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield `(index, response)` as each completes, at most `concurrency` under way.

        Raises ServerDied when the server's process ends, and ServerError where it cannot score what it must.
        """
        at_once = raise_file_limit(self.concurrency)
        async with aclosing(answers(requests, self._ask, concurrency=at_once, death=self._death)) as answered:
            async for index, response in answered:
                yield index, response

    async def _ask(self, request: Request) -> Response:
        if isinstance(request, GenerateRequest):
            return await self._generate(request)
        return await score(request, await self._encoder(), self._scoring, self._score)

    async def _generate(self, request: GenerateRequest) -> Response:
        body = body_of(request, self.model, name_model=self._name_model)
        cut = 0
        if may_be_cut(request):
            shorter = await shortened(request, await self._encoder())
            if isinstance(shorter, Failure):
                return shorter
            if shorter is not None:
                body["prompt"], cut = list(shorter.tokens), shorter.cut
        posted = await post(self._session, self.root + "/v1" + path_of(request), body, self.retry)
        if isinstance(posted, Failure):
            return posted
        reply = read_reply(posted.raw, latency=posted.latency, attempts=posted.attempts)
        return reply if isinstance(reply, Failure) or not cut else replace(reply, prompt_tokens_cut=cut)

    async def _score(self, prompts: Sequence[ScoredPrompt]) -> Posted | Failure:
        body = self._scoring.body(self.model, prompts)
        return await post(self._session, self.root + self._scoring.path, body, self.retry)

    async def _encoder(self) -> Encoder:
        """Find the tokenizer, once and only where a request needs one."""
        async with self._finding:
            if self._found is None:
                service = TokenService(session=self._session, root=self.root, model=self.model, retry=self.retry)
                self._found = await encoder_for(
                    service,
                    self._tokenizer,
                    trust_remote_code=self._trust_remote_code,
                    max_model_len=self._context(await self.models()),
                )
            return self._found

    def _context(self, models: Sequence[Mapping[str, Json]]) -> int | None:
        """Find how long our model's texts may be, in what the server says it serves."""
        length = next((entry.get("max_model_len") for entry in models if entry.get("id") == self.model), None)
        return length if isinstance(length, int) else None

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

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None:
        """Check that the longest prompts leave room for `max_tokens`, and that what is scored fits.

        Raises ServerError with the remedy. A server that does not tell its context or count tokens is not checked for
        prompts; those that may be cut are not either.
        """
        whole = [request for request in requests if isinstance(request, GenerateRequest) and not may_be_cut(request)]
        context = self._context(info.details["models"])
        if context is not None:
            await self._check_room(whole, context)
        if scored := [request for request in requests if not isinstance(request, GenerateRequest)]:
            await check_fit(scored, await self._encoder())

    async def _check_room(self, requests: Sequence[GenerateRequest], context: int) -> None:
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


def may_be_cut(request: GenerateRequest) -> bool:
    """Whether a prompt that is too long is cut; a conversation never is."""
    return request.truncate_prompt and isinstance(request.prompt, str)


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
