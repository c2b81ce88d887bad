"""Multiple choice by likelihood: which of a few continuations the model holds likeliest after the question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.backends.base import ContinuationScore, Failure, LoglikelihoodRequest, Loglikelihoods, Response
from harness.errors import ConfigError
from harness.gates.student import mean_of
from harness.jsonl import ChoiceRow
from harness.tasks.base import Sample, Status, answer_as
from harness.tasks.gsm8k import digest, failed_sample
from harness.tasks.scores import ChoiceScore


def fewshot_context(question: str, exemplars: Sequence[ChoiceRow]) -> str:
    """Render what each choice continues, in the format of the word problems; choices follow after one space."""
    shots = "".join(f"Question: {e.question}\nAnswer: {e.gold}\n\n" for e in exemplars)
    return f"{shots}Question: {question}\nAnswer:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The choices of one question compared by one score."""

    values: tuple[float, ...]
    """By choice, in nats, nats a token or nats a byte."""
    gold: int

    @property
    def rival(self) -> int:
        """The best choice besides the right one; the first where several are."""
        others = [i for i in range(len(self.values)) if i != self.gold]
        return max(others, key=self.values.__getitem__)

    @property
    def margin(self) -> float:
        """By how much the right choice is ahead of the best other; 0 is a tie."""
        return self.values[self.gold] - self.values[self.rival]

    @property
    def right(self) -> bool:
        """Whether the right choice alone is best: a tie is not a choice."""
        return self.margin > 0

    @property
    def chosen(self) -> int:
        return self.gold if self.right else self.rival


def readings(gold: int, scores: Sequence[ContinuationScore]) -> dict[ChoiceScore, Reading]:
    """Compare the choices by every score; bytes and tokens are the continuation's, its leading space included."""
    values = {
        ChoiceScore.SUM: tuple(score.logprob for score in scores),
        ChoiceScore.PER_TOKEN: tuple(score.logprob / score.tokens for score in scores),
        ChoiceScore.PER_BYTE: tuple(score.logprob / score.bytes for score in scores),
    }
    return {score: Reading(values=of, gold=gold) for score, of in values.items()}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of questions with choices, asked and scored as one config says."""

    name: str
    problems: Sequence[ChoiceRow]
    exemplars: Sequence[ChoiceRow]
    choice_score: ChoiceScore = ChoiceScore.PER_BYTE
    """Which score gates. By bytes, since sums favor short choices and tokens are another unit for each tokenizer."""
    pairwise: bool = False
    move_spaces: bool = True

    def __post_init__(self) -> None:
        both = {e.question for e in self.exemplars} & {p.question for p in self.problems}
        if both:
            raise ConfigError(f"a row is both worked example and question: {min(both)[:80]!r}")

    @cached_property
    def requests(self) -> tuple[LoglikelihoodRequest, ...]:
        return tuple(
            LoglikelihoodRequest(
                context=fewshot_context(row.question, self.exemplars),
                continuations=tuple(f" {choice}" for choice in row.choices),
                pairwise=self.pairwise,
                move_spaces=self.move_spaces,
            )
            for row in self.problems
        )

    def score(self, index: int, response: Response) -> Sample:
        row = self.problems[index]
        common: dict[str, Any] = {
            "index": index,
            "question": row.question,
            "gold": row.gold,
            "attempts": response.attempts,
            "prompt_sha256": _digest(self.requests[index]),
        }
        if isinstance(response, Failure):
            return failed_sample(response, common)
        answer = answer_as(response, Loglikelihoods)
        if len(answer.scores) != len(row.choices):
            raise ValueError(f"question {index}: {len(answer.scores)} scores for {len(row.choices)} choices")
        by = readings(row.answer, answer.scores)
        gating = by[self.choice_score]
        chosen = row.choices[gating.chosen]
        return Sample(
            **common,
            status=Status.OK,
            correct=gating.right,
            scores={score.value: reading.right for score, reading in by.items()},
            text=chosen,
            extracted=chosen,
            found_by=self.choice_score.value,
            finish_reason=None,
            generated_tokens=0,
            prompt_tokens=None,
            latency=answer.latency,
            value=gating.margin,
            measures=_measures(row, answer, by, gating),
            prompt_tokens_cut=answer.context_tokens_cut,
        )

    def describe(self) -> dict[str, Any]:
        """What the run record keeps: enough to ask the same again and to tell two runs apart."""
        rows = ("\0".join((p.question, *p.choices, str(p.answer))) for p in self.problems)
        return {
            "name": self.name,
            "questions": len(self.problems),
            "fewshot": len(self.exemplars),
            "fewshot_prefix": fewshot_context("", self.exemplars) if self.exemplars else "",
            "scorer": self.choice_score.value,
            "sampling": {"kind": "loglikelihood", "pairwise": self.pairwise, "move_spaces": self.move_spaces},
            "prompts_sha256": digest("\0".join(_digest(request) for request in self.requests)),
            "questions_sha256": digest("\0".join(digest(row) for row in rows)),
        }


def _digest(request: LoglikelihoodRequest) -> str:
    return digest("\0".join((request.context, *request.continuations)))


def _measures(
    row: ChoiceRow, answer: Loglikelihoods, by: Mapping[ChoiceScore, Reading], gating: Reading
) -> dict[str, Any]:
    """What `samples.jsonl` keeps of one question, enough to score it again by any of the scores."""
    return {
        "choices": list(row.choices),
        "gold": row.answer,
        **{score.value: list(reading.values) for score, reading in by.items()},
        "margins": {score.value: reading.margin for score, reading in by.items()},
        "tokens": [score.tokens for score in answer.scores],
        "bytes": [score.bytes for score in answer.scores],
        "greedy": [score.greedy for score in answer.scores],
        "tie": gating.margin == 0,
        "fallbacks": list(answer.fallbacks),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSummary:
    """What all questions say together."""

    questions: int
    mean_margin: float
    """By the score that gates."""
    low: float | None
    """With `high` the two-sided 95% t interval; None with one question."""
    high: float | None
    ties: int
    """Questions whose right choice was no better and no worse than another: counted as not right."""
    right: Mapping[str, int]
    """Right answers by every score."""


def summary_of_choices(measures: Iterable[Mapping[str, Any]], by: ChoiceScore) -> ChoiceSummary:
    """Summarise the measures of the questions that were scored, `by` being the score that gates.

    Raises ValueError where there are none.
    """
    rows = list(measures)
    if not rows:
        raise ValueError("no question was scored")
    margins = [row["margins"][by.value] for row in rows]
    mean = mean_of(margins)
    return ChoiceSummary(
        questions=len(rows),
        mean_margin=mean.mean,
        low=mean.low,
        high=mean.high,
        ties=sum(margin == 0 for margin in margins),
        right={score.value: sum(row["margins"][score.value] > 0 for row in rows) for score in ChoiceScore},
    )
