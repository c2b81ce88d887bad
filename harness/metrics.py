"""Prometheus text to counters, and counters to acceptance length; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from harness.errors import CountersUnavailable

K = TypeVar("K")

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
SUCCESSES = "vllm:request_success"
PREFIX_QUERIES = "vllm:prefix_cache_queries"
PREFIX_HITS = "vllm:prefix_cache_hits"
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
OFFLOAD_STORES = ("vllm:kv_offload_store_bytes", "vllm:simple_kv_offload_save_outcomes")
"""What vLLM's two offloading connectors count of their stores."""
PREEMPTIONS = "vllm:num_preemptions"
KV_CACHE_USE = "vllm:kv_cache_usage_perc"
SGLANG_LENGTH = "sglang:spec_accept_length"
SGLANG_FINISHED = "sglang:num_requests"
SGLANG_CACHE_USE = "sglang:token_usage"
PROMPT_TOKENS, GENERATION_TOKENS, CACHED_TOKENS = (
    "sglang:prompt_tokens",
    "sglang:generation_tokens",
    "sglang:cached_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters of one reading of `/metrics`, summed over engines; a series that is not there is not in the mapping."""

    totals: Mapping[str, float] = field(default_factory=dict)
    by_position: Mapping[int, float] = field(default_factory=dict)
    """Accepted tokens at each draft position, from 0."""
    by_finish_reason: Mapping[str, float] = field(default_factory=dict)
    kv_cache_use: float | None = None
    """A gauge, 0 to 1: the fullest engine's share at this moment."""
    sglang_length: float | None = None
    """A gauge: SGLang's own acceptance length, over its last steps; it has no counters."""

    @property
    def finished(self) -> float:
        return sum(self.by_finish_reason.values())

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache; None where nothing was looked up."""
        queries = self.totals.get(PREFIX_QUERIES, 0.0)
        return self.totals.get(PREFIX_HITS, 0.0) / queries if queries else None


_SUMMED = frozenset(
    {
        *(DRAFTS, DRAFT_TOKENS, ACCEPTED, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS),
        *(EXTERNAL_QUERIES, EXTERNAL_HITS, *OFFLOAD_STORES),
        *(PROMPT_TOKENS, GENERATION_TOKENS, CACHED_TOKENS),
    }
)
_GAUGES = frozenset({KV_CACHE_USE, SGLANG_CACHE_USE, SGLANG_LENGTH})


def read_counters(text: str) -> Counters:
    """Read the counters this project uses, by exact name with or without `_total`; `_created` times are not counters.

    Raises CountersUnavailable where the text is empty or no Prometheus exposition, or a counter is not a number.
    """
    if not text.strip():
        raise CountersUnavailable("/metrics answered with nothing")
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    by_reason: dict[str, float] = {}
    gauges: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name in _SUMMED:
                    totals[name] = totals.get(name, 0.0) + _number(sample.name, sample.value)
                elif name == PER_POSITION:
                    position = int(sample.labels["position"])
                    by_position[position] = by_position.get(position, 0.0) + _number(sample.name, sample.value)
                elif name == SUCCESSES:
                    reason = sample.labels.get("finished_reason", "unknown")
                    by_reason[reason] = by_reason.get(reason, 0.0) + _number(sample.name, sample.value)
                elif name == SGLANG_FINISHED:
                    by_reason["unknown"] = by_reason.get("unknown", 0.0) + _number(sample.name, sample.value)
                elif sample.name in _GAUGES:
                    gauges[sample.name] = max(gauges.get(sample.name, 0.0), _number(sample.name, sample.value))
    except (ValueError, KeyError) as error:
        raise CountersUnavailable(f"/metrics is no Prometheus text: {error}; it begins {text[:80]!r}") from error
    if PROMPT_TOKENS in totals:
        # SGLang looks up every prompt token, and tells of those found only once there are any.
        totals.update({PREFIX_QUERIES: totals[PROMPT_TOKENS], PREFIX_HITS: totals.get(CACHED_TOKENS, 0.0)})
    return Counters(
        totals=totals,
        by_position=by_position,
        by_finish_reason=by_reason,
        kv_cache_use=gauges.get(KV_CACHE_USE, gauges.get(SGLANG_CACHE_USE)),
        sglang_length=gauges.get(SGLANG_LENGTH),
    )


def _number(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise CountersUnavailable(f"/metrics gives {name} as {value}")
    return value


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted between two readings.

    Raises CountersUnavailable where a counter went backwards: the server was restarted in between.
    """
    return Counters(
        totals=_minus(after.totals, before.totals),
        by_position=_minus(after.by_position, before.by_position),
        by_finish_reason=_minus(after.by_finish_reason, before.by_finish_reason),
        kv_cache_use=after.kv_cache_use,
        sglang_length=after.sglang_length,
    )


def _minus(after: Mapping[K, float], before: Mapping[K, float]) -> dict[K, float]:
    gone = [key for key in before if key not in after]
    backwards = gone + [key for key, value in after.items() if value < before.get(key, 0.0)]
    if backwards:
        raise CountersUnavailable(f"/metrics: {backwards[0]} went backwards: the server restarted while it was asked")
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Speculative decoding over one evaluation."""

    drafts: int
    draft_tokens: int | None
    accepted_tokens: int
    length: float
    """1 + accepted tokens / drafts: tokens a target-model step yields on average."""
    rate_by_position: tuple[float, ...]
    """Share of drafts whose token at each position was accepted."""


def acceptance(delta: Counters) -> Acceptance | None:
    """Compute the acceptance length from a difference of counters; None where no draft was made.

    Raises CountersUnavailable where the series are missing or contradict each other: the accepted tokens must equal
    the sum over positions where the server reports positions.
    """
    if DRAFTS not in delta.totals and delta.sglang_length is not None:
        raise CountersUnavailable(_of_gauge(delta.sglang_length))
    missing = [name for name in (DRAFTS, ACCEPTED) if name not in delta.totals]
    if missing:
        raise CountersUnavailable(
            f"/metrics has no {missing[0]}_total: is speculative decoding in server_args, and are statistics on?"
        )
    drafts, accepted = delta.totals[DRAFTS], delta.totals[ACCEPTED]
    if drafts == 0:
        return None
    by_position = sum(delta.by_position.values())
    if delta.by_position and not math.isclose(by_position, accepted, rel_tol=1e-6, abs_tol=0.5):
        raise CountersUnavailable(
            f"/metrics contradicts itself: {accepted:.0f} accepted, {by_position:.0f} over positions"
        )
    positions = range(max(delta.by_position, default=-1) + 1)
    draft_tokens = delta.totals.get(DRAFT_TOKENS)
    return Acceptance(
        drafts=round(drafts),
        draft_tokens=None if draft_tokens is None else round(draft_tokens),
        accepted_tokens=round(accepted),
        length=1 + accepted / drafts,
        rate_by_position=tuple(delta.by_position.get(p, 0.0) / drafts for p in positions),
    )


def _of_gauge(length: float) -> str:
    told = "shows no speculative decoding" if length == 0 else f"stood at {length:.2f} over its last steps"
    return (
        f"SGLang counts no drafts: its gauge {SGLANG_LENGTH} {told}, which says nothing of the evaluation as a whole: "
        "leave out min_acceptance_length, or use backend vllm"
    )
