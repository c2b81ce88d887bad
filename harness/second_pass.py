"""Asking again on the same server: to be sure of a loss, with a warm prefix cache, from the offloaded KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from harness.against_baseline import Comparison, compare
from harness.asking import Asking
from harness.backends.base import GenerateRequest
from harness.baselines import Baseline
from harness.errors import RequestsFailed
from harness.gates.repeat import CacheUse, flips_of, judge_kv_offload, judge_prefix_cache
from harness.gates.threshold import Gate, Verdict, judge_errors
from harness.judging import judge_answers
from harness.metrics import EXTERNAL_HITS, EXTERNAL_QUERIES, PREFIX_HITS, PREFIX_QUERIES
from harness.servers.cache_control import CacheControl
from harness.servers.endpoint import Endpoint


@dataclass(kw_only=True)
class Passes:
    """The pass that every config has and those that its cache checks add; what they have learnt survives a fault."""

    first: Asking
    baseline: Baseline | None = None
    comparison: Comparison | None = None
    """Against the baseline, over the first pass and its repeats."""
    warm: Asking | None = None
    """Right after the first: its prompts are still in the prefix cache."""
    offloaded: Asking | None = None
    """After the GPU's prefix cache was dropped: the prompts are in the external cache alone."""
    _repeats: list[Asking] = field(default_factory=list)
    _further: list[Asking] = field(default_factory=list)
    _told: str = ""

    async def run(self) -> None:
        """Ask once, and again for each check, unless too many requests failed for any verdict.

        Raises what Asking does, and ServerError where the caches cannot be controlled.
        """
        config = self.first.config
        async with AsyncExitStack() as stack:
            control = None
            if config.kv_offload_check:
                asked = self.first.task.requests[0]
                server = self.first.engine
                assert isinstance(server, Endpoint), "the config refuses kv_offload_check without a server"
                assert isinstance(asked, GenerateRequest), (
                    "the config refuses kv_offload_check where nothing is written"
                )
                control = await stack.enter_async_context(CacheControl(server, config, asked))
            await self.first.run()
            if self._errors(self.first).verdict is not Verdict.PASS:
                return
            if self.baseline is not None:
                await self._compare(self.baseline)
            if config.prefix_cache_check:
                self.warm = self._another()
                await self.warm.run()
            if control is not None:
                self.first.progress.stage("waiting for the KV offload")
                self._told = await control.await_offload()
                await control.drop_prefix_cache()
                self.offloaded = self._another()
                await self.offloaded.run()

    async def _compare(self, baseline: Baseline) -> None:
        """Look at the first pass, and where that is unclear again after all repeats that the config allows."""
        config = self.first.config
        try:
            self.comparison = self._compared(baseline, [self.first])
            while self.comparison.unclear and len(self._repeats) + 1 < config.max_repeats:
                repeat = self._another()
                self._repeats.append(repeat)
                await repeat.run()
            if self._repeats:
                self.comparison = self._compared(baseline, [self.first, *self._repeats])
        except ValueError as error:
            raise RequestsFailed(f"nothing can be compared with the baseline: {error}") from error

    def _compared(self, baseline: Baseline, askings: Sequence[Asking]) -> Comparison:
        answers, values = [asking.answers for asking in askings], [asking.values for asking in askings]
        return compare(baseline, answers, self.first.config, values=values)

    def how_far(self) -> str:
        """Say how many questions of which pass were asked."""
        current = self._further[-1] if self._further else self.first
        text = f"{current.tally.counts.asked} of {len(current.task.requests)} questions"
        return f"{text} of pass {current.number}" if self._further else text

    def gates(self) -> tuple[Gate, ...]:
        """Judge the further passes; none without a check, or where the first pass is void."""
        checked = [asking for asking in self._further if asking not in self._repeats]
        gates = [gate for asking in checked for gate in self._floor_gates(asking)]
        gates += [self._named(self._errors(repeat), repeat) for repeat in self._repeats]
        if self.comparison is not None:
            gates += self.comparison.gates(self.first.config)
        if self.warm is not None:
            used = _cache_use(self.warm, PREFIX_QUERIES, PREFIX_HITS)
            gates.append(judge_prefix_cache(flips_of(self.first.right, self.warm.right), used))
        if self.offloaded is not None:
            used = _cache_use(self.offloaded, EXTERNAL_QUERIES, EXTERNAL_HITS)
            flips = flips_of(self.first.right, self.offloaded.right)
            gates.append(judge_kv_offload(flips, used, told=self._told))
        return tuple(gates)

    def _another(self) -> Asking:
        first = self.first
        another = Asking(
            task=first.task,
            config=first.config,
            config_id=first.config_id,
            reuse=first.reuse,
            engine=first.engine,
            record=first.record,
            progress=first.progress,
            number=len(self._further) + 2,
        )
        self._further.append(another)
        another.progress.stage("asking again")
        return another

    def _floor_gates(self, asking: Asking) -> tuple[Gate, ...]:
        return tuple(self._named(gate, asking) for gate in judge_answers(asking))

    def _named(self, gate: Gate, asking: Asking) -> Gate:
        name = f"pass {asking.number}"
        return replace(gate, name=f"{gate.name}, {name}", message=f"{name}: {gate.message}")

    def _errors(self, asking: Asking) -> Gate:
        return judge_errors(asking.tally.counts, max_error_rate=asking.config.max_error_rate)


def _cache_use(asking: Asking, queries: str, hits: str) -> CacheUse:
    if asking.counters is None:
        return CacheUse(queries=None, hits=None, fault=asking.counters_fault or "no counters were read")
    totals = asking.counters.totals
    return CacheUse(queries=totals.get(queries), hits=totals.get(hits))
