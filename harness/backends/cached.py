"""A backend that answers from the sample cache what was asked before, and asks another one for the rest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Self

from harness.backends.base import BackendInfo, Generation, Request, RequestKind, Response, kind_of
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.metrics import Counters
from harness.sample_store import SampleStore
from harness.servers.endpoint import CountingBackend

ENDED_BY_ENGINE = frozenset({"abort", "error"})


class CacheMode(StrEnum):
    """What the cache may be used for."""

    READ = "read"
    WRITE = "write"
    READWRITE = "readwrite"

    @property
    def reads(self) -> bool:
        return self is not CacheMode.WRITE

    @property
    def writes(self) -> bool:
        return self is not CacheMode.READ


class CachedBackend:
    """Wraps a backend; see `harness.backends.base.Backend` for the contract.

    Entering it enters `inner`; one that wraps what is entered already need not be entered itself. An answer drawn at
    random is stored like any other: asking again in the same mode gives the same draw.
    """

    def __init__(self, inner: CountingBackend, store: SampleStore, mode: CacheMode, *, pass_number: int = 1) -> None:
        """`pass_number` tells apart what is asked several times in one run to see how answers vary."""
        self.inner = inner
        self.store = store
        self.mode = mode
        self.hits = 0
        self.misses = 0
        self.stored = 0
        self._pass_number = pass_number

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.inner.__aexit__(*exc_info)

    @property
    def kinds(self) -> frozenset[RequestKind]:
        return self.inner.kinds

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield what is stored at once, then the rest as `inner` answers it."""
        owed: list[tuple[int, str]] = []
        for index, key in enumerate(request_keys(requests, self._pass_number)):
            found = self.store.get(key) if self.mode.reads else None
            if found is None:
                owed.append((index, key))
            else:
                self.hits += 1
                yield index, found
        if not owed:
            return
        async with aclosing(self.inner.run([requests[index] for index, _ in owed])) as answers:
            async for place, response in answers:
                index, key = owed[place]
                self.misses += 1
                if self.mode.writes and _is_whole(response):
                    self.stored += self.store.put(key, response)
                yield index, response

    async def describe(self) -> BackendInfo:
        return await self.inner.describe()

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None:
        await self.inner.check_context(requests, info)

    async def counters(self) -> Counters:
        return await self.inner.counters()

    def facts(self) -> dict[str, Any]:
        """Say for the run record what came from where."""
        counted = {"hits": self.hits, "misses": self.misses, "stored": self.stored}
        return {"mode": self.mode.value, "identity": self.store.digest, **counted}


def _is_whole(response: Response) -> bool:
    """Tell whether the engine came to an end of its own; of failures the store itself keeps none."""
    return not isinstance(response, Generation) or response.finish_reason not in ENDED_BY_ENGINE


def request_keys(requests: Sequence[Request], pass_number: int) -> Iterator[str]:
    """Name each request by all of its fields, the pass, and how often the same one came before it in this pass.

    Without the last, several draws of one question would all become the one that was stored last.
    """
    seen: Counter[str] = Counter()
    for request in requests:
        # Keys of mappings keep their order: a chat template may print them in it.
        asked = json.dumps({"kind": kind_of(request), "request": request}, default=_plain, allow_nan=False)
        seen[asked] += 1
        yield hashlib.sha256(f"{pass_number} {seen[asked]} {asked}".encode()).hexdigest()


def _plain(value: object) -> dict[str, Any]:
    if is_dataclass(value):
        return {part.name: getattr(value, part.name) for part in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a request holds a {type(value).__name__}, which is no JSON")


def check_cacheable(config: ModelConfig, mode: CacheMode, *, saves_baseline: bool = False) -> None:
    """Check that no part of a config needs the very asking that a cache spares.

    Raises ConfigError naming the key.
    """
    if not mode.reads:
        return
    for key in ("prefix_cache_check", "kv_offload_check", "min_acceptance_length"):
        if getattr(config, key):
            raise ConfigError(f"--cache {mode}: {key} measures the server while it answers: leave one of them out")
    if saves_baseline:
        raise ConfigError(f"--cache {mode}: stored answers are no further run of a baseline: use --cache write")
