"""What the page knows of earlier runs of a config; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.gates.threshold import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One config's figures in an earlier run; None for what was not measured."""

    run_id: str
    started: str
    """ISO 8601."""
    commit: str
    config_id: str
    accuracy: float | None
    low: float | None
    """With `high` the 95% interval of the accuracy."""
    high: float | None
    tokens_per_second: float | None
    acceptance_length: float | None
    startup: float | None
    """Seconds."""
    verdict: Verdict
    measures: Mapping[str, float] = field(default_factory=dict)
    """Figures of tasks that have no accuracy, by name."""


def past_of(result: Mapping[str, Any], run: Mapping[str, Any]) -> PastRun:
    """Read this run's own figures, to be the last point of every plot."""
    interval = interval_of(result)
    return PastRun(
        run_id=run["run_id"],
        started=result["started"],
        commit=run.get("environment", {}).get("commit", "unknown"),
        config_id=result["config_id"],
        accuracy=result["accuracy"],
        low=interval["low"] if result["accuracy"] is not None else None,
        high=interval["high"] if result["accuracy"] is not None else None,
        tokens_per_second=result["tokens_per_second"],
        acceptance_length=(result["acceptance"] or {}).get("length"),
        startup=result["timings"]["startup"],
        verdict=Verdict(result["verdict"]),
        measures=result.get("measures") or {},
    )


def interval_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Choose the interval that holds: a run that stopped early has one of its own."""
    stopped = result.get("stopped_early") or {}
    interval: Mapping[str, Any] = stopped.get("interval") or result["interval"]
    return interval


def timeline(result: Mapping[str, Any], run: Mapping[str, Any], history: Sequence[PastRun]) -> list[dict[str, Any]]:
    """List a config's runs, oldest first, with this one as the last."""
    own = past_of(result, run)
    earlier = [past for past in history if past.config_id == own.config_id and past.run_id != own.run_id]
    return [asdict(past) for past in (*sorted(earlier, key=lambda past: past.started), own)]
