"""The one way through: config, server, questions, scores, verdict, record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from harness.backends.base import BackendInfo, Failure, Response
from harness.backends.server import ServerBackend, root_url
from harness.config_lists import ListedConfig
from harness.errors import (
    AccuracyGateError,
    CountersUnavailable,
    GateFailed,
    InfrastructureError,
    RequestsFailed,
)
from harness.gates.threshold import (
    Counts,
    Gate,
    Verdict,
    judge_acceptance,
    judge_accuracy,
    judge_errors,
    overall,
)
from harness.metrics import Acceptance, Counters, acceptance, difference, read_counters
from harness.records import ConfigRecord, EvalResult, Timings, now
from harness.servers.vllm import served_model, vllm_server
from harness.tally import Tally
from harness.tasks.base import Sample, Task
from harness.tasks.build import build_task

SETTLE_SECONDS = 2.0
"""How long the counters may lag behind the last response."""
REJECTIONS = 8
"""So many first requests rejected for one reason end the run: the rest would be, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line says for all configs of a run."""

    base_url: str | None = None
    """A server that already runs; nothing is started."""
    api_key: str | None = None
    """For `base_url` alone; a server of our own gets a random key."""
    data_dir: Path | None = None


class Progress(Protocol):
    """Is told how far an evaluation has come."""

    def stage(self, text: str) -> None: ...

    def answered(self, counts: Counts, total: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server to ask."""

    base_url: str
    model: str
    api_key: str | None
    death: Callable[[], str | None]
    startup: float | None
    description: Mapping[str, Any]


def evaluate(listed: ListedConfig, record: ConfigRecord, options: RunOptions, progress: Progress) -> EvalResult:
    """Evaluate one config and write its record.

    A regression or an outage is the result's verdict, not an exception; what was measured before an outage is kept.
    Raises RecordUnwritable where the record cannot be written. What else comes by, such as KeyboardInterrupt or a test
    time-out, is passed on once the server is stopped and the record written.
    """
    evaluation = _Evaluation(listed=listed, record=record, options=options, progress=progress)
    try:
        evaluation.run()
    except InfrastructureError as error:
        return evaluation.finish(error)
    except BaseException as error:
        evaluation.finish(error)
        raise
    return evaluation.finish(None)


def raise_for_verdict(result: EvalResult) -> None:
    """Raise GateFailed for a regression, InfrastructureError for an outage, nothing for a pass."""
    if result.verdict is Verdict.REGRESSION:
        raise GateFailed(f"{result.config_id}: {result.reason}")
    if result.verdict is Verdict.INFRASTRUCTURE:
        raise InfrastructureError(f"{result.config_id}: {result.reason}")


