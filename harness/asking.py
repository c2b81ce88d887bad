"""Asking one server all questions of one task: samples to the record, figures to the tally, counters around it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.backends.base import BackendInfo, Failure, Response
from harness.config import ModelConfig
from harness.errors import CountersUnavailable, RequestsFailed
from harness.gates.early import EarlyStop
from harness.gates.threshold import Counts
from harness.metrics import Counters, difference
from harness.records import ConfigRecord
from harness.resuming import Asked
from harness.reuse import Reuse
from harness.sample_store import STORED
from harness.servers.endpoint import CountingBackend, Engine
from harness.tally import Tally
from harness.tasks.base import Sample, Status, Task

SETTLE_SECONDS = 2.0
"""How long the counters may lag behind the last response."""
GAUGE_SECONDS = 1.0
"""How often gauges are looked at while questions are under way."""
REJECTIONS = 8
"""So many first requests rejected for one reason end the run: the rest would be, too."""


def server_facts(
    config: ModelConfig, engine: Engine | None, info: BackendInfo | None, gpus: Sequence[str]
) -> dict[str, Any]:
    """Say what answers, as records keep it: what was started, and what it says of itself."""
    described = {**engine.description, "gpus": list(gpus)} if engine else {}
    told = {"version": info.version, "model": info.model, **info.details} if info else {}
    return {"backend": config.backend} | described | told


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
    config_id: str
    engine: Engine
    record: ConfigRecord
    progress: Progress
    number: int = 1
    """Which pass over the questions this is."""
    reuse: Reuse
    """What may be taken from earlier runs."""
    tally: Tally = field(default_factory=Tally)
    right: dict[int, bool] = field(default_factory=dict)
    """Whether each graded question was answered rightly, by its index."""
    values: dict[int, float] = field(default_factory=dict)
    """The score of each question whose task has scores, by its index."""
    measures: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What a score was made of, likewise."""
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
            owed = self._begin(self.backend)
            before = await self._read_counters(backend)
            with self.reuse.answering(backend, self.backend, self.number) as answering:
                async with self._watching_gauges(backend, before):
                    await self._ask(answering, owed)
            if before is not None:
                self.counters = await self._counted(backend, before)

    def _begin(self, info: BackendInfo) -> list[int]:
        """Take over what an interrupted run has answered, and list what is to be asked, in order."""
        total = len(self.task.requests)
        order = list(range(total) if self.early is None else self.early.order)
        if self.number > 1:
            return order
        asked = Asked(
            config_id=self.config_id,
            model_name=self.config.model_name,
            task=self.task.describe(),
            server=server_facts(self.config, self.engine, info, self.reuse.gpus),
        )
        resumed = self.reuse.begin(self.task, asked, self.record)
        for index in order:
            sample = resumed.samples.get(index)
            if sample is not None and self._take(sample, total, reused=True):
                return []
        return [index for index in order if index not in resumed.samples]

    async def _ask(self, backend: CountingBackend, owed: Sequence[int]) -> None:
        total = len(self.task.requests)
        requests = [self.task.requests[index] for index in owed]
        self.tally.start()
        try:
            # Leaving the block cancels what is still under way.
            async with aclosing(backend.run(requests)) as answers:
                async for place, response in answers:
                    sample = self.task.score(owed[place], response)
                    settled = self._take(sample, total, reused=response.attempts == STORED)
                    self._refuse_rejections(response, total)
                    if settled:
                        break
        finally:
            self.tally.stop()

    def _take(self, sample: Sample, total: int, *, reused: bool) -> bool:
        """Keep a sample; say whether it settles the verdict."""
        self.record.append(sample, self.number)
        self.tally.add(sample, reused=reused)
        if sample.status is not Status.ERROR:
            self.right[sample.index] = sample.correct
            if sample.value is not None:
                self.values[sample.index] = sample.value
            if sample.measures is not None:
                self.measures[sample.index] = sample.measures
        self.progress.answered(self.tally.counts, total)
        right = None if sample.status is Status.ERROR else sample.correct
        return self.early is not None and self.early.complete(sample.index, right)

    def _refuse_rejections(self, response: Response, total: int) -> None:
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
            if delta.finished >= self.tally.counts.graded - self.tally.counts.reused or time.monotonic() > deadline:
                return delta
            await asyncio.sleep(0.05)
