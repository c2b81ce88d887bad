"""Asks a remote API in OpenAI's format, through its official client; the retrying is our own."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Self
from urllib.parse import urlsplit

from harness.backends.base import BackendInfo, Failure, GenerateRequest, Generation, Request, RequestKind, Response
from harness.backends.in_flight import answers
from harness.backends.openai_http import body_of, error_message, read_reply
from harness.backends.posting import RetryPolicy, retry_after
from harness.backends.server import raise_file_limit
from harness.errors import CountersUnavailable, ServerError
from harness.metrics import Counters
from harness.redaction import redact

ENGINE = "openai"
WITHOUT_SCORES = (
    "a remote API gives no log-probabilities of a prompt's own tokens: ask choice and perplexity of a backend that "
    "does (vllm, sglang, transformers)"
)
RETRIED = frozenset({408, 409, 429})
"""Beside every 5xx: what the official client takes for passing."""
MOST_CONNECTIONS = 1000
"""What the official client opens at most; beyond it requests would wait inside it, with their clock running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """An attempt that failed in a way another may not."""

    failure: Failure
    after: float | None = None


class OpenaiBackend:
    """Asks a remote API; see `harness.backends.base.Backend` for the contract."""

    kinds = frozenset({RequestKind.GENERATE})

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        api_key: str,
        key_name: str = "the API key",
        concurrency: int = 256,
        timeout: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`key_name` is where the key was found, for messages; `timeout` in seconds counts from sending a request."""
        self.base_url = base_url
        self.model = model
        self._key = api_key
        self._key_name = key_name
        self._concurrency = min(concurrency, MOST_CONNECTIONS)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._limit_name = "max_tokens"

    async def __aenter__(self) -> Self:
        # Half a second to import, which only a run that asks it should pay for.
        self._openai: Any = import_module("openai")
        self._client: Any = self._openai.AsyncOpenAI(
            api_key=self._key,
            base_url=self.base_url,
            max_retries=0,
            timeout=self._timeout,
            http_client=self._openai.DefaultAsyncHttpxClient(trust_env=not is_loopback(self.base_url)),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.close()

    def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield `(index, response)` as each completes, at most `concurrency` under way.

        Raises ServerError where the API refuses our key or says that its quota is spent.
        """
        at_once = raise_file_limit(self._concurrency)
        return answers(requests, self._ask, concurrency=at_once)

    async def _ask(self, request: Request) -> Response:
        if not isinstance(request, GenerateRequest):
            return Failure(kind="rejected", detail=WITHOUT_SCORES, attempts=0)
        attempt = 1
        while True:
            outcome = await self._attempt(request, attempt)
            if not isinstance(outcome, _Retry):
                return outcome
            if attempt >= self._retry.tries:
                return outcome.failure
            await asyncio.sleep(self._retry.wait(attempt, outcome.after))
            attempt += 1

    async def _attempt(self, request: GenerateRequest, attempt: int) -> Response | _Retry:
        limit_name, started = self._limit_name, time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                raw = await self._send(request, limit_name)
            latency = time.perf_counter() - started
        except (TimeoutError, self._openai.APITimeoutError):
            seconds = time.perf_counter() - started
            return Failure(kind="timeout", detail=f"no reply within {seconds:.0f} s", attempts=attempt)
        except self._openai.APIStatusError as error:
            if self._wants_other_name(error, limit_name):
                return await self._attempt(request, attempt)
            return self._failed(error, attempt)
        except self._openai.APIConnectionError as error:
            cause = error.__cause__ or error
            detail = f"{type(cause).__name__}: {cause}"
            return _Retry(failure=Failure(kind="connection", detail=detail, attempts=attempt))
        return read(raw, latency=latency, attempts=attempt)

    async def _send(self, request: GenerateRequest, limit_name: str) -> bytes:
        body = body_of(request, self.model)
        chat = "messages" in body
        if chat:
            body[limit_name] = body.pop("max_tokens")
        # Whatever the client has no name for (top_k, chat_template_kwargs) travels beside what it has.
        named = {key: body.pop(key) for key in ("model", "messages", "prompt") if key in body}
        completions = self._client.chat.completions if chat else self._client.completions
        reply = await completions.with_raw_response.create(**named, extra_body=body)
        content: bytes = reply.content
        return content

    def _wants_other_name(self, error: Any, used: str) -> bool:
        """Learn that the model wants its token limit under the newer name, as OpenAI's reasoning models do."""
        newer = "max_completion_tokens"
        if used == newer or error.status_code != 400 or newer not in error.message:
            return False
        self._limit_name = newer
        return True

    def _failed(self, error: Any, attempt: int) -> Failure | _Retry:
        status, said = error.status_code, self._said(error)
        if status == 401 or error.code == "insufficient_quota":
            raise ServerError(self._refused(error)) from error
        if status not in RETRIED and status < 500:
            return Failure(kind="rejected", detail=said, attempts=attempt, status=status)
        failure = Failure(kind="status", detail=said, attempts=attempt, status=status)
        return _Retry(failure=failure, after=retry_after(error.response.headers.get("Retry-After")))

    def _said(self, error: Any) -> str:
        text = f"HTTP {error.status_code}: {error_message(error.response.content)}"
        return redact(text, [self._key])

    def _refused(self, error: Any) -> str:
        if error.status_code == 401:
            return f"{self.base_url} refuses the key in {self._key_name}: {self._said(error)}"
        return f"{self.base_url}: the quota of the key in {self._key_name} is spent: {self._said(error)}"

    async def describe(self) -> BackendInfo:
        """Say what is asked, and by which client: a remote API does not tell what answers.

        Raises ServerError where it refuses our key or cannot be reached.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.models.with_raw_response.list()
        except self._openai.APIStatusError as error:
            if error.status_code == 401:
                raise ServerError(self._refused(error)) from error
        except (TimeoutError, self._openai.APIConnectionError) as error:
            cause = error.__cause__ or error
            raise ServerError(f"{self.base_url}: {type(cause).__name__}: {cause}") from error
        client = self._openai.__version__
        details = {"base_url": redact(self.base_url, [self._key]), "client_version": client}
        return BackendInfo(engine=ENGINE, version=f"client {client}", model=self.model, details=details)

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None:
        """Check nothing: a remote API tells neither its context nor its tokens, and refuses what is too long."""

    async def counters(self) -> Counters:
        """Raise CountersUnavailable: there are none."""
        raise CountersUnavailable("a remote API has no counters: leave out min_acceptance_length")


def read(raw: bytes, *, latency: float, attempts: int) -> Generation | Failure:
    """Read the body of a 200; a refusal, or what a content filter stopped, is a reply without an answer."""
    reply = read_reply(raw, latency=latency, attempts=attempts)
    if isinstance(reply, Failure):
        return reply
    message = json.loads(raw)["choices"][0].get("message") or {}
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        return replace(reply, text=None, refusal=f"the model refused: {refusal}")
    if reply.finish_reason == "content_filter":
        return replace(reply, text=None, refusal="the content filter stopped it")
    return reply


def is_loopback(url: str) -> bool:
    """Tell whether an address means this machine itself: no proxy can reach that."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
