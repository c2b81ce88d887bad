"""How long each config takes: what earlier runs measured, or a rough guess from the model's name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from filelock import FileLock, Timeout

from harness.config import ModelConfig
from harness.config_lists import ListedConfig
from harness.errors import RecordUnwritable
from harness.model_size import Size, model_size
from harness.records import write_json

SCHEMA_VERSION = 1
KEPT_RUNS = 5
"""The median of so few follows a change within three runs, and one cold download or busy machine does not move it."""
LOCK_SECONDS = 10.0

STARTUP_SECONDS = 45.0
STARTUP_SECONDS_PER_BILLION = 1.0
SECONDS_PER_1000_TOKENS = 0.1
SECONDS_PER_1000_TOKENS_AND_BILLION = 0.01
SCORED_AS_TOKENS = 32
"""Reading one question whose answer is not generated but scored costs about as much as generating so many tokens."""
UNKNOWN_QUESTIONS = 500
"""For a data set of the user's own, which is not read here."""
UNKNOWN_BILLIONS_PER_GPU = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationKey:
    """What a measurement holds for."""

    config_id: str
    task: str
    backend: str
    gpu: str | None = None
    """The GPU's name, or "cpu"; None, in a question alone, where the machine that will run is not known."""


def key_of(entry: ListedConfig, gpu: str | None) -> DurationKey:
    """Name what a listed config's measurements hold for."""
    task = entry.task or entry.config.task
    return DurationKey(config_id=entry.server_id, task=task, backend=entry.config.backend, gpu=gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How long a config takes."""

    startup: float
    asking: float
    measured: bool
    """False for a guess."""

    @property
    def seconds(self) -> float:
        return self.startup + self.asking


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run's seconds."""

    startup: float | None
    """None where the server already ran, for instance for an earlier task."""
    asking: float
    questions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """All that is kept of one key, the newest run last."""

    key: DurationKey
    runs: tuple[MeasuredRun, ...]

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Read a row of the file; raises ValueError where it is none."""
        match data:
            case {"config_id": str(), "task": str(), "backend": str(), "gpu": str() | None, "runs": [_, *_] as runs}:
                key = DurationKey(**{name: data[name] for name in ("config_id", "task", "backend", "gpu")})
                return cls(key=key, runs=tuple(_parse_run(run) for run in runs))
        raise ValueError(f"no row of durations: {json.dumps(data)[:100]}")


def _parse_run(data: Any) -> MeasuredRun:
    match data:
        case {
            "startup": None | int() | float() as startup,
            "asking": int() | float() as asking,
            "questions": int(questions),
        } if asking >= 0 and questions > 0:
            return MeasuredRun(startup=startup, asking=asking, questions=questions)
    raise ValueError(f"no run of durations: {json.dumps(data)[:100]}")


class Durations:
    """The measurements in one file, `.accuracy-gate/durations.json` beside the suite; runs may write it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: tuple[_Row, ...] | None = None

    def record(self, key: DurationKey, run: MeasuredRun) -> None:
        """Add a run's seconds to what the file holds by then; where that fails the run goes on, with a warning."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._path.with_suffix(".lock"), timeout=LOCK_SECONDS):
                rows = {row.key: row.runs for row in self._read()}
                rows[key] = (*rows.get(key, ()), run)[-KEPT_RUNS:]
                self._write([_Row(key=key, runs=runs) for key, runs in rows.items()])
        except (OSError, Timeout, NotImplementedError, RecordUnwritable) as error:
            warnings.warn(f"{self._path}: durations are not kept: {error}", stacklevel=2)
        self._rows = None

    def estimate(self, key: DurationKey, config: ModelConfig) -> Duration:
        """Tell a config's seconds: as measured on this GPU, else on any other, else a guess.

        The asking of runs with as many questions counts; where there is none, that of others in proportion.
        """
        if self._rows is None:
            self._rows = tuple(self._read())
        same = [row for row in self._rows if _elsewhere(row.key) == _elsewhere(key)]
        here = [row for row in same if row.key.gpu == key.gpu]
        runs = [run for row in here or same for run in row.runs]
        guess = guessed(config)
        if not runs:
            return guess
        questions = _questions(config) or runs[-1].questions
        alike = [run.asking for run in runs if run.questions == questions]
        startups = [run.startup for run in runs if run.startup is not None]
        return Duration(
            startup=median(startups) if startups else guess.startup,
            asking=median(alike or [run.asking * questions / run.questions for run in runs]),
            measured=True,
        )

    def _read(self) -> Iterator[_Row]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            warnings.warn(f"{self._path}: durations cannot be read: {error.strerror}", stacklevel=4)
            return
        try:
            rows = _parse(content)
        except ValueError as error:
            aside = _put_aside(self._path)
            warnings.warn(
                f"{self._path}: no file of durations ({error}): kept as {aside}; starting afresh", stacklevel=4
            )
            return
        yield from rows

    def _write(self, rows: Sequence[_Row]) -> None:
        ordered = sorted(rows, key=lambda row: tuple(str(value) for value in asdict(row.key).values()))
        table = [{**asdict(row.key), "runs": [asdict(run) for run in row.runs]} for row in ordered]
        write_json(self._path, {"schema": SCHEMA_VERSION, "durations": table})


def _parse(content: bytes) -> list[_Row]:
    match json.loads(content):
        case {"schema": schema, "durations": list(rows)}:
            if schema != SCHEMA_VERSION:
                raise ValueError(f"its schema is {schema}, not {SCHEMA_VERSION}")
            return [_Row.parse(row) for row in rows]
    raise ValueError("it lacks schema and durations")


def _put_aside(path: Path) -> str:
    """Rename a damaged file to a name that is free; where it cannot be renamed it stays."""
    number = 1
    while (aside := path.with_suffix(f".damaged-{number}.json")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError:
        return path.name
    return aside.name


def _elsewhere(key: DurationKey) -> tuple[str, str, str]:
    return key.config_id, key.task, key.backend


def guessed(config: ModelConfig) -> Duration:
    """Guess from the number of parameters in the model's name, for a data-centre GPU.

    The start is 45 s, and 1 s for each billion parameters to load. Asking takes 0.1 s for 1,000 generated tokens, and
    0.01 s more for each billion that is active for a token. A reply is taken to be half of max_tokens long, all of it
    where the model thinks. Good to a factor of about three: enough to tell a large config from a small one.
    """
    size = model_size(config.model_name) or Size(total=UNKNOWN_BILLIONS_PER_GPU * config.gpus)
    reply = config.max_tokens * (1.0 if _thinks(config) else 0.5)
    tokens = (_questions(config) or UNKNOWN_QUESTIONS) * (SCORED_AS_TOKENS if _is_scored(config) else reply)
    per_thousand = SECONDS_PER_1000_TOKENS + SECONDS_PER_1000_TOKENS_AND_BILLION * size.active_or_total
    return Duration(
        startup=STARTUP_SECONDS + STARTUP_SECONDS_PER_BILLION * size.total,
        asking=tokens / 1000 * per_thousand,
        measured=False,
    )


def _questions(config: ModelConfig) -> int | None:
    return config.num_questions or (config.available_questions if config.dataset is None else None)


def _is_scored(config: ModelConfig) -> bool:
    return config.task in ("choice", "perplexity")


def _thinks(config: ModelConfig) -> bool:
    if not (config.use_chat_completions or config.task == "checks"):
        return False
    switches = (config.chat_template_kwargs or {}).items()
    said = [bool(value) for name, value in switches if name in ("enable_thinking", "thinking")]
    named = re.search(r"thinking|reason|-r1\b|qwq|gpt-oss", config.model_name, re.IGNORECASE)
    return said[0] if said else bool(config.reasoning_effort or named)
