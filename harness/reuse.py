"""What an evaluation takes from earlier ones: answers of the sample cache, samples of an interrupted run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.backends.base import BackendInfo
from harness.backends.cached import CachedBackend, CacheMode
from harness.config import ModelConfig
from harness.records import ConfigRecord
from harness.resuming import Asked, Resumed, resumable
from harness.sample_identity import identity_of
from harness.sample_store import SampleStore, samples_folder
from harness.servers.endpoint import CountingBackend
from harness.tasks.base import Task


@dataclass(kw_only=True, eq=False)
class Reuse:
    """What may be reused for one config; nothing unless it was asked for."""

    config: ModelConfig
    cache: CacheMode | None = None
    serve_command: str | None = None
    gpus: tuple[str, ...] = ()
    resume: Path | None = None
    """The config's folder in the interrupted run."""
    described: Callable[[], Mapping[str, Any]] = dict
    """What the engine said of itself at its start."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What came from where, for the record; empty where all was asked."""

    @contextmanager
    def answering(self, backend: CountingBackend, info: BackendInfo, number: int) -> Iterator[CountingBackend]:
        """Put the cache before a backend that is entered already, for pass `number`.

        Raises ConfigError where it cannot be told what answers.
        """
        if self.cache is None:
            yield backend
            return
        identity = identity_of(
            self.config,
            self.described(),
            info,
            environ=os.environ,
            serve_command=self.serve_command,
            gpus=self.gpus,
        )
        with SampleStore(samples_folder(), identity) as store:
            cached = CachedBackend(backend, store, self.cache, pass_number=number)
            try:
                yield cached
            finally:
                name = "cache" if number == 1 else f"cache, pass {number}"
                self.facts[name] = cached.facts()

    def begin(self, task: Task, asked: Asked, record: ConfigRecord) -> Resumed:
        """Note what is about to be asked, and find what an interrupted run has answered of it already.

        Raises ConfigError where that run asked something else, DataUnavailable where its record is damaged.
        """
        resumed = Resumed(samples={}, owed=tuple(range(len(task.requests))))
        if self.resume is not None:
            resumed = resumable(self.resume, task, asked)
            self.facts["resumed"] = {"from": str(self.resume), "samples": len(resumed.samples)}
        asked.write(record.folder)
        return resumed
