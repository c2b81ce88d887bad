"""The one way through: config, server, questions, scores, verdict, record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness.against_baseline import baseline_for, changed_answers, facts, saved_baseline
from harness.asking import Asking, Progress, server_facts
from harness.baselines import Baseline, add_to, baseline_of
from harness.config_lists import ListedConfig
from harness.errors import AccuracyGateError, GateFailed, GpusMissing, InfrastructureError, OutOfTime
from harness.gates.threshold import Gate, Verdict, overall
from harness.judging import judge_answers, judge_speculation, measures_of
from harness.metrics import Acceptance
from harness.records import ConfigRecord, EvalResult, Timings, now, read_samples
from harness.reuse import Reuse
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
        self.serving.say = self.progress.stage
        self.progress.stage("starting")
        self.engine = self.serving.engine()
        self.progress.stage("asking")
        self.asking = Asking(
            task=self.task,
            config=config,
            config_id=self.listed.id,
            engine=self.engine,
            record=self.record,
            progress=self.progress,
            reuse=self._reuse(self.engine),
        )
        self.passes = Passes(first=self.asking, baseline=self.baseline)
        asyncio.run(self._ask_in_time(self.passes))

    def _reuse(self, engine: Engine) -> Reuse:
        options = self.options
        return Reuse(
            config=self.listed.config,
            cache=options.cache,
            serve_command=options.serve_command,
            gpus=tuple(self.serving.gpu_names),
            resume=options.resume / self.listed.folder if options.resume is not None else None,
            described=lambda: engine.description,
        )

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
        perplexity = config.task == "perplexity"
        return EvalResult(
            config_id=self.listed.id,
            model_name=config.model_name,
            task=self.task.describe() if self.task else {"name": config.task},
            verdict=verdict,
            reason=reason,
            counts=tally.counts,
            threshold=None if perplexity else config.accuracy_threshold,
            tolerance=None if perplexity else config.tolerance,
            floor=None if perplexity else float(config.floor),
            measures=self._measures(),
            correct_by_scorer=tally.correct_by_scorer,
            stopped_early=self._stopped_early(),
            against_baseline=self._against_baseline(),
            gates=gates,
            timings=self._timings(tally),
            output_tokens=tally.output_tokens,
            reused=self.asking.reuse.facts if self.asking else {},
            acceptance=accepted,
            counters=_counters_json(self.asking),
            server=self._server(),
            started=self.started,
            finished=now(),
        )

    def _judge(self, asking: Asking) -> tuple[tuple[Gate, ...], Acceptance | None]:
        speculation, accepted = judge_speculation(asking)
        further = self.passes.gates() if self.passes else ()
        return (*self.serving.rpc_gates, *judge_answers(asking), *further, *speculation), accepted

    def _measures(self) -> Mapping[str, float]:
        return measures_of(self.asking) if self.asking else {}

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
        info = self.asking.backend if self.asking else None
        return server_facts(self.listed.config, self.engine, info, self.serving.gpu_names) | self.serving.gpu_facts


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
