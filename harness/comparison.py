"""Two runs side by side: what changed in quality, speed and settings, and whether the change is real. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, quantiles
from typing import Literal

from harness.errors import ConfigError
from harness.gates.flips import flip_test
from harness.gates.history import Pair, Pass, QuestionHistory, pair_up
from harness.gates.intervals import Interval, wilson
from harness.gates.paired import loss_bound, mcnemar, p_value_of_loss
from harness.recordings import Answer, Measure, Number, Recording, Recordings
from harness.run_settings import Difference, differences, not_recorded
from harness.tasks.base import Status

WHOLE_RUN = (Measure.TOKENS_PER_SECOND, Measure.QUESTIONS_PER_SECOND, Measure.ACCEPTANCE_LENGTH)
"""Measured over a run as one: they cannot be had for the questions alone that another run answered too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measure in both runs."""

    measure: Measure
    a: Number | None
    b: Number | None
    gap: str | None = None
    """Why the two cannot be set against each other."""

    @property
    def change(self) -> Fraction | None:
        """B - A, exact: 190.0 is 5% below 200.0, and in floats by a little more."""
        if self.gap is not None or self.a is None or self.b is None:
            return None
        return Fraction(self.b) - Fraction(self.a)

    @property
    def relative(self) -> Fraction | None:
        """The change as a share of A; None where A is 0 and B is not."""
        if self.change is None or self.a is None:
            return None
        return self.change / Fraction(self.a) if self.a else (None if self.change else Fraction())


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """One run's own accuracy over the questions that are compared, or all where none can be."""

    value: Fraction
    questions: int
    runs: int
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A question that is mostly right in one run and mostly wrong in the other."""

    index: int
    became: Literal["wrong", "right"]
    a: Answer
    b: Answer

    @property
    def question(self) -> str | None:
        return self.a.question if self.a.question is not None else self.b.question

    @property
    def gold(self) -> str | None:
        return self.a.gold if self.a.gold is not None else self.b.gold


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedChange:
    """The change in accuracy over the questions that both answered; shares, above 0 where B is better."""

    questions: int
    change: Fraction
    low: float
    """With `high` the two-sided 95% interval of the change."""
    high: float
    p_value: float
    """Two-sided."""
    test: str
    flips_by_chance: float | None
    """Answers that differ between two runs of A; None where it holds one."""
    same_text: int | None
    """Replies that are the same to the letter; None where one side does not keep them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigComparison:
    """One config in both runs."""

    id_a: str
    id_b: str
    figures: tuple[Figure, ...]
    accuracy_a: Accuracy | None
    accuracy_b: Accuracy | None
    paired: PairedChange | None
    refusal: str | None
    """Why answers are not paired."""
    incomplete: str | None
    """Why nothing may be concluded for the whole set of questions."""
    flips: tuple[Flip, ...]
    settings: tuple[Difference, ...]
    warnings: tuple[str, ...]

    def figure(self, measure: Measure) -> Figure:
        return next(figure for figure in self.figures if figure.measure is measure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs."""

    a: str
    b: str
    configs: tuple[ConfigComparison, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()


def compare(a: Recordings, b: Recordings) -> Comparison:
    """Compare every config that both name; where each names a single one, those two, whatever they are called.

    Raises ConfigError where they have none in common.
    """
    shared = [name for name in a.recordings if name in b.recordings]
    pairs = [(a.recordings[name], b.recordings[name]) for name in sorted(shared)]
    if not pairs and len(a.recordings) == len(b.recordings) == 1:
        pairs = [*zip(a.recordings.values(), b.recordings.values(), strict=True)]
    if not pairs:
        names = " and ".join(f"{side.source} holds {', '.join(sorted(side.recordings))}" for side in (a, b))
        raise ConfigError(f"the runs have no config in common: {names}")
    compared = {recording.id for pair in pairs for recording in pair}
    whole = a.whole_run and b.whole_run
    return Comparison(
        a=a.source,
        b=b.source,
        configs=tuple(compare_config(before, after) for before, after in pairs),
        only_a=tuple(sorted(set(a.recordings) - compared)) if whole else (),
        only_b=tuple(sorted(set(b.recordings) - compared)) if whole else (),
    )


def compare_config(a: Recording, b: Recording) -> ConfigComparison:
    """Compare one config in two runs."""
    common = sorted(a.answered & b.answered)
    refusal = _refusal(a, b, common)
    incomplete = _incomplete(a, b)
    before, after = [a.answers[index] for index in common], [b.answers[index] for index in common]
    paired, flips = (None, ()) if refusal else _paired(common, before, after)
    different = differences(a.settings, b.settings)
    return ConfigComparison(
        id_a=a.id,
        id_b=b.id,
        figures=tuple(_figures(a, b, common, refusal, incomplete)),
        accuracy_a=_accuracy([*a.answers.values()] if refusal else before),
        accuracy_b=_accuracy([*b.answers.values()] if refusal else after),
        paired=paired,
        refusal=refusal,
        incomplete=incomplete,
        flips=flips,
        settings=different,
        warnings=tuple(_warnings(a, b, different, incomplete, len(common))),
    )


def _refusal(a: Recording, b: Recording, common: Sequence[int]) -> str | None:
    for recording in (a, b):
        if recording.unusable is not None:
            return recording.unusable
    if None not in (a.planned, b.planned) and a.planned != b.planned:
        return f"the questions differ: A was asked {a.planned}, B {b.planned}"
    if not common:
        return "no question was answered in both"
    return _what_differs(a, b, common) or _digests_differ(a, b, common)


def _what_differs(a: Recording, b: Recording, common: Sequence[int]) -> str | None:
    """Compare questions, gold answers and prompts as far as both keep them."""
    for part, name in (("question", "questions"), ("gold", "gold answers"), ("prompt_sha256", "prompts")):
        both = [(index, getattr(a.answers[index], part), getattr(b.answers[index], part)) for index in common]
        changed = [index for index, before, after in both if None not in (before, after) and before != after]
        if changed:
            return f"the {name} differ in {len(changed)} of {len(common)}, the first of them at index {changed[0]}"
    return None


def _digests_differ(a: Recording, b: Recording, common: Sequence[int]) -> str | None:
    known = [name for name in ("question texts", "prompts") if name in a.settings.facts and name in b.settings.facts]
    for name in known:
        before, after = a.settings.facts[name], b.settings.facts[name]
        if before != after:
            return f"the {name} differ: their digests begin {before[:12]} and {after[:12]}"
    first = common[0]
    if not known and None in (a.answers[first].question, b.answers[first].question):
        return "nothing recorded says that the questions are the same"
    return None


def _incomplete(a: Recording, b: Recording) -> str | None:
    told = [f"{side} {run.shortfall}" for side, run in (("A", a), ("B", b)) if run.shortfall is not None]
    return "; ".join(told) or None


def _paired(
    common: Sequence[int], before: Sequence[Answer], after: Sequence[Answer]
) -> tuple[PairedChange, tuple[Flip, ...]]:
    histories = [answer.history for answer in before]
    passes = _passes([answer.history for answer in after])
    pairs = pair_up(histories, passes)
    swapped = [Pair(index=pair.index, baseline=pair.run, run=pair.baseline) for pair in pairs]
    flipped = flip_test(histories, passes)
    if all(pair.baseline.runs == pair.run.runs == 1 for pair in pairs):
        test, p_value = "exact McNemar test", mcnemar(len(flipped.to_wrong), len(flipped.to_right))
    else:
        test = "exact permutation test"
        p_value = min(1.0, 2 * min(p_value_of_loss(pairs), p_value_of_loss(swapped)))
    texts = [(x.text, y.text) for x, y in zip(before, after, strict=True)]
    change = PairedChange(
        questions=len(pairs),
        change=-sum((pair.loss for pair in pairs), Fraction()) / len(pairs),
        low=-loss_bound(pairs, 0.975),
        high=loss_bound(swapped, 0.975),
        p_value=p_value,
        test=test,
        flips_by_chance=flipped.expected,
        same_text=None if any(None in both for both in texts) else sum(x == y for x, y in texts),
    )
    places: list[tuple[int, Literal["wrong", "right"]]] = [(place, "wrong") for place in flipped.to_wrong]
    places += [(place, "right") for place in flipped.to_right]
    flips = tuple(Flip(index=common[place], became=became, a=before[place], b=after[place]) for place, became in places)
    return change, flips


def _passes(histories: Sequence[QuestionHistory]) -> list[Pass]:
    """Deal the right answers of each question over passes; which pass holds which matters to no test."""
    return [
        [number < history.right if number < history.runs else None for history in histories]
        for number in range(max(history.runs for history in histories))
    ]


def _accuracy(answers: Sequence[Answer]) -> Accuracy | None:
    histories = [answer.history for answer in answers if answer.history.runs]
    if not histories:
        return None
    value = sum((history.rate for history in histories), Fraction()) / len(histories)
    return Accuracy(
        value=value,
        questions=len(histories),
        runs=max(history.runs for history in histories),
        interval=wilson(round(value * len(histories)), len(histories)),
    )


def _figures(
    a: Recording, b: Recording, common: Sequence[int], refusal: str | None, incomplete: str | None
) -> Iterator[Figure]:
    before, after = (_measured(run, None if refusal else common) for run in (a, b))
    for measure in Measure:
        x, y = before.get(measure), after.get(measure)
        missing = [side for side, value in (("A", x), ("B", y)) if value is None]
        gap = None
        if missing:
            gap = f"{' and '.join(missing)} {'does' if len(missing) == 1 else 'do'} not record it"
        elif refusal is not None and measure is not Measure.STARTUP:
            gap = refusal
        elif incomplete is not None and measure in WHOLE_RUN:
            gap = f"not over the same questions: {incomplete}"
        yield Figure(measure=measure, a=x, b=y, gap=gap)


def _measured(run: Recording, common: Sequence[int] | None) -> dict[Measure, Number | None]:
    """Collect a run's figures over the questions compared, or over all of its own."""
    answers = [run.answers[index] for index in (run.answered if common is None else common)]
    found = dict(run.own)
    accuracy = _accuracy(answers)
    if accuracy is not None:
        found[Measure.ACCURACY] = accuracy.value
    statuses = [answer.status for answer in answers if answer.status is not None]
    for measure, status in ((Measure.TRUNCATED, Status.TRUNCATED), (Measure.UNANSWERED, Status.UNANSWERED)):
        if statuses:
            found[measure] = Fraction(statuses.count(status), len(statuses))
    latencies = [answer.latency for answer in answers if answer.latency is not None]
    if latencies:
        cuts = quantiles(latencies, n=20, method="inclusive") if len(latencies) > 1 else latencies * 19
        latency = {Measure.LATENCY_MEAN: fmean(latencies), Measure.LATENCY_P50: cuts[9], Measure.LATENCY_P95: cuts[18]}
        found.update(latency)
    return found


def _warnings(
    a: Recording, b: Recording, different: Sequence[Difference], incomplete: str | None, common: int
) -> Iterator[str]:
    if incomplete is not None:
        yield f"{incomplete}; compared over the {common} questions that both answered"
    if len(different) > 1:
        yield f"{len(different)} settings differ: change one thing at a time, or its effect cannot be told"
    for side, run in (("A", a), ("B", b)):
        if run.settings.loose_sampling is not None:
            yield f"sampling is not fixed in {side} ({run.settings.loose_sampling}): answers change by chance as well"
    unknown = not_recorded(a.settings, b.settings)
    if unknown:
        yield f"not recorded for both, and so not compared: {', '.join(unknown)}"
