"""One config over its runs: noise bands, and the first run where it got worse; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from harness.gates.student import t_quantile
from harness.gates.threshold import Verdict
from harness.reports.page import PastRun

SCHEMA_VERSION = 1
BITS = "bits_per_byte"
BITS_NOISE = 0.0005
"""Standard deviation of the bits per byte that other kernels' rounding alone makes, at least."""
Change = Literal["worse", "better", "other questions"]
ENOUGH = 3
"""Runs that show how results vary from run to run; fewer say too little for Student's t."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What makes two results of different runs results of the same thing."""

    config_id: str
    task: str
    backend: str

    def __str__(self) -> str:
        return f"{self.config_id} ({self.task}, {self.backend})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One config in one run: a line of the index."""

    key: Key
    past: PastRun
    graded: int
    questions_sha256: str | None = None
    merged_from: tuple[str, ...] = ()
    """The runs whose results this run repeats."""

    def to_json(self) -> dict[str, Any]:
        past = asdict(self.past)
        own = {"task": self.key.task, "backend": self.key.backend, "graded": self.graded}
        more = {"questions_sha256": self.questions_sha256, "merged_from": list(self.merged_from)}
        return {"schema": SCHEMA_VERSION, **past, **own, **more}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Point:
        """Read a line; raises ValueError, LookupError or TypeError where it is none."""
        names = PastRun.__dataclass_fields__
        past = PastRun(**{name: line[name] for name in names if name != "verdict"}, verdict=Verdict(line["verdict"]))
        return cls(
            key=Key(config_id=past.config_id, task=line["task"], backend=line["backend"]),
            past=past,
            graded=int(line["graded"]),
            questions_sha256=line["questions_sha256"],
            merged_from=tuple(line["merged_from"]),
        )

    @property
    def value(self) -> float | None:
        """What the trend is of, the higher the better: the accuracy, or for perplexity the bits per byte negated."""
        if self.past.verdict is Verdict.INFRASTRUCTURE:
            return None
        if self.past.accuracy is None and BITS in self.past.measures:
            return -self.past.measures[BITS]
        return self.past.accuracy

    @property
    def high(self) -> float:
        return self.past.high if self.past.accuracy is not None and self.past.high is not None else self._exact

    @property
    def low(self) -> float:
        return self.past.low if self.past.accuracy is not None and self.past.low is not None else self._exact

    @property
    def _exact(self) -> float:
        """Bits per byte have no interval of their own here: all texts are scored, and none is drawn by chance."""
        return math.nan if self.value is None else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where a further run is expected, by the runs before it."""

    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run of a trend, set against the runs before it."""

    point: Point
    band: Band | None
    """None for the first run, and where nothing was measured."""
    change: Change | None = None
    """Set where a new level begins with this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One key's runs, oldest first."""

    key: Key
    runs: tuple[Judged, ...]

    @property
    def worse(self) -> tuple[Judged, ...]:
        """The runs where it got worse, oldest first."""
        return tuple(judged for judged in self.runs if judged.change == "worse")


def band_of(points: Sequence[Point]) -> Band | None:
    """Say where a run like these would lie, 19 times in 20.

    Of three runs or more that is mean +- t s sqrt(1 + 1/n), Student's prediction interval (n - 1 degrees); of fewer the
    span of their own intervals, and None where they have none.
    """
    values = [point.value for point in points if point.value is not None]
    if len(values) < ENOUGH:
        if not values or any(point.past.low is None for point in points):
            return None
        return Band(low=min(p.low for p in points), high=max(p.high for p in points), runs=len(values))
    mean, n = fmean(values), len(values)
    half = t_quantile(0.025, n - 1) * max(stdev(values), _least_noise(points)) * math.sqrt(1 + 1 / n)
    return Band(low=mean - half, high=mean + half, runs=n)


def _least_noise(points: Sequence[Point]) -> float:
    """Runs of one build may score texts the same to the last digit; another build's rounding is no change."""
    return 0.0 if points[-1].past.accuracy is not None else BITS_NOISE


def trend(key: Key, points: Iterable[Point]) -> Trend:
    """Follow one config over its runs.

    It got worse in a run whose whole interval lies below the band of the runs before, and better in one whose interval
    lies above; either begins a new level, and so do other questions. Outages are listed but have no say.
    """
    level: list[Point] = []
    judged: list[Judged] = []
    for point in sorted(points, key=lambda one: (one.past.started, one.past.run_id)):
        if point.value is None:
            judged.append(Judged(point=point, band=None))
            continue
        change = _change(level, point)
        judged.append(Judged(point=point, band=band_of(level), change=change))
        level = [point] if change else [*level, point]
    return Trend(key=key, runs=tuple(judged))


def _change(level: Sequence[Point], point: Point) -> Change | None:
    before, now = level[-1].questions_sha256 if level else None, point.questions_sha256
    if before is not None and now is not None and before != now:
        return "other questions"
    band = band_of(level)
    if band is None:
        return None
    if point.high < band.low:
        return "worse"
    return "better" if point.low > band.high else None
