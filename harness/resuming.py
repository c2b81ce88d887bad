"""Finishing a run that was interrupted: which of its samples count as answered, and whether they may be taken over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from harness import __version__
from harness.backends.base import Failure
from harness.errors import ConfigError, DataUnavailable
from harness.records import SCHEMA_VERSION, read_samples, write_json
from harness.run_settings import Settings, settings_of_result
from harness.tasks.answers import GRADER_VERSION
from harness.tasks.base import Sample, Status, Task

REQUEST = "request.json"
NOT_RECORDED = "(not recorded)"
SERVED = frozenset({"model", "revision", "server version", "GPUs"})
"""What the settings of a result say beside its task, which is compared part by part."""
NOBODY = Failure(kind="aborted", detail="not asked", attempts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one config asks of what, as `request.json` keeps it from before the first question."""

    config_id: str
    model_name: str
    task: Mapping[str, Any]
    """As `Task.describe` says."""
    server: Mapping[str, Any]
    """As the result's `server`: what the engine and its backend say of themselves, and the GPUs."""
    grader: int = GRADER_VERSION
    harness_version: str = __version__

    def write(self, folder: Path) -> None:
        """Write `request.json` into a config's folder."""
        write_json(folder / REQUEST, {"schema": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote.

        Raises ConfigError where there is no such file or another version wrote it, DataUnavailable where it is damaged.
        """
        path = folder / REQUEST
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            schema = document.pop("schema")
            if schema != SCHEMA_VERSION:
                raise ConfigError(f"{path}: is of version {schema}; this reads {SCHEMA_VERSION}")
            return cls(**document)
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: is missing: what was asked there is not known; run without --resume") from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataUnavailable(f"{path}: is damaged: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What an interrupted run leaves to be done."""

    samples: Mapping[int, Sample]
    """Those that count as answered, by their index."""
    owed: tuple[int, ...]
    """The indexes that are to be asked, in order."""


def find_run(results_dir: Path, run_id: str) -> Path:
    """Find a run's folder by its id or the beginning of it.

    Raises ConfigError naming the latest there are.
    """
    runs = sorted(path.parent.name for path in results_dir.glob("*/run.json"))
    found = [name for name in runs if name == run_id] or [name for name in runs if run_id and name.startswith(run_id)]
    if len(found) == 1:
        return results_dir / found[0]
    known = ", ".join(found or runs[-3:]) or "none"
    why = "begins several" if found else "is none of them"
    raise ConfigError(f"--resume {run_id}: {why}: runs in {results_dir}: {known}")


def resumable(folder: Path, task: Task, asked: Asked) -> Resumed:
    """Say which samples of an interrupted config's folder need not be asked again.

    A sample counts whose question, gold answer and prompt are those of the task, and which got a response. A folder
    that is not there, as of a config that was not begun, has none. Raises ConfigError naming what differs where the run
    asked something else of something else, DataUnavailable where the record is damaged.
    """
    questions = range(len(task.requests))
    path = folder / "samples.jsonl"
    if not path.is_file():
        return Resumed(samples={}, owed=tuple(questions))
    different = tuple(differences(Asked.read(folder), asked))
    if different:
        raise ConfigError(f"--resume: {folder} was made from something else:", *different)
    done: dict[int, Sample] = {}
    for sample in _samples(path):
        if sample.index in done:
            raise DataUnavailable(f"{path}: holds question {sample.index} twice: is it of one run?")
        if sample.index in questions and _counts(sample, task):
            done[sample.index] = sample
    return Resumed(samples=done, owed=tuple(index for index in questions if index not in done))


def _samples(path: Path) -> Iterator[Sample]:
    try:
        for row in read_samples(path):
            yield Sample(**{**row, "status": Status(row["status"])})
    except (ValueError, LookupError, TypeError) as error:
        raise DataUnavailable(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def _counts(sample: Sample, task: Task) -> bool:
    """Whatever the kind of its requests, a task names the prompt in every sample, that of a failure too."""
    would_be = task.score(sample.index, NOBODY)
    same = (sample.prompt_sha256, sample.question, sample.gold) == (
        would_be.prompt_sha256,
        would_be.question,
        would_be.gold,
    )
    return same and sample.status is not Status.ERROR and sample.prompt_sha256 is not None


def differences(before: Asked, now: Asked) -> Iterator[str]:
    """Name everything that differs between two askings, with both values.

    What only one of them records differs too. Of a server that somebody else started neither records the arguments:
    then the model and versions that it tells must do.
    """
    first, second = dict(_facts(before)), dict(_facts(now))
    for name in dict.fromkeys((*first, *second)):
        was, is_ = first.get(name, NOT_RECORDED), second.get(name, NOT_RECORDED)
        if was != is_:
            yield f"{name}: {json.dumps(was)} in that run, {json.dumps(is_)} here"


def _facts(asked: Asked) -> Iterator[tuple[str, Any]]:
    document = json.loads(json.dumps(asdict(asked)))  # lists for tuples, as they come back from a file
    yield from ((name, document[name]) for name in ("config_id", "grader", "harness_version"))
    yield from ((f"task {name}", value) for name, value in document["task"].items())
    server = document["server"]
    yield from ((f"server {name}", server[name]) for name in ("started_by", "engine", "arguments") if name in server)
    yield from _settings(settings_of_result(document, {}))


def _settings(settings: Settings) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in settings.facts.items() if name in SERVED)
    for group, values in (("argument", settings.arguments), ("env", settings.env)):
        yield from ((f"{group} {name}", value) for name, value in (values or {}).items())
