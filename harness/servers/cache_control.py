"""vLLM's KV caches between two passes: waiting until blocks were offloaded, dropping those on the GPU alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from harness.backends.base import Failure, GenerateRequest
from harness.backends.openai_http import error_message
from harness.backends.server import ServerBackend
from harness.config import ModelConfig
from harness.errors import CountersUnavailable, ServerError
from harness.metrics import OFFLOAD_STORES, read_counters
from harness.parallelism import read_parallelism
from harness.servers.endpoint import Endpoint
from harness.servers.kv_events import KvEvents, event_addresses
from harness.servers.vllm import flag_value

STEP_SECONDS = 0.2
QUIET_STEPS = 3
"""So many steps without news end the wait once anything was stored."""
SILENT_STEPS = 20
"""And so many where nothing tells of stores, as with a connector that saves while it computes."""
WAIT_SECONDS = 120.0
"""For the offload, and again for the reset while blocks are held."""


class CacheControl:
    """An async context manager; enter it before the first pass, so that no KV event of it is missed."""

    def __init__(self, endpoint: Endpoint, config: ModelConfig, asked: GenerateRequest) -> None:
        """`asked` is a question of the first pass: asking it again leaves nothing new to store."""
        self._endpoint = endpoint
        self._ranks = _ranks(config)
        written = flag_value(config.arguments, "--kv-events-config")
        host = urlsplit(endpoint.base_url).hostname or "127.0.0.1"
        self._events = KvEvents(event_addresses(written, host=host, ranks=self._ranks))
        self._headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=config.request_timeout_seconds)
        self._stack = AsyncExitStack()
        self._one_token = replace(asked, sampling=replace(asked.sampling, max_tokens=1))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            asked = ServerBackend(
                self._endpoint.base_url,
                model=self._endpoint.model,
                api_key=self._endpoint.api_key,
                death=self._endpoint.death,
            )
            self._backend = await stack.enter_async_context(asked)
            session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, trust_env=False)
            self._session = await stack.enter_async_context(session)
            stack.enter_context(self._events)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def await_offload(self) -> str:
        """Step the engine until what it tells of stores stands still; return what it told, for a message.

        Raises ServerError where the engine cannot be stepped.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        told, quiet = await self._told(), 0
        while quiet < (QUIET_STEPS if any(told) else SILENT_STEPS) and time.monotonic() < deadline:
            await self._step()
            before, told = told, await self._told()
            quiet = quiet + 1 if told == before else 0
        blocks, counted = told
        heard = f"KV events told of {blocks} blocks stored outside it" if self._events.heard else self._events.silence
        return f"{heard}, and its store counter stood at {counted:.0f}" if counted else heard

    async def drop_prefix_cache(self) -> None:
        """Drop the GPU's prefix cache and leave the external one, as soon as no block is held any more.

        Raises ServerError where the server cannot or will not.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not await self._reset():
            if time.monotonic() > deadline:
                why = f"the prefix cache was still in use after {WAIT_SECONDS:.0f} s: is somebody else asking?"
                raise ServerError(f"kv_offload_check: {why}")
            await self._step()

    async def _reset(self) -> bool:
        url = self._endpoint.base_url + "/reset_prefix_cache"
        kept = {"reset_running_requests": "false", "reset_external": "false"}
        try:
            async with self._session.post(url, params=kept) as reply:
                raw = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"kv_offload_check: {url}: {type(error).__name__}: {error}") from error
        if reply.status == 404:
            raise ServerError(f'kv_offload_check: {url} is not there: set env VLLM_SERVER_DEV_MODE: "1"')
        if reply.status != 200:
            raise ServerError(f"kv_offload_check: {url}: HTTP {reply.status}: {error_message(raw)}")
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(raw).get("success") is not False
        return True  # older servers answer with an empty body

    async def _step(self) -> None:
        """Make every engine run: stores are handed over, and their end is noticed, at a step's beginning."""
        async with contextlib.aclosing(self._backend.run([self._one_token] * self._ranks)) as answers:
            async for _, response in answers:
                if isinstance(response, Failure):
                    raise ServerError(f"kv_offload_check: a request of one token failed: {response.detail}")
        await asyncio.sleep(STEP_SECONDS)

    async def _told(self) -> tuple[int, float]:
        """Blocks stored by KV events, and stores by the connector's own counters."""
        text: Any = await self._backend.metrics()
        counted = 0.0
        if isinstance(text, str):
            with contextlib.suppress(CountersUnavailable):
                totals = read_counters(text).totals
                counted = sum(totals.get(name, 0.0) for name in OFFLOAD_STORES)
        return self._events.stored_blocks(), counted


def _ranks(config: ModelConfig) -> int:
    """Engines behind the server, each with caches and events of its own."""
    with contextlib.suppress(ValueError):
        return read_parallelism(config.arguments).data
    return 1
