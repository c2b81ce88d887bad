"""vLLM in this process: a `vllm.LLM` is asked many requests at once, and each answer is handed on as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from harness.backends.base import BackendInfo, GenerateRequest, Json, Request, RequestKind, Response
from harness.backends.llm_context import check_room
from harness.backends.llm_steps import ENDED, LlmSteps, News
from harness.errors import ConfigError, CountersUnavailable, ServerDied, ServerError
from harness.metrics import (
    ACCEPTED,
    DRAFT_TOKENS,
    DRAFTS,
    KV_CACHE_USE,
    PER_POSITION,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    SUCCESSES,
    Counters,
)

ENGINE = "vllm-offline"
PROBE_SECONDS = 0.5
"""How often the engine's process is looked at: a step never comes back from one that was killed."""
STOP_SECONDS = 10.0
"""How long a step under way is waited for when the answers are no longer wanted."""
SUMMED = (DRAFTS, DRAFT_TOKENS, ACCEPTED, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS)


class VllmOfflineBackend:
    """Asks an LLM; see `harness.backends.base.Backend` for the contract.

    The LLM stays its owner's: leaving the context does not end it.
    """

    def __init__(
        self,
        llm: Any,
        *,
        model: str | None = None,
        concurrency: int = 256,
        timeout: float = 600.0,
        chat: Mapping[str, Any] = MappingProxyType({}),
        death: Callable[[], str | None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """`concurrency` counts prompts, of which a request that is scored may have several, and so does `timeout`, in
        seconds from when the engine is given one. `chat` holds keywords of `LLM.chat` for every conversation, `death`
        says how the engine ended, or None while it lives, and `cancelled` is set when a run is.
        """
        self.llm = llm
        self.model = model or str(llm.model_config.model)
        self._concurrency = concurrency
        self._timeout = timeout
        self._chat = chat
        self._death = death or (lambda: engine_death(llm))
        self._cancelled = cancelled or threading.Event()

    @property
    def kinds(self) -> frozenset[RequestKind]:
        return frozenset(RequestKind)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield `(index, response)` as each completes; kinds and sampling settings may be mixed.

        Raises ConfigError where this vLLM cannot be asked request by request or gives no log probabilities, ServerDied
        when the engine ends, and ServerError where it does not come back or is busy with somebody else's requests.
        """
        self._check(requests)
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[News] = asyncio.Queue()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for it any more.
                loop.call_soon_threadsafe(told.put_nowait, news)

        steps = LlmSteps(
            self.llm,
            requests,
            chat=self._chat,
            concurrency=self._concurrency,
            timeout=self._timeout,
            tell=tell,
        )
        steps.start()
        try:
            for _ in requests:
                yield await self._next(told, steps)
        except asyncio.CancelledError:
            self._cancelled.set()
            raise
        finally:
            steps.stop()
            await self._await_end(told)

    def _check(self, requests: Sequence[Request]) -> None:
        written = [request for request in requests if isinstance(request, GenerateRequest)]
        conversations = any(not isinstance(request.prompt, str) for request in written)
        needed = ["enqueue", "enqueue_chat"] if conversations else ["enqueue"]
        missing = [name for name in needed if not hasattr(self.llm, name)]
        if missing:
            raise ConfigError(f"vLLM {_version()} has no LLM.{missing[0]}: backend {ENGINE} needs a newer one")
        mode = str(getattr(self.llm.model_config, "logprobs_mode", "")).lower()
        if mode.endswith("logits") and len(written) < len(requests):
            raise ConfigError(f"logprobs_mode {mode} gives logits, which are no log probabilities: use raw_logprobs")
        busy = self.llm.llm_engine.get_num_unfinished_requests()
        if busy:
            raise ServerError(f"the LLM has {busy} requests of somebody else under way: wait for them first")

    async def _next(self, told: asyncio.Queue[News], steps: LlmSteps) -> tuple[int, Response]:
        """Wait for one answer while watching the engine."""
        while True:
            with contextlib.suppress(TimeoutError):
                news = await asyncio.wait_for(told.get(), PROBE_SECONDS)
                if isinstance(news, ServerDied):
                    raise ServerDied(self._death() or str(news)) from news
                if isinstance(news, BaseException):
                    raise news
                if isinstance(news, tuple):
                    return news
            if (how := self._death()) is not None:
                raise ServerDied(how)
            if steps.silent_seconds() > self._timeout:
                raise ServerError(f"the engine has not come back from a step for {self._timeout:.0f} s")

    async def _await_end(self, told: asyncio.Queue[News]) -> None:
        """Wait until the thread is done with the engine, unless the engine is dead: then it may never be."""
        if self._death() is not None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while await told.get() is not ENDED:
                    continue

    async def describe(self) -> BackendInfo:
        """Say what the engine was told and found; what this vLLM does not tell is "unknown"."""
        model = self.llm.model_config
        engine = getattr(self.llm.llm_engine, "vllm_config", None)
        details: dict[str, Json] = {
            "dtype": str(getattr(model, "dtype", "unknown")).removeprefix("torch."),
            "device": str(getattr(getattr(engine, "device_config", None), "device_type", "unknown")),
            "max_model_len": getattr(model, "max_model_len", "unknown"),
            "quantization": getattr(model, "quantization", "unknown"),
            "revision": getattr(model, "revision", None) or "unknown",
        }
        return BackendInfo(engine=ENGINE, version=_version(), model=self.model, details=details)

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None:
        """Check that the longest requests fit into the engine's context.

        Raises ServerError with the remedy.
        """
        context = info.details["max_model_len"]
        if isinstance(context, int):
            check_room(self.llm, requests, context)

    async def counters(self) -> Counters:
        """Read the engine's counters.

        Raises CountersUnavailable where it keeps none.
        """
        return read_llm_counters(self.llm)


def engine_death(llm: Any) -> str | None:
    """Say that an engine's process is gone; None while it lives, or where the engine has no process of its own."""
    resources = getattr(getattr(llm.llm_engine, "engine_core", None), "resources", None)
    return "the engine's process is gone" if getattr(resources, "engine_dead", False) else None


def read_llm_counters(llm: Any) -> Counters:
    """Read `LLM.get_metrics()`, summed over engines.

    Raises CountersUnavailable where the LLM keeps no statistics.
    """
    if not getattr(llm.llm_engine, "log_stats", False):
        raise CountersUnavailable("the LLM keeps no statistics: make it with disable_log_stats=False")
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    by_reason: dict[str, float] = {}
    kv_cache_use: float | None = None
    for metric in llm.get_metrics():
        if metric.name in SUMMED:
            totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
        elif metric.name == PER_POSITION:
            for position, value in enumerate(metric.values):
                by_position[position] = by_position.get(position, 0.0) + value
        elif metric.name == SUCCESSES:
            reason = metric.labels.get("finished_reason", "unknown")
            by_reason[reason] = by_reason.get(reason, 0.0) + metric.value
        elif metric.name == KV_CACHE_USE:
            kv_cache_use = max(kv_cache_use or 0.0, metric.value)
    return Counters(totals=totals, by_position=by_position, by_finish_reason=by_reason, kv_cache_use=kv_cache_use)


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
