"""Two passes over the same questions on one server: which answers flipped, and whether a cache was really used; pure.

Identical greedy runs of a 0.5B model were seen to flip 11 to 30 of 1,319 answers on a GPU, 0.8% to 2.3%, since the
order in which requests are batched changes the rounding. `FLIP_RATE` lies above the highest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.gates.threshold import Gate, Verdict

FLIP_RATE = (3, 100)
"""The share of answers that noise alone is granted to flip, as a fraction."""
QUANTILE = (999, 1000)
"""How surely noise at that rate stays within the bound: one check in a thousand would fail for nothing."""
LEAST_ALLOWED = 2
"""Flips allowed however few the questions are."""
NAMED = 8
"""Flipped questions that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Questions graded in both passes whose rightness differs between them."""

    questions: int
    to_wrong: tuple[int, ...]
    """Indices, ascending."""
    to_right: tuple[int, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(self.to_wrong + self.to_right))

    def __str__(self) -> str:
        text = f"{len(self.indices)} of {self.questions} answers differ between the passes"
        if not self.indices:
            return text
        named = ", ".join(map(str, self.indices[:NAMED])) + (", …" if len(self.indices) > NAMED else "")
        return f"{text} ({len(self.to_wrong)} became wrong, {len(self.to_right)} right: questions {named})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Prompt tokens looked up in a cache during a pass, and found there; None where the server has no such counter."""

    queries: float | None
    hits: float | None
    fault: str | None = None
    """Why the counters could not be read at all."""

    def __str__(self) -> str:
        return f"{self.hits or 0:.0f} of {self.queries or 0:.0f} prompt tokens found in it"


def flips_of(first: Mapping[int, bool], second: Mapping[int, bool]) -> Flips:
    """Compare the rightness of each question that both passes graded."""
    both = sorted(first.keys() & second.keys())
    return Flips(
        questions=len(both),
        to_wrong=tuple(index for index in both if first[index] and not second[index]),
        to_right=tuple(index for index in both if second[index] and not first[index]),
    )


def allowed_flips(n: int) -> int:
    """Compute the exact 0.999 quantile of a binomial over n questions at a flip rate of 0.03, at least 2.

    In integers throughout: a term is C(n, k) a^k (b - a)^(n - k) of b^n.
    """
    (a, b), (level, whole) = FLIP_RATE, QUANTILE
    wanted = level * b**n
    term = total = (b - a) ** n
    k = 0
    while total * whole < wanted:
        term = term * (n - k) * a // ((k + 1) * (b - a))
        total += term
        k += 1
    return max(k, LEAST_ALLOWED)


def judge_prefix_cache(flips: Flips, used: CacheUse) -> Gate:
    """Hold the flips against the noise bound; a pass that found nothing in the cache is no check of it."""
    bound = allowed_flips(flips.questions)
    beyond = len(flips.indices) > bound
    message = f"prefix cache: {flips}; noise explains {bound}"
    if beyond:
        verdict = Verdict.REGRESSION
    elif used.hits:
        verdict, message = Verdict.PASS, f"{message}; {used}"
    else:
        verdict, message = Verdict.INFRASTRUCTURE, f"prefix cache was not checked: {_unused(used)}"
    return Gate(
        name="prefix cache", verdict=verdict, message=message, measured=float(len(flips.indices)), required=float(bound)
    )


def _unused(used: CacheUse) -> str:
    if used.fault is not None:
        return used.fault
    if used.hits is None:
        return "/metrics has no vllm:prefix_cache_hits_total: are statistics on?"
    return f"{used} in the second pass: put --enable-prefix-caching in server_args, or give the cache more memory"


def judge_kv_offload(flips: Flips, used: CacheUse, *, told: str) -> Gate:
    """Require that the second pass found prompts in the external cache; `told` is what was seen of the offload."""
    about = f"{flips}; before the GPU's cache was dropped {told}"
    if used.fault is not None:
        verdict, message = Verdict.INFRASTRUCTURE, f"KV offload was not checked: {used.fault}"
    elif used.queries is None or used.hits is None:
        verdict = Verdict.INFRASTRUCTURE
        message = "KV offload was not checked: /metrics has no vllm:external_prefix_cache_hits_total"
        message += ": is a connector in server_args (--kv-transfer-config), and are statistics on?"
    elif not used.queries:
        verdict = Verdict.INFRASTRUCTURE
        message = "KV offload was not checked: the external cache was never asked"
        message += ": put a connector in server_args (--kv-transfer-config or --kv-offloading-size)"
    elif not used.hits:
        verdict, message = Verdict.REGRESSION, f"KV offload: {used}, though all prompts had been asked before; {about}"
    else:
        verdict, message = Verdict.PASS, f"KV offload: {used}; {about}"
    return Gate(name="KV offload", verdict=verdict, message=message, measured=used.hits, required=1.0)
