"""Prometheus text to acceptance length: exact names, summed engines, and faults told apart."""

from __future__ import annotations

import pytest

from harness.errors import CountersUnavailable
from harness.metrics import ACCEPTED, DRAFTS, Counters, acceptance, difference, read_counters

LAST_LABEL_AND_CREATED = """\
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="deepseek-v4-flash",position="0"} 40263.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="deepseek-v4-flash",position="0"} 1.787e+09
"""
TWO_ENGINES_UNORDERED = """\
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 3
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 7
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5
"""
PREFIX_TRAP = """\
vllm:spec_decode_num_drafts_total{engine="0"} 500
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 655.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 408.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 247.0
"""
BLANKS_AND_TIMESTAMPS = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="my model, v{2}"} 100.0 1756736798000
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="my model, v{2}"} 1.5e+02 1756736798000
"""
WITHOUT_TOTAL = """\
vllm:spec_decode_num_drafts{engine="0"} 10
vllm:spec_decode_num_drafts{engine="1"} 30
vllm:spec_decode_num_accepted_tokens{engine="0"} 5
vllm:spec_decode_num_accepted_tokens{engine="1"} 15
"""


@pytest.mark.parametrize(
    ("text", "positions"),
    [(LAST_LABEL_AND_CREATED, {0: 40263}), (TWO_ENGINES_UNORDERED, {0: 12, 1: 5})],
    ids=["last label, _created beside it", "two engines, any order"],
)
def test_positions_are_read_by_label(text: str, positions: dict[int, float]) -> None:
    """A position is a label's value, wherever it stands; creation times are not counts."""
    assert read_counters(text).by_position == positions


@pytest.mark.parametrize(
    ("text", "drafts", "accepted", "length"),
    [(PREFIX_TRAP, 500, 655, 2.31), (BLANKS_AND_TIMESTAMPS, 100, 150, 2.5), (WITHOUT_TOTAL, 40, 20, 1.5)],
    ids=["per-position series beside the total", "blanks in labels, timestamps", "no _total, two engines"],
)
def test_acceptance_length_is_one_plus_accepted_over_drafts(
    text: str, drafts: int, accepted: int, length: float
) -> None:
    """The length comes from counters of that very name, summed over engines."""
    found = acceptance(read_counters(text))
    assert found is not None
    assert (found.drafts, found.accepted_tokens, found.length) == (drafts, accepted, pytest.approx(length))


def test_per_position_rates_are_shares_of_drafts() -> None:
    """Each position's rate is its accepted tokens over all drafts."""
    found = acceptance(read_counters(PREFIX_TRAP))
    assert found is not None
    assert found.rate_by_position == (pytest.approx(408 / 500), pytest.approx(247 / 500))


def test_only_what_was_counted_during_the_evaluation_counts() -> None:
    """Counters that were not zero before are taken off; a series born in between counts whole."""
    before = read_counters('vllm:spec_decode_num_drafts_total{engine="0"} 100\n')
    after = read_counters(
        'vllm:spec_decode_num_drafts_total{engine="0"} 150\nvllm:spec_decode_num_accepted_tokens_total{engine="0"} 25\n'
    )
    found = acceptance(difference(before, after))
    assert found is not None
    assert (found.drafts, found.length) == (50, 1.5)


def test_a_counter_that_went_backwards_is_refused() -> None:
    """A restarted server's counters say nothing about the evaluation."""
    before, after = Counters(totals={DRAFTS: 100, ACCEPTED: 10}), Counters(totals={DRAFTS: 40, ACCEPTED: 20})
    with pytest.raises(CountersUnavailable, match="went backwards"):
        difference(before, after)
    with pytest.raises(CountersUnavailable, match="went backwards"):
        difference(before, Counters(totals={DRAFTS: 100}))


def test_no_drafts_is_told_apart_from_no_series() -> None:
    """Speculation that is dead is None; speculation that is not reported is an error that asks why."""
    assert acceptance(Counters(totals={DRAFTS: 0, ACCEPTED: 0})) is None
    with pytest.raises(CountersUnavailable, match="no vllm:spec_decode_num_drafts_total: is speculative decoding in"):
        acceptance(read_counters('vllm:num_requests_running{engine="0"} 0.0\n'))


UNREADABLE = {
    "empty": ("", "answered with nothing"),
    "blank": ("\n", "answered with nothing"),
    "HTML": ("<html>not found</html>", "no Prometheus text"),
    "NaN": ('vllm:spec_decode_num_drafts_total{engine="0"} NaN\n', "as nan"),
    "infinite": ('vllm:spec_decode_num_drafts_total{engine="0"} +Inf\n', "as inf"),
    "no position": ("vllm:spec_decode_num_accepted_tokens_per_pos_total 3\n", "no Prometheus text"),
}


@pytest.mark.parametrize(("text", "expected"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_says_so(text: str, expected: str) -> None:
    """Text that holds no usable counters is an error of the machinery, with what was found."""
    with pytest.raises(CountersUnavailable, match=expected):
        read_counters(text)


def test_nan_in_a_series_nobody_uses_is_ignored() -> None:
    """One broken gauge of another kind does not void the run."""
    assert read_counters("other:gauge NaN\n" + WITHOUT_TOTAL).totals[DRAFTS] == 40


def test_counters_that_contradict_each_other_are_refused() -> None:
    """Accepted tokens must be the sum over positions."""
    text = PREFIX_TRAP.replace("655.0", "600.0")
    with pytest.raises(CountersUnavailable, match="contradicts itself: 600 accepted, 655 over positions"):
        acceptance(read_counters(text))


def test_finished_requests_are_summed_by_reason() -> None:
    """Finish reasons are summed over engines."""
    text = "".join(
        f'vllm:request_success_total{{engine="{engine}",finished_reason="{reason}"}} {n}\n'
        for engine, reason, n in [(0, "stop", 3), (1, "stop", 4), (0, "length", 2)]
    )
    counters = read_counters(text)
    assert (counters.by_finish_reason, counters.finished) == ({"stop": 7, "length": 2}, 9)