@dataclass(kw_only=True)
class _Evaluation:
    """One evaluation under way; what it has learnt so far survives a fault."""

    listed: ListedConfig
    record: ConfigRecord
    options: RunOptions
    progress: Progress
    started: str = field(default_factory=now)
    tally: Tally = field(default_factory=Tally)
    task: Task | None = None
    endpoint: Endpoint | None = None
    backend: BackendInfo | None = None
    counters: Counters | None = None
    counters_fault: str | None = None
    stopping: float | None = None

    def run(self) -> None:
        config = self.listed.config
        self.task = build_task(config, folder=self.listed.path.parent, data_dir=self.options.data_dir)
        self.progress.stage("starting")
        with self._serving() as endpoint:
            self.endpoint = endpoint
            self.progress.stage("asking")
            asyncio.run(self._ask(self.task, endpoint))
            self.progress.stage("stopping")

    @contextmanager
    def _serving(self) -> Iterator[Endpoint]:
        if self.options.base_url is not None:
            yield _running_server(self.listed, self.options)
            return
        with vllm_server(self.listed.config, self.record.server_log) as server:
            yield Endpoint(
                base_url=server.base_url,
                model=server.model,
                api_key=server.api_key,
                death=server.death,
                startup=server.startup_seconds,
                description=server.description,
            )
            stop = time.perf_counter()
        self.stopping = time.perf_counter() - stop

    async def _ask(self, task: Task, endpoint: Endpoint) -> None:
        config = self.listed.config
        asked = ServerBackend(
            endpoint.base_url,
            model=endpoint.model,
            api_key=endpoint.api_key,
            concurrency=config.max_concurrency,
            timeout=config.request_timeout_seconds,
            death=endpoint.death,
        )
        async with asked as backend:
            self.backend = await backend.describe()
            before = await self._read_counters(backend)
            requests = task.requests
            self.tally.start()
            try:
                async with aclosing(backend.run(requests)) as answers:
                    async for index, response in answers:
                        self._take(task.score(index, response), response, len(requests))
            finally:
                self.tally.stop()
            if before is not None:
                self.counters = await self._counted(backend, before)

    def _take(self, sample: Sample, response: Response, total: int) -> None:
        self.record.append(sample)
        self.tally.add(sample)
        self.progress.answered(self.tally.counts, total)
        if isinstance(response, Failure):
            _stop_if_all_rejected(self.tally, response, total)

    async def _read_counters(self, backend: ServerBackend) -> Counters | None:
        text = await backend.metrics()
        try:
            if isinstance(text, Failure):
                raise CountersUnavailable(text.detail)
            return read_counters(text)
        except CountersUnavailable as error:
            self.counters_fault = str(error)
            return None

    async def _counted(self, backend: ServerBackend, before: Counters) -> Counters | None:
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

    def finish(self, fault: BaseException | None) -> EvalResult:
        """Judge, or note the fault, and write the record."""
        self.progress.close()
        result = self._result(fault)
        try:
            self.record.write_result(result)
        finally:
            self.record.close()
        return result

    def _result(self, fault: BaseException | None) -> EvalResult:
        config = self.listed.config
        gates, accepted = self._judge() if fault is None else ((), None)
        verdict, reason = _decide(gates, fault)
        return EvalResult(
            config_id=self.listed.id,
            model_name=config.model_name,
            task=self.task.describe() if self.task else {"name": config.task},
            verdict=verdict,
            reason=reason,
            counts=self.tally.counts,
            threshold=config.accuracy_threshold,
            tolerance=config.tolerance,
            floor=float(config.floor),
            gates=gates,
            timings=self._timings(),
            output_tokens=self.tally.output_tokens,
            acceptance=accepted,
            counters=_counters_json(self.counters),
            server=self._server(),
            started=self.started,
            finished=now(),
        )

    def _judge(self) -> tuple[tuple[Gate, ...], Acceptance | None]:
        config, counts = self.listed.config, self.tally.counts
        gates = [judge_errors(counts, max_error_rate=config.max_error_rate)]
        if gates[0].verdict is Verdict.PASS:
            gates.append(judge_accuracy(counts, threshold=config.accuracy_threshold, tolerance=config.tolerance))
        minimum = config.min_acceptance_length
        try:
            if self.counters is None:
                raise CountersUnavailable(self.counters_fault or "no counters were read")
            accepted = acceptance(self.counters)
        except CountersUnavailable as error:
            if minimum is None:
                return tuple(gates), None
            gates.append(
                Gate(
                    name="acceptance length",
                    verdict=Verdict.INFRASTRUCTURE,
                    message=str(error),
                    required=minimum,
                )
            )
            return tuple(gates), None
        if minimum is not None:
            gates.append(judge_acceptance(accepted.length if accepted else None, minimum=minimum))
        return tuple(gates), accepted

    def _timings(self) -> Timings:
        startup = self.endpoint.startup if self.endpoint else None
        return replace(self.tally.timings(), startup=startup, stopping=self.stopping)

    def _server(self) -> dict[str, Any]:
        described = dict(self.endpoint.description) if self.endpoint else {}
        if self.backend is not None:
            described |= {
                "version": self.backend.version,
                "model": self.backend.model,
                **self.backend.details,
            }
        return described


def _running_server(listed: ListedConfig, options: RunOptions) -> Endpoint:
    assert options.base_url is not None
    root = root_url(options.base_url)
    return Endpoint(
        base_url=root,
        model=served_model(listed.config),
        api_key=options.api_key,
        death=lambda: None,
        startup=None,
        description={"base_url": root, "started_by": "somebody else"},
    )


def _stop_if_all_rejected(tally: Tally, last: Failure, total: int) -> None:
    counts = tally.counts
    if counts.asked == min(REJECTIONS, total) and tally.same_rejection == counts.asked:
        raise RequestsFailed(f"the first {counts.asked} of {total} requests were all rejected: {last.detail}")


def _decide(gates: tuple[Gate, ...], fault: BaseException | None) -> tuple[Verdict, str]:
    if isinstance(fault, KeyboardInterrupt):
        return Verdict.INFRASTRUCTURE, f"interrupted{f': {fault}' if str(fault) else ''}"
    if fault is not None:
        name = "" if isinstance(fault, AccuracyGateError) else f"{type(fault).__name__}: "
        return Verdict.INFRASTRUCTURE, f"{name}{fault}"
    verdict = overall(gates)
    deciding = [gate.message for gate in gates if gate.verdict is verdict]
    return verdict, "; ".join(deciding)


def _counters_json(counters: Counters | None) -> dict[str, Any] | None:
    if counters is None:
        return None
    return {
        "totals": dict(counters.totals),
        "accepted_by_position": {str(k): v for k, v in sorted(counters.by_position.items())},
        "finished": dict(counters.by_finish_reason),
    }
