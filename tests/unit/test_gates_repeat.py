"""Two passes over the same questions: the noise bound, the flips, and whether a cache was really used."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from harness.gates.repeat import CacheUse, Flips, allowed_flips, flips_of, judge_kv_offload, judge_prefix_cache

HIT = CacheUse(queries=1000.0, hits=900.0)


def flips(to_wrong: int, n: int = 1319) -> Flips:
    return Flips(questions=n, to_wrong=tuple(range(to_wrong)), to_right=())


@pytest.mark.parametrize("n", [0, 1, 2, 4, 20, 32, 100, 1319, 14042])
def test_the_bound_is_the_binomial_quantile(n: int) -> None:
    """Noise at 3% of the answers stays within the bound 999 times in 1,000, and scipy agrees on the number."""
    assert allowed_flips(n) == max(2, int(binom.ppf(0.999, n, 0.03)) if n else 0)


def test_flips_are_counted_both_ways_and_only_where_both_passes_graded() -> None:
    """A question whose request failed in one pass says nothing about the cache."""
    found = flips_of({0: True, 1: False, 2: True, 3: True, 5: False}, {0: False, 1: True, 2: True, 4: True, 5: False})
    assert (found.questions, found.to_wrong, found.to_right, found.indices) == (4, (0,), (1,), (0, 1))


@pytest.mark.parametrize("seen", [11, 30])
def test_the_noise_of_identical_runs_passes(seen: int) -> None:
    """What identical runs on a GPU were seen to flip is no regression."""
    gate = judge_prefix_cache(flips(seen), HIT)
    assert (gate.verdict, gate.measured, gate.required) == ("pass", seen, allowed_flips(1319))
    assert "900 of 1000 prompt tokens" in gate.message


def test_the_bound_is_met_and_one_more_is_a_regression_that_names_questions() -> None:
    """The bound itself passes; beyond it the first flipped questions are named, and not all of them."""
    bound = allowed_flips(1319)
    assert judge_prefix_cache(flips(bound), HIT).verdict == "pass"
    gate = judge_prefix_cache(flips(bound + 1), HIT)
    assert gate.verdict == "regression"
    assert f"{bound + 1} of 1319 answers differ" in gate.message
    assert "questions 0, 1, 2, 3, 4, 5, 6, 7, …)" in gate.message


UNUSED = {
    "no hits": (CacheUse(queries=100.0, hits=0.0), "--enable-prefix-caching"),
    "no series": (CacheUse(queries=None, hits=None), "vllm:prefix_cache_hits_total"),
    "no metrics": (CacheUse(queries=None, hits=None, fault="/metrics answered HTTP 404"), "HTTP 404"),
}


@pytest.mark.parametrize(("used", "says"), UNUSED.values(), ids=UNUSED)
def test_a_cache_that_was_not_used_was_not_checked(used: CacheUse, says: str) -> None:
    """A check that was not made is never passed and blames no model; answers beyond noise are a regression anyway."""
    gate = judge_prefix_cache(flips(0), used)
    assert gate.verdict == "infrastructure"
    assert says in gate.message
    assert judge_prefix_cache(flips(200), used).verdict == "regression"


OFFLOAD = {
    "used": (CacheUse(queries=100.0, hits=64.0), "pass", "64 of 100 prompt tokens"),
    "asked in vain": (CacheUse(queries=100.0, hits=0.0), "regression", "0 of 100 prompt tokens"),
    "never asked": (CacheUse(queries=0.0, hits=0.0), "infrastructure", "--kv-transfer-config"),
    "no series": (CacheUse(queries=None, hits=None), "infrastructure", "external_prefix_cache_hits_total"),
    "no metrics": (CacheUse(queries=None, hits=None, fault="went backwards"), "infrastructure", "went backwards"),
}


@pytest.mark.parametrize(("used", "verdict", "says"), OFFLOAD.values(), ids=OFFLOAD)
def test_the_external_cache_must_have_been_hit(used: CacheUse, verdict: str, says: str) -> None:
    """Asked and never hit is a regression; never asked, or no counter to tell, is no verdict on the model."""
    gate = judge_kv_offload(flips(1), used, told="nothing was heard")
    assert gate.verdict == verdict
    assert says in gate.message
