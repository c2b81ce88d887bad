"""What runs left behind, read back: run folders, one config's folder, a result, a baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from harness import baselines
from harness.errors import ConfigError, DataUnavailable
from harness.gates.history import QuestionHistory
from harness.gates.threshold import Verdict
from harness.records import SCHEMA_VERSION
from harness.run_settings import Settings, settings_of_baseline, settings_of_result
from harness.tasks.base import Status

RESULT, RUN, SAMPLES = "result.json", "run.json", "samples.jsonl"
LONGEST_REASON = 200
"""Characters; the reason of an outage ends with a server's log."""

Number = Fraction | float


class Measure(StrEnum):
    """A figure that both runs have; its name is what --fail-on calls it."""

    ACCURACY = "accuracy"
    TOKENS_PER_SECOND = "tokens_per_second"
    QUESTIONS_PER_SECOND = "questions_per_second"
    LATENCY_MEAN = "latency_mean"
    LATENCY_P50 = "latency_p50"
    LATENCY_P95 = "latency_p95"
    STARTUP = "startup"
    ACCEPTANCE_LENGTH = "acceptance_length"
    TRUNCATED = "truncated"
    UNANSWERED = "unanswered"
    ERRORS = "errors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run says to one question; None where it does not keep that."""

    history: QuestionHistory
    status: Status | None = None
    text: str | None = None
    latency: float | None = None
    question: str | None = None
    gold: str | None = None
    prompt_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One config's part of a run, or a baseline, as far as it can be read."""

    id: str
    source: str
    settings: Settings = field(default_factory=Settings)
    answers: Mapping[int, Answer] = field(default_factory=dict)
    planned: int | None = None
    """How many questions were to be asked."""
    shortfall: str | None = None
    """Why not all of them were answered, where that is so."""
    unusable: str | None = None
    """Why its samples cannot be compared one by one."""
    own: Mapping[Measure, Number | None] = field(default_factory=dict)
    """Its figures over all that it was asked, as its result holds them."""

    @property
    def answered(self) -> set[int]:
        return {index for index, answer in self.answers.items() if answer.history.runs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """What one argument of `compare` names."""

    source: str
    recordings: Mapping[str, Recording]
    whole_run: bool
    """False where it names one config of a run, a result or a baseline."""


def read_recordings(path: Path) -> Recordings:
    """Read whatever a path names.

    Raises ConfigError where that is no record of a run, DataUnavailable where the record is damaged.
    """
    if path.name in {RUN, SAMPLES}:
        path = path.parent
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    document = _json(path)
    if "binding" in document:
        recording = _baseline(path)
    elif "config_id" in document and "counts" in document:
        recording = _config(path.parent, path)
    else:
        raise ConfigError(f"{path}: is neither a result nor a baseline; name a run's folder or a config's result.json")
    return Recordings(source=str(path), recordings={recording.id: recording}, whole_run=False)


def _folder(path: Path) -> Recordings:
    if (path / RESULT).is_file() or (path / SAMPLES).is_file():
        recording = _config(path, path / RESULT)
        return Recordings(source=str(path), recordings={recording.id: recording}, whole_run=False)
    folders = sorted({found.parent for found in chain(path.rglob(RESULT), path.rglob(SAMPLES))})
    if not folders:
        raise ConfigError(f"{path}: holds no {RESULT} and no {SAMPLES}: is it a run's folder?")
    found: dict[str, Recording] = {}
    for folder in folders:
        recording = _config(folder, folder / RESULT)
        if recording.id in found:
            raise ConfigError(f"{path}: holds {recording.id} several times: name one of its folders, such as {folder}")
        found[recording.id] = recording
    return Recordings(source=str(path), recordings=found, whole_run=True)


def _config(folder: Path, result_path: Path) -> Recording:
    run_path = _run_json(folder)
    run = _json(run_path) if run_path else {}
    result = _json(result_path) if result_path.is_file() else None
    if result is not None and result.get("schema") != SCHEMA_VERSION:
        raise ConfigError(f"{result_path}: is of version {result.get('schema')}; this reads {SCHEMA_VERSION}")
    try:
        answers, doubled = _answers(folder)
        facts = result or _unfinished(folder, run_path, run)
        planned = facts.get("task", {}).get("questions")
        answered = sum(answer.history.runs > 0 for answer in answers.values())
        return Recording(
            id=facts["config_id"],
            source=str(folder),
            settings=settings_of_result(facts, run),
            answers={} if doubled else answers,
            planned=planned,
            shortfall=_shortfall(result, answered, len(answers), planned),
            unusable=doubled or (None if answers else f"{folder} holds no samples"),
            own=_own(result, folder),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataUnavailable(f"{folder}: the record is damaged: {type(error).__name__}: {error}") from error


def _shortfall(result: Mapping[str, Any] | None, answered: int, samples: int, planned: int | None) -> str | None:
    if result is None:
        return f"was not finished: it has no {RESULT}, and {answered} answers"
    asked = result["counts"]["asked"]
    if result["verdict"] == Verdict.INFRASTRUCTURE and (planned is None or answered < planned):
        reason = str(result["reason"]).partition("\n")[0][:LONGEST_REASON]
        return f"ended in an outage after {answered} answers ({reason})"
    if planned is not None and asked < planned:
        return f"stopped after {asked} of {planned} questions"
    return f"has lost samples: {samples} of {asked} are left" if samples < asked else None


def _unfinished(folder: Path, run_path: Path | None, run: Mapping[str, Any]) -> dict[str, Any]:
    """Say what is known of a config whose result was never written."""
    place = folder.relative_to(run_path.parent).as_posix() if run_path else folder.name
    by_folder = {str(listed).replace(":", "/"): str(listed) for listed in run.get("listed", ())}
    servers = [path for path in (folder / "server.json", folder.parent / "server.json") if path.is_file()]
    return {"config_id": by_folder.get(place, place), "server": _json(servers[0]) if servers else {}}


def _own(result: Mapping[str, Any] | None, folder: Path) -> dict[Measure, Number | None]:
    if result is None:
        return {}
    counts, timings = result["counts"], result["timings"]
    graded = counts["asked"] - counts["errors"]
    return {
        Measure.ACCURACY: Fraction(counts["correct"], graded) if graded else None,
        Measure.TOKENS_PER_SECOND: result["tokens_per_second"],
        Measure.QUESTIONS_PER_SECOND: result["questions_per_second"],
        Measure.LATENCY_MEAN: timings["latency_mean"],
        Measure.LATENCY_P50: timings["latency_p50"],
        Measure.LATENCY_P95: timings["latency_p95"],
        Measure.STARTUP: timings["startup"],
        Measure.ACCEPTANCE_LENGTH: (result["acceptance"] or {}).get("length"),
        Measure.TRUNCATED: Fraction(counts["truncated"], graded) if graded else None,
        Measure.UNANSWERED: Fraction(counts["unanswered"], graded) if graded else None,
        Measure.ERRORS: Fraction(counts["errors"], counts["asked"]) if counts["asked"] else None,
    }


def _answers(folder: Path) -> tuple[dict[int, Answer], str | None]:
    """Read a config's samples; also say where they are of two runs, for then none can be told from the other.

    Later passes (`samples-2.jsonl` and on) are asked under other conditions, such as a warm cache, and are left out.
    """
    path = folder / SAMPLES
    found: dict[int, Answer] = {}
    for line in _whole_lines(path):
        sample = json.loads(line)
        index = int(sample["index"])
        if index in found:
            return {}, f"{path} holds question {index} twice: keep each run in a folder of its own"
        found[index] = _answer(sample)
    return found, None


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Read lines as bytes: a torn last line may end within a letter, and is left out before that matters."""
    if path.is_file():
        with path.open("rb") as lines:
            yield from (line for line in lines if line.endswith(b"\n"))


def _answer(sample: Mapping[str, Any]) -> Answer:
    status = Status(sample["status"])
    answered = status is not Status.ERROR
    return Answer(
        history=QuestionHistory(right=int(answered and bool(sample["correct"])), runs=int(answered)),
        status=status,
        text=sample["text"],
        latency=sample["latency"],
        question=sample["question"],
        gold=sample["gold"],
        prompt_sha256=sample.get("prompt_sha256"),
    )


def _baseline(path: Path) -> Recording:
    baseline = baselines.load(path)
    answers = {index: Answer(history=kept.history, text=kept.text) for index, kept in enumerate(baseline.answers)}
    return Recording(
        id=str(baseline.circumstances.get("config_id", path.stem)),
        source=str(path),
        settings=settings_of_baseline(baseline),
        answers=answers,
        planned=len(answers),
    )


def _run_json(folder: Path) -> Path | None:
    return next((at / RUN for at in _upward(folder) if (at / RUN).is_file()), None)


def _upward(folder: Path) -> Iterator[Path]:
    whole = folder.absolute()
    return chain((whole,), whole.parents)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataUnavailable(f"{path}: is damaged: {error}") from error
    if not isinstance(document, dict):
        raise DataUnavailable(f"{path}: is damaged: no JSON object")
    return document
