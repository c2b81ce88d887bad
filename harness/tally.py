"""Running totals of an evaluation: figures, not texts, so that memory does not grow with the replies."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import fmean, quantiles

from harness.gates.threshold import Counts
from harness.records import Timings
from harness.tasks.base import Sample, Status


@dataclass(kw_only=True)
class Tally:
    """Counts samples as they come."""

    counts: Counts = field(default_factory=Counts)
    correct_by_scorer: dict[str, int] = field(default_factory=dict)
    same_rejection: int = 0
    """How many samples in a row, from the first, were rejected for one reason."""
    output_tokens: int | None = 0
    """Tokens written; None once a server did not report them."""
    peak_kv_cache_use: float | None = None
    """The highest share of the KV cache seen in use, 0 to 1; None where the server does not tell."""
    _latencies: list[float] = field(default_factory=list)
    _rejection: str | None = None
    _begun: float | None = None
    _ended: float | None = None

    def start(self) -> None:
        self._begun = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def add(self, sample: Sample, *, reused: bool = False) -> None:
        """Count a sample; one that is reused says nothing of how fast the server is."""
        counts = self.counts
        self._note_rejection(sample)
        failed = sample.status is Status.ERROR
        self.counts = replace(
            counts,
            asked=counts.asked + 1,
            correct=counts.correct + sample.correct,
            truncated=counts.truncated + (sample.status is Status.TRUNCATED),
            unanswered=counts.unanswered + (sample.status is Status.UNANSWERED),
            errors=counts.errors + failed,
            retried=counts.retried + (not failed and not reused and sample.attempts > 1),
            reused=counts.reused + reused,
        )
        if failed:
            return
        for scorer, right in sample.scores.items():
            self.correct_by_scorer[scorer] = self.correct_by_scorer.get(scorer, 0) + right
        if reused:
            return
        if sample.latency is not None:
            self._latencies.append(sample.latency)
        if sample.generated_tokens is None or self.output_tokens is None:
            self.output_tokens = None
        else:
            self.output_tokens += sample.generated_tokens

    def note_kv_cache_use(self, use: float | None) -> None:
        if use is not None:
            self.peak_kv_cache_use = max(use, self.peak_kv_cache_use or 0.0)

    def _note_rejection(self, sample: Sample) -> None:
        error = sample.error
        reason = error["detail"] if error is not None and error["kind"] == "rejected" else None
        if self.counts.asked == 0:
            self._rejection = reason
        if reason is not None and reason == self._rejection and self.same_rejection == self.counts.asked:
            self.same_rejection += 1

    def timings(self) -> Timings:
        """Summarise; latencies are per request, in seconds, from sending the attempt that succeeded."""
        asking = self._ended - self._begun if self._begun is not None and self._ended is not None else None
        if not self._latencies:
            return Timings(asking=asking)
        cuts = (
            quantiles(self._latencies, n=20, method="inclusive") if len(self._latencies) > 1 else self._latencies * 19
        )
        return Timings(asking=asking, latency_mean=fmean(self._latencies), latency_p50=cuts[9], latency_p95=cuts[18])
