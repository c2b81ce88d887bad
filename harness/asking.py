"""Asking one server all questions of one task: samples to the record, figures to the tally, counters around it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from harness.backends.base import BackendInfo, Failure, Response
from harness.config import ModelConfig
from harness.errors import CountersUnavailable, RequestsFailed
from harness.gates.early import EarlyStop
from harness.gates.threshold import Counts
from harness.metrics import Counters, difference
from harness.records import ConfigRecord
from harness.servers.endpoint import CountingBackend, Engine
from harness.tally import Tally
from harness.tasks.base import Sample, Status, Task

SETTLE_SECONDS = 2.0
"""How long the counters may lag behind the last response."""
GAUGE_SECONDS = 1.0
"""How often gauges are looked at while questions are under way."""
REJECTIONS = 8
"""So many first requests rejected for one reason end the run: the rest would be, too."""


class Progress(Protocol):
    """Is told how far an evaluation has come."""

    def stage(self, text: str) -> None: ...

    def answered(self, counts: Counts, total: int) -> None: ...

    def close(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Asking:
    """One pass over a task's questions; what it has learnt so far survives a fault."""

    task: Task
    config: ModelConfig
    engine: Engine
    record: ConfigRecord
    progress: Progress
    number: int = 1
    """Which pass over the questions this is."""
    tally: Tally = field(default_factory=Tally)
    right: dict[int, bool] = field(default_factory=dict)
    """Whether each graded question was answered rightly, by its index."""
    backend: BackendInfo | None = None
    counters: Counters | None = None
    """Counted over this evaluation alone; None where `/metrics` could not be read, for the reason beside it."""
    counters_fault: str | None = None

    @property
    def answers(self) -> list[bool | None]:
        """Right or wrong for each question, None where it got no response."""
        return [self.right.get(index) for index in range(len(self.task.requests))]

    def __post_init__(self) -> None:
        config = self.config
        self.early: EarlyStop | None = None
        if config.stop_early is not None:
            questions = len(self.task.requests)
            self.early = EarlyStop(
                config.stop_early,
                questions=questions,
                threshold=config.accuracy_threshold,
                floor=config.floor,
                alpha=config.alpha,
            )

    async def run(self) -> None:
        """Ask everything, or until the verdict is settled where the config stops early.

        Raises ServerError, ServerDied or RequestsFailed where no verdict can come of it.
        """
        async with self.engine.backend(self.config) as backend:
            self.backend = await backend.describe()
            await backend.check_context(self.task.requests, self.backend)
            before = await self._read_counters(backend)
            async with self._watching_gauges(backend, before):
                await self._ask(backend)
            if before is not None:
                self.counters = await self._counted(backend, before)

    async def _ask(self, backend: CountingBackend) -> None:
        total = len(self.task.requests)
        order = range(total) if self.early is None else self.early.order
        requests = [self.task.requests[index] for index in order]
        self.tally.start()
        try:
            # Leaving the block cancels what is still under way.
            async with aclosing(backend.run(requests)) as answers:
                async for place, response in answers:
                    sample = self.task.score(order[place], response)
                    self._take(sample, response, total)
                    right = None if sample.status is Status.ERROR else sample.correct
                    if self.early is not None and self.early.complete(sample.index, right):
                        break
        finally:
            self.tally.stop()

    def _take(self, sample: Sample, response: Response, total: int) -> None:
        self.record.append(sample, self.number)
        self.tally.add(sample)
        if sample.status is not Status.ERROR:
            self.right[sample.index] = sample.correct
        self.progress.answered(self.tally.counts, total)
        counts = self.tally.counts
        all_rejected = counts.asked == min(REJECTIONS, total) and self.tally.same_rejection == counts.asked
        if isinstance(response, Failure) and all_rejected:
            reason = f"the first {counts.asked} of {total} requests were all rejected: {response.detail}"
            raise RequestsFailed(reason)

    @asynccontextmanager
    async def _watching_gauges(self, backend: CountingBackend, before: Counters | None) -> AsyncIterator[None]:
        """Keep the highest KV-cache use seen; without counters there is nothing to watch."""
        if before is None:
            yield
            return
        watcher = asyncio.create_task(self._watch_gauges(backend))
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch_gauges(self, backend: CountingBackend) -> None:
        while True:
            with contextlib.suppress(CountersUnavailable):
                self.tally.note_kv_cache_use((await backend.counters()).kv_cache_use)
            await asyncio.sleep(GAUGE_SECONDS)

    async def _read_counters(self, backend: CountingBackend) -> Counters | None:
        try:
            return await backend.counters()
        except CountersUnavailable as error:
            self.counters_fault = str(error)
            return None

    async def _counted(self, backend: CountingBackend, before: Counters) -> Counters | None:
        """Read the counters until they hold every answered request, or for as long as they may lag."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            after = await self._read_counters(backend)
            if after is None:
                return None
            try:
                delta = difference(before, after)
            except CountersUnavailable as error:
                self.counters_fault = str(error)
                return None
            if delta.finished >= self.tally.counts.graded or time.monotonic() > deadline:
                return delta
            await asyncio.sleep(0.05)
