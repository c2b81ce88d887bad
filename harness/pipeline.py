"""The one way through: config, server, questions, scores, verdict, record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.asking import Asking, Progress
from harness.backends.server import root_url
from harness.config_lists import ListedConfig
from harness.errors import (
    AccuracyGateError,
    CountersUnavailable,
    GateFailed,
    GpusMissing,
    InfrastructureError,
    OutOfTime,
)
from harness.gates.threshold import Gate, Verdict, judge_acceptance, judge_accuracy, judge_errors, overall
from harness.gpu_memory import GpuMemory
from harness.gpus import Gpu, visible_environment
from harness.metrics import Acceptance, acceptance
from harness.placement import chosen_gpus
from harness.records import ConfigRecord, EvalResult, Timings, now
from harness.servers.endpoint import Endpoint
from harness.servers.rpc_checks import run_rpc_checks
from harness.servers.vllm import served_model, vllm_server
from harness.tally import Tally
from harness.tasks.base import Task
from harness.tasks.build import build_task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line says for all configs of a run."""

    base_url: str | None = None
    """A server that already runs; nothing is started."""
    api_key: str | None = None
    """For `base_url` alone; a server of our own gets a random key."""
    data_dir: Path | None = None
    serve_command: str | None = None
    """How servers are started where a config does not say."""
    gpu_choice: str | None = None
    """--gpus: which of the visible GPUs servers may use."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that servers may use."""
    require_gpus: bool = False
    """A config that needs more GPUs than there are fails instead of being skipped."""
    memory: GpuMemory = field(default_factory=GpuMemory)
    keep_server: bool = False
    """Leave the server running at the end, and say how to reach and stop it."""


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
    deadline: float = field(init=False)
    task: Task | None = None
    endpoint: Endpoint | None = None
    asking: Asking | None = None
    rpc_gates: tuple[Gate, ...] = ()
    stopping: float | None = None
    gpu_memory: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit = self.listed.config.max_seconds
        self.deadline = time.monotonic() + limit if limit is not None else float("inf")

    def run(self) -> None:
        config = self.listed.config
        if self.listed.unmet is not None:
            raise GpusMissing(self.listed.unmet)
        self.task = build_task(config, folder=self.listed.path.parent, data_dir=self.options.data_dir)
        self.progress.stage("starting")
        with self._serving() as endpoint:
            self.endpoint = endpoint
            self.rpc_gates = run_rpc_checks(config.startup_rpc_checks, endpoint)
            self.progress.stage("asking")
            self.asking = Asking(
                task=self.task, config=config, endpoint=endpoint, record=self.record, progress=self.progress
            )
            asyncio.run(self._ask_in_time(self.asking))
            self.progress.stage("stopping")

    @contextmanager
    def _serving(self) -> Iterator[Endpoint]:
        config, options = self.listed.config, self.options
        if options.base_url is not None:
            root = root_url(options.base_url)
            described = {"base_url": root, "started_by": "somebody else"}
            yield Endpoint(base_url=root, model=served_model(config), api_key=options.api_key, description=described)
            return
        gpus = chosen_gpus(options.gpus, config.gpus)
        self.gpu_memory["before"] = options.memory.ready(gpus)
        serving = vllm_server(
            config,
            self.record.server_log,
            serve_command=options.serve_command,
            env=visible_environment(gpus) if options.gpu_choice is not None else {},
            keep=options.keep_server,
            within=self.deadline - time.monotonic(),
        )
        with serving as endpoint:
            yield endpoint
            stop = time.perf_counter()
        self.stopping = time.perf_counter() - stop
        self.gpu_memory["after"] = options.memory.used(gpus)

    async def _ask_in_time(self, asking: Asking) -> None:
        limit = self.listed.config.max_seconds
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, self.deadline - time.monotonic())):
                await asking.run()
        except TimeoutError as error:
            done = asking.tally.counts.asked
            total = len(asking.task.requests)
            raise OutOfTime(f"max_seconds: {limit:g} s were over after {done} of {total} questions") from error

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
        tally = self.asking.tally if self.asking else Tally()
        gates, accepted = self._judge(self.asking) if fault is None and self.asking else ((), None)
        verdict, reason = _decide(gates, fault)
        return EvalResult(
            config_id=self.listed.id,
            model_name=config.model_name,
            task=self.task.describe() if self.task else {"name": config.task},
            verdict=verdict,
            reason=reason,
            counts=tally.counts,
            threshold=config.accuracy_threshold,
            tolerance=config.tolerance,
            floor=float(config.floor),
            correct_by_scorer=tally.correct_by_scorer,
            gates=gates,
            timings=self._timings(tally),
            output_tokens=tally.output_tokens,
            acceptance=accepted,
            counters=_counters_json(self.asking),
            server=self._server(),
            started=self.started,
            finished=now(),
        )

    def _judge(self, asking: Asking) -> tuple[tuple[Gate, ...], Acceptance | None]:
        config, counts = self.listed.config, asking.tally.counts
        gates = [*self.rpc_gates, judge_errors(counts, max_error_rate=config.max_error_rate)]
        if gates[-1].verdict is Verdict.PASS:
            gates.append(judge_accuracy(counts, threshold=config.accuracy_threshold, tolerance=config.tolerance))
        minimum = config.min_acceptance_length
        try:
            if asking.counters is None:
                raise CountersUnavailable(asking.counters_fault or "no counters were read")
            accepted = acceptance(asking.counters)
        except CountersUnavailable as error:
            if minimum is not None:
                unread = Verdict.INFRASTRUCTURE
                gates.append(Gate(name="acceptance length", verdict=unread, message=str(error), required=minimum))
            return tuple(gates), None
        if minimum is not None:
            gates.append(judge_acceptance(accepted.length if accepted else None, minimum=minimum))
        return tuple(gates), accepted

    def _timings(self, tally: Tally) -> Timings:
        startup = self.endpoint.startup_seconds if self.endpoint else None
        return replace(tally.timings(), startup=startup, stopping=self.stopping)

    def _server(self) -> dict[str, Any]:
        described = dict(self.endpoint.description) if self.endpoint else {}
        backend = self.asking.backend if self.asking else None
        if self.gpu_memory.get("before"):
            described["gpu_memory_bytes"] = self.gpu_memory
        return described | ({"version": backend.version, "model": backend.model, **backend.details} if backend else {})


def _decide(gates: tuple[Gate, ...], fault: BaseException | None) -> tuple[Verdict, str]:
    if isinstance(fault, KeyboardInterrupt):
        return Verdict.INFRASTRUCTURE, f"interrupted{f': {fault}' if str(fault) else ''}"
    if fault is not None:
        name = "" if isinstance(fault, AccuracyGateError) else f"{type(fault).__name__}: "
        return Verdict.INFRASTRUCTURE, f"{name}{fault}"
    verdict = overall(gates)
    deciding = [gate.message for gate in gates if gate.verdict is verdict]
    return verdict, "; ".join(deciding)


def _counters_json(asking: Asking | None) -> Mapping[str, Any] | None:
    if asking is None or asking.counters is None:
        return None
    counters = asking.counters
    return {
        "totals": dict(counters.totals),
        "accepted_by_position": {str(k): v for k, v in sorted(counters.by_position.items())},
        "finished": dict(counters.by_finish_reason),
        "prefix_cache_hit_rate": counters.prefix_cache_hit_rate,
        "peak_kv_cache_use": asking.tally.peak_kv_cache_use,
    }
