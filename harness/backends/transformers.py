"""Hugging Face transformers: a model in this process answers all kinds of requests, in batches found by trying."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

from harness.backends.base import BackendInfo, Json, Request, RequestKind, Response
from harness.backends.batch_work import ENDED, BatchSettings, BatchWork, News
from harness.backends.causal_model import CausalModel
from harness.backends.compiled_model import compiled
from harness.backends.llm_context import check_room
from harness.backends.process_shares import launched_several
from harness.errors import CountersUnavailable, ServerDied
from harness.metrics import Counters

ENGINE = "transformers"


class TransformersBackend:
    """Asks a model in memory; see `harness.backends.base.Backend` for the contract.

    The model stays its owner's. While the context is entered it is in evaluation mode; afterwards it is as before:
    each module's mode, its device, gradients and torch's random numbers. Several runs at once take turns. Of several
    processes that `accelerate launch` or torchrun started, all must ask the same requests; the main one yields all
    answers, the others none.
    """

    def __init__(
        self,
        causal: CausalModel,
        *,
        model: str,
        settings: BatchSettings,
        details: Mapping[str, Json] = MappingProxyType({}),
        faults: list[str] | None = None,
    ) -> None:
        """`model` is its name, `details` are for the run record, and `faults` gets what the model died of."""
        self.causal = causal
        self.model = model
        self.settings = settings
        self._details = details
        self._faults = faults if faults is not None else []
        self._model_lock = threading.Lock()
        self._entered = ExitStack()

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        name: str | None = None,
        device: str | None = None,
        max_model_len: int | None = None,
        batch_size: int | None = None,
        compile: bool | str = False,
        seed: int | None = None,
        across_processes: bool = True,
    ) -> TransformersBackend:
        """Wrap a model and its tokenizer, as in the middle of a training run.

        With `device` it is moved there while it is asked. A rank that asks alone passes `across_processes=False`.
        Raises ConfigError for a model that is not causal or does not tell its length.
        """
        causal = CausalModel(model, tokenizer, device=device, max_model_len=max_model_len)
        settings = BatchSettings(batch_size=batch_size, compile=compile, seed=seed, across_processes=across_processes)
        known = name or str(getattr(causal.model.config, "name_or_path", "") or type(causal.model).__name__)
        return cls(causal, model=known, settings=settings)

    @property
    def kinds(self) -> frozenset[RequestKind]:
        return frozenset(RequestKind)

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.causal.asking())
            stack.enter_context(compiled(self.causal.model, self.settings.compile))
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._entered.close()

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield `(index, response)` as each batch completes, longest first.

        Raises ServerDied where the model fails for another reason than memory.
        """
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[News] = asyncio.Queue()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for it any more.
                loop.call_soon_threadsafe(told.put_nowait, news)

        work = BatchWork(self.causal, requests, settings=self.settings, model_lock=self._model_lock, tell=tell)
        work.start()
        news: News | None = None
        try:
            while (news := await told.get()) != ENDED:
                if isinstance(news, ServerDied):
                    self._faults.append(str(news))
                if isinstance(news, BaseException):
                    raise news
                if isinstance(news, tuple):
                    yield news
        finally:
            work.stop()
            while news != ENDED:
                news = await told.get()
            work.join()

    async def describe(self) -> BackendInfo:
        """Say what runs where, with which versions."""
        config = self.causal.model.config
        details: dict[str, Json] = {
            "torch": _version("torch"),
            "dtype": self.causal.dtype,
            "device": str(self.causal.device),
            "max_model_len": self.causal.max_model_len,
            "attention": getattr(config, "_attn_implementation", None) or "unknown",
            "revision": getattr(config, "_commit_hash", None) or "unknown",
            "batch_size": self.settings.batch_size or "found",
            "compile": self.settings.compile,
            "seed": self.settings.seed,
            "across_processes": self.settings.across_processes and launched_several(),
            **self._details,
        }
        return BackendInfo(engine=ENGINE, version=_version("transformers"), model=self.model, details=details)

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None:
        """Check that the longest requests fit into the model's context.

        Raises ServerError with the remedy.
        """
        check_room(self.causal, requests, self.causal.max_model_len)

    async def counters(self) -> Counters:
        """Raise CountersUnavailable: transformers counts nothing."""
        raise CountersUnavailable("transformers keeps no counters: leave out gates on acceptance length and caches")


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", "unknown"))
