"""`evaluate_offline`: the questions of a config, asked of a `vllm.LLM` that somebody already has."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.asking import REJECTIONS
from harness.backends.base import BackendInfo
from harness.backends.vllm_offline import VllmOfflineBackend
from harness.config import ModelConfig
from harness.errors import ConfigError, CountersUnavailable, InfrastructureError, RequestsFailed
from harness.gates.threshold import Gate, Verdict, judge_acceptance, judge_accuracy, judge_errors, overall
from harness.metrics import Acceptance, Counters, acceptance, difference
from harness.records import ConfigRecord, EvalResult, now
from harness.tally import Tally
from harness.tasks.base import Task
from harness.tasks.build import build_task

SETTINGS = (
    "accuracy_threshold",
    "tolerance",
    "max_tokens",
    "use_chat_completions",
    "temperature",
    "seed",
    "top_p",
    "top_k",
    "gen_prefix",
    "stop",
    "scorer",
    "reasoning_effort",
    "chat_template_kwargs",
    "fewshot_as_multiturn",
    "dataset",
    "fewshot_dataset",
    "max_concurrency",
    "request_timeout_seconds",
    "min_acceptance_length",
    "max_error_rate",
)
"""The keys of a config that say what is asked and what must hold, beside those that the function names itself."""


def evaluate_offline(
    llm: Any,
    *,
    task: str = "gsm8k",
    num_questions: int | None = None,
    num_fewshot: int = 5,
    data_dir: Path | str | None = None,
    record_dir: Path | str | None = None,
    **settings: Any,
) -> EvalResult:
    """Ask an LLM a task, with the prompts and the scoring of the pytest suite; the LLM stays usable.

    `settings` are further keys of a config, with their names and defaults there; without `accuracy_threshold` only
    an outage is no pass. `record_dir` keeps `samples.jsonl` and `result.json`; by default nothing is written. A
    regression or an outage is the result's verdict, not an exception. Raises ConfigError for settings that do not fit,
    DataUnavailable where the questions cannot be had.
    """
    given = {"task": task, "num_questions": num_questions, "num_fewshot": num_fewshot, **settings}
    config = _config(str(llm.model_config.model), given)
    questions = build_task(config, folder=Path.cwd(), data_dir=Path(data_dir) if data_dir is not None else None)
    backend = VllmOfflineBackend(llm, concurrency=config.max_concurrency, timeout=config.request_timeout_seconds)
    record = ConfigRecord(Path(record_dir)) if record_dir is not None else None
    evaluation = _Evaluation(config=config, task=questions, record=record)
    try:
        fault = _finish(evaluation.run(backend))
        result = evaluation.result(fault)
        if record is not None:
            record.write_result(result)
    finally:
        if record is not None:
            record.close()
    return result


def _config(model: str, given: dict[str, Any]) -> ModelConfig:
    unknown = sorted(set(given) - {"task", "num_questions", "num_fewshot", *SETTINGS})
    if unknown:
        raise ConfigError(f"evaluate_offline takes no {unknown[0]}; known: {', '.join(SETTINGS)}")
    try:
        return ModelConfig.model_validate({"model_name": model, "accuracy_threshold": 0.0, **given})
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
        raise ConfigError(*faults) from error


def _finish(asking: Coroutine[Any, Any, InfrastructureError | None]) -> InfrastructureError | None:
    """Run to the end, beside the event loop that a notebook has already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(asking)
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, asking).result()


def _described(info: BackendInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    return {"engine": info.engine, "version": info.version, "model": info.model, **info.details}


@dataclass(kw_only=True)
class _Evaluation:
    """One evaluation under way; what it has learnt so far survives a fault."""

    config: ModelConfig
    task: Task
    record: ConfigRecord | None
    tally: Tally = field(default_factory=Tally)
    started: str = field(default_factory=now)
    info: BackendInfo | None = None
    counters: Counters | None = None
    counters_fault: str = "the counters were not read"

    async def run(self, backend: VllmOfflineBackend) -> InfrastructureError | None:
        """Ask everything; return the outage that ended it, if one did."""
        try:
            async with backend:
                self.info = await backend.describe()
                await backend.check_context(self.task.requests, self.info)
                before = await self._read_counters(backend)
                await self._ask(backend)
                after = await self._read_counters(backend)
                self.counters = difference(before, after) if before is not None and after is not None else None
        except InfrastructureError as error:
            return error
        return None

    async def _ask(self, backend: VllmOfflineBackend) -> None:
        total = len(self.task.requests)
        self.tally.start()
        try:
            async with aclosing(backend.run(self.task.requests)) as answers:
                async for index, response in answers:
                    sample = self.task.score(index, response)
                    if self.record is not None:
                        self.record.append(sample)
                    self.tally.add(sample)
                    if sample.error is not None and self.tally.same_rejection == min(REJECTIONS, total):
                        why = sample.error["detail"]
                        raise RequestsFailed(f"the first {REJECTIONS} of {total} requests were all rejected: {why}")
        finally:
            self.tally.stop()

    async def _read_counters(self, backend: VllmOfflineBackend) -> Counters | None:
        try:
            return await backend.counters()
        except CountersUnavailable as error:
            self.counters_fault = str(error)
            return None

    def result(self, fault: InfrastructureError | None) -> EvalResult:
        """Judge what was measured, or name the outage."""
        config, tally = self.config, self.tally
        gates, accepted = self._judge() if fault is None else ((), None)
        verdict = overall(gates) if fault is None else Verdict.INFRASTRUCTURE
        deciding = "; ".join(gate.message for gate in gates if gate.verdict is verdict)
        return EvalResult(
            config_id=config.model_name,
            model_name=config.model_name,
            task=self.task.describe(),
            verdict=verdict,
            reason=deciding if fault is None else str(fault),
            counts=tally.counts,
            threshold=config.accuracy_threshold,
            tolerance=config.tolerance,
            floor=float(config.floor),
            correct_by_scorer=tally.correct_by_scorer,
            gates=gates,
            timings=tally.timings(),
            output_tokens=tally.output_tokens,
            acceptance=accepted,
            server=_described(self.info),
            started=self.started,
            finished=now(),
        )

    def _judge(self) -> tuple[tuple[Gate, ...], Acceptance | None]:
        config, counts = self.config, self.tally.counts
        gates = [judge_errors(counts, max_error_rate=config.max_error_rate)]
        if gates[0].verdict is Verdict.PASS:
            gates.append(judge_accuracy(counts, threshold=config.accuracy_threshold, tolerance=config.tolerance))
        minimum = config.min_acceptance_length
        try:
            if self.counters is None:
                raise CountersUnavailable(self.counters_fault)
            accepted = acceptance(self.counters)
        except CountersUnavailable as error:
            if minimum is not None:
                unread = Verdict.INFRASTRUCTURE
                gates.append(Gate(name="acceptance length", verdict=unread, message=str(error), required=minimum))
            return tuple(gates), None
        if minimum is not None:
            gates.append(judge_acceptance(accepted.length if accepted else None, minimum=minimum))
        return tuple(gates), accepted
