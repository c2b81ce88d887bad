"""One pass judged: requests without an answer, then what the task measures, then speculative decoding."""

from __future__ import annotations

from dataclasses import asdict

from harness.asking import Asking
from harness.errors import CountersUnavailable
from harness.gates.early import judge_stop
from harness.gates.threshold import Gate, Verdict, judge_acceptance, judge_accuracy, judge_errors
from harness.metrics import Acceptance, acceptance
from harness.tasks.choice import summary_of_choices
from harness.tasks.perplexity import judge_bits_per_byte, summary_of
from harness.tasks.scores import ChoiceScore


def judge_answers(asking: Asking) -> tuple[Gate, ...]:
    """Judge the answers; nothing is said of them where too many requests got none."""
    config = asking.config
    errors = judge_errors(asking.tally.counts, max_error_rate=config.max_error_rate)
    if errors.verdict is not Verdict.PASS:
        return (errors,)
    if config.task == "perplexity":
        return (errors, *_perplexity(asking))
    return (errors, _accuracy(asking))


def _accuracy(asking: Asking) -> Gate:
    config = asking.config
    if asking.early is not None and asking.early.stop is not None:
        return judge_stop(asking.early.stop, floor=config.floor)
    threshold, tolerance = config.accuracy_threshold, config.tolerance
    return judge_accuracy(asking.tally.counts, threshold=threshold, tolerance=tolerance)


def _perplexity(asking: Asking) -> tuple[Gate, ...]:
    maximum = asking.config.max_bits_per_byte
    if not asking.measures:
        message = "no document was scored"
        return (Gate(name="bits per byte", verdict=Verdict.INFRASTRUCTURE, message=message, required=maximum),)
    if maximum is None:
        return ()
    return (judge_bits_per_byte(summary_of(asking.measures.values()), maximum),)


def measures_of(asking: Asking) -> dict[str, float]:
    """Sum up what a task measures beside right and wrong, under the names that records and tables use."""
    rows = list(asking.measures.values())
    if not rows:
        return {}
    if asking.config.task == "perplexity":
        figures = asdict(summary_of(rows))
    else:
        by_score = {score: summary_of_choices(rows, score) for score in ChoiceScore}
        figures = {f"margin_{score.value}": summary.mean_margin for score, summary in by_score.items()}
        gating = by_score[asking.config.choice_score]
        figures |= {"margin_low": gating.low, "margin_high": gating.high, "ties": gating.ties}
    return {name: float(value) for name, value in figures.items() if value is not None}


def judge_speculation(asking: Asking) -> tuple[tuple[Gate, ...], Acceptance | None]:
    """Judge the acceptance length where the config asks for one, and say what it was where drafts were counted."""
    minimum = asking.config.min_acceptance_length
    try:
        if asking.counters is None:
            raise CountersUnavailable(asking.counters_fault or "no counters were read")
        accepted = acceptance(asking.counters)
    except CountersUnavailable as error:
        unread = Gate(name="acceptance length", verdict=Verdict.INFRASTRUCTURE, message=str(error), required=minimum)
        return ((unread,) if minimum is not None else ()), None
    if minimum is None:
        return (), accepted
    return (judge_acceptance(accepted.length if accepted else None, minimum=minimum),), accepted
