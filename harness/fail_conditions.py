"""`--fail-on`: conditions on what changed between two runs, read strictly and judged in exact arithmetic. Pure."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Literal

from harness.comparison import Comparison, ConfigComparison
from harness.errors import ConfigError
from harness.recordings import Measure

FLIPS = "flips"
NAMES = (*(measure.value for measure in Measure), FLIPS)

_CONDITION = re.compile(
    r"\s*(?P<name>[A-Za-z0-9_]+)\s*(?P<operator><=|>=|<|>)\s*(?P<limit>[+-]?(?:[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15}))"
    r"\s*(?P<percent>%?)\s*",
)
_OPERATORS = {"<": lt, "<=": le, ">": gt, ">=": ge}


class Outcome(StrEnum):
    """What became of a condition."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    NOT_JUDGED = "cannot be judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A bound on a change, B - A, or on the change as a share of A where it is relative."""

    text: str
    name: str
    operator: Literal["<", "<=", ">", ">="]
    limit: Fraction
    relative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A condition applied to one config."""

    condition: Condition
    config_id: str
    outcome: Outcome
    reason: str

    def __str__(self) -> str:
        return f"{self.config_id}: {self.condition.text}: {self.outcome}: {self.reason}"


def parse_condition(text: str) -> Condition:
    """Read a condition such as `accuracy < -0.01` or `tokens_per_second < -5%`.

    Raises ConfigError.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--fail-on {text!r}: must be NAME, one of < <= > >=, and a number with or without %, "
            "as in 'accuracy < -0.01' or 'tokens_per_second < -5%'"
        )
    name, limit, relative = found["name"], Fraction(found["limit"]), bool(found["percent"])
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMES)}"
        raise ConfigError(f"--fail-on {text!r}: there is no {name}; {remedy}")
    if name == FLIPS and limit < 0:
        raise ConfigError(f"--fail-on {text!r}: flips are counted, and never below 0")
    operator: Literal["<", "<=", ">", ">="] = found["operator"]  # type: ignore[assignment]
    limit = limit / 100 if relative else limit
    return Condition(text=" ".join(text.split()), name=name, operator=operator, limit=limit, relative=relative)


def judge_conditions(conditions: tuple[Condition, ...], comparison: Comparison) -> tuple[Judged, ...]:
    """Apply every condition to every config; one that A has and B lacks cannot be judged, so it is not passed."""
    judged = [judge(condition, config) for config in comparison.configs for condition in conditions]
    for config_id in comparison.only_a:
        for condition in conditions:
            missing = f"{comparison.b} does not have it"
            judged.append(Judged(condition=condition, config_id=config_id, outcome=Outcome.NOT_JUDGED, reason=missing))
    return tuple(judged)


def judge(condition: Condition, config: ConfigComparison) -> Judged:
    """Apply a condition to one config."""
    value, gap = _value(condition, config)
    if config.incomplete is not None:
        outcome, reason = Outcome.NOT_JUDGED, config.incomplete
    elif value is None:
        outcome, reason = Outcome.NOT_JUDGED, gap
    else:
        holds = _OPERATORS[condition.operator](value, condition.limit)
        outcome = Outcome.HOLDS if holds else Outcome.DOES_NOT_HOLD
        reason = _shown(condition, value)
    return Judged(condition=condition, config_id=config.id_b, outcome=outcome, reason=reason)


def _value(condition: Condition, config: ConfigComparison) -> tuple[Fraction | None, str]:
    """Find the change that a condition speaks of, or say why there is none."""
    if condition.name == FLIPS:
        if config.paired is None:
            return None, config.refusal or "answers are not paired"
        flips = Fraction(len(config.flips))
        return (flips / config.paired.questions if condition.relative else flips), ""
    figure = config.figure(Measure(condition.name))
    if figure.change is None:
        return None, figure.gap or "it is not recorded"
    if not condition.relative:
        return figure.change, ""
    if figure.relative is None:
        return None, "A is 0, so that there is no relative change: give the limit without %"
    return figure.relative, ""


def _shown(condition: Condition, value: Fraction) -> str:
    if condition.name == FLIPS:
        return f"{float(value):.2%} of the questions" if condition.relative else f"{value} flips"
    return f"the change is {float(value):+.2%} of A" if condition.relative else f"the change is {float(value):+.6g}"
