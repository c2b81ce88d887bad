"""The one way through: config, server, questions, scores, verdict, record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness.against_baseline import baseline_for, changed_answers, facts, saved_baseline
from harness.asking import Asking, Progress
from harness.baselines import Baseline, add_to, baseline_of
from harness.config_lists import ListedConfig
from harness.errors import (
    AccuracyGateError,
    CountersUnavailable,
    GateFailed,
    GpusMissing,
    InfrastructureError,
    OutOfTime,
)
from harness.gates.early import judge_stop
from harness.gates.threshold import Gate, Verdict, judge_acceptance, judge_accuracy, judge_errors, overall
from harness.metrics import Acceptance, acceptance
from harness.records import ConfigRecord, EvalResult, Timings, now, read_samples
from harness.second_pass import Passes
from harness.servers.endpoint import Engine
from harness.serving import RunOptions, Serving
from harness.tally import Tally
from harness.tasks.base import Task
from harness.tasks.build import build_task


def evaluate(
    listed: ListedConfig, record: ConfigRecord, options: RunOptions, progress: Progress, serving: Serving | None = None
) -> EvalResult:
    """Evaluate one task of one config and write its record.

    `serving` is the server of the config's other tasks, which the caller stops; by default one is started and stopped.

    A regression or an outage is the result's verdict, not an exception; what was measured before an outage is kept.
    Raises RecordUnwritable where the record cannot be written. What else comes by, such as KeyboardInterrupt or a test
    time-out, is passed on once the server is stopped and the record written.
    """
    if serving is None:
        with Serving(listed.config, record.server_log, options) as own:
            return evaluate(listed, record, options, progress, own)
    evaluation = _Evaluation(listed=listed, record=record, options=options, progress=progress, serving=serving)
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
    serving: Serving
    started: str = field(default_factory=now)
    task: Task | None = None
    engine: Engine | None = None
    asking: Asking | None = None
    baseline: Baseline | None = None
    passes: Passes | None = None

    def run(self) -> None:
        config = self.listed.config
        if self.listed.unmet is not None:
            raise GpusMissing(self.listed.unmet)
        self.task = build_task(config, folder=self.listed.path.parent, data_dir=self.options.data_dir)
        self.baseline = baseline_for(config, self.listed.path.parent, self.task)
        self.progress.stage("starting")
        self.engine = self.serving.engine()
        self.progress.stage("asking")
        self.asking = Asking(
            task=self.task, config=config, engine=self.engine, record=self.record, progress=self.progress
        )
        self.passes = Passes(first=self.asking, baseline=self.baseline)
        asyncio.run(self._ask_in_time(self.passes))

    async def _ask_in_time(self, passes: Passes) -> None:
        limit = self.listed.config.max_seconds
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, self.serving.seconds_left())):
                await passes.run()
        except TimeoutError as error:
            raise OutOfTime(f"max_seconds: {limit:g} s were over after {passes.how_far()}") from error

    def finish(self, fault: BaseException | None) -> EvalResult:
        """Judge, or note the fault, and write the record."""
        self.progress.close()
        result = self._result(fault)
        try:
            self.record.write_result(result)
        finally:
            self.record.close()
        self._write_flips()
        self._save_baseline(result)
        return result

    def _save_baseline(self, result: EvalResult) -> None:
        if self.options.save_baseline is None or result.verdict is not Verdict.PASS:
            return
        samples = sorted(read_samples(self.record.folder / "samples.jsonl"), key=lambda sample: sample["index"])
        add_to(saved_baseline(self.options.save_baseline, self.listed), baseline_of(result, [samples]))

    def _write_flips(self) -> None:
        if self.passes is None or self.passes.comparison is None or self.baseline is None:
            return
        samples = list(read_samples(self.record.folder / "samples.jsonl"))
        self.record.write_flips(changed_answers(self.passes.comparison, self.baseline, samples))

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
            stopped_early=self._stopped_early(),
            against_baseline=self._against_baseline(),
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
        gates = [*self.serving.rpc_gates, judge_errors(counts, max_error_rate=config.max_error_rate)]
        if gates[-1].verdict is Verdict.PASS:
            gates.append(self._judge_accuracy(asking))
        gates.extend(self.passes.gates() if self.passes else ())
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

    def _judge_accuracy(self, asking: Asking) -> Gate:
        config = self.listed.config
        if asking.early is not None and asking.early.stop is not None:
            return judge_stop(asking.early.stop, floor=config.floor)
        threshold, tolerance = config.accuracy_threshold, config.tolerance
        return judge_accuracy(asking.tally.counts, threshold=threshold, tolerance=tolerance)

    def _timings(self, tally: Tally) -> Timings:
        startup = self.engine.startup_seconds if self.engine else None
        return replace(tally.timings(), startup=startup)

    def _stopped_early(self) -> Mapping[str, Any] | None:
        early = self.asking.early if self.asking else None
        return asdict(early.stop) if early is not None and early.stop is not None else None

    def _against_baseline(self) -> Mapping[str, Any] | None:
        if self.passes is None or self.passes.comparison is None or self.baseline is None:
            return None
        return facts(self.passes.comparison, self.baseline)

    def _server(self) -> dict[str, Any]:
        described = {**self.engine.description, "gpus": self.serving.gpu_names} if self.engine else {}
        backend = self.asking.backend if self.asking else None
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
