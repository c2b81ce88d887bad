"""The run folders of one list's shards as one run: which result of each config counts, and what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.gates.threshold import Verdict
from harness.records import SCHEMA_VERSION, Row, RunRecord, now
from harness.suite import EXIT_INFRASTRUCTURE

SHARED_FILES = ("server.log", "server.json")
"""What the tasks of one server share, in the folder above theirs."""
LONGEST_NAMED = 20
_EPOCH = datetime.fromtimestamp(0, tz=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One run folder, as far as it can be read."""

    folder: Path
    info: Mapping[str, Any]
    results: Mapping[str, Path]
    """The `result.json` of each config, by id."""
    verdicts: Mapping[str, Verdict]
    finishes: Mapping[str, datetime]
    damaged: tuple[str, ...]

    @property
    def run_id(self) -> str:
        return str(self.info.get("run_id", self.folder.name))

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished"))

    @property
    def skipped(self) -> Mapping[str, str]:
        return self.info.get("skipped") or {}

    @property
    def own_fault(self) -> bool:
        """Whether it failed without any model being worse: a test of its own, or the suite itself."""
        return self.info.get("exit_code") == 1 and Verdict.REGRESSION not in self.verdicts.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The result of a config that counts."""

    config_id: str
    part: Part
    superseded: tuple[str, ...] = ()
    """The runs whose earlier results it replaces, the latest last."""

    @property
    def verdict(self) -> Verdict:
        return self.part.verdicts[self.config_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What all parts say together."""

    parts: tuple[Part, ...]
    chosen: tuple[Chosen, ...]
    expected: tuple[str, ...]
    """Without a list or plan, what the parts themselves were to run."""
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Expected, and neither reported nor skipped."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    silent_jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Jobs of a plan of which no config was heard of, each with its configs."""

    @property
    def exit_code(self) -> int:
        """1 for a regression, or a shard that failed of itself; else 75 where something is missing or out; else 0."""
        verdicts = {one.verdict for one in self.chosen}
        counted = {one.part.run_id: one.part for one in self.chosen}.values()
        if Verdict.REGRESSION in verdicts or any(part.own_fault for part in counted):
            return 1
        lost = self.missing or any(part.damaged for part in self.parts)
        return EXIT_INFRASTRUCTURE if lost or Verdict.INFRASTRUCTURE in verdicts or not self.chosen else 0

    def notes(self) -> Iterator[str]:
        """Say what a person must know, the worst first."""
        for job, ids in self.silent_jobs.items():
            yield f"job {job} never reported: {_named(ids)}"
        silent = {config_id for ids in self.silent_jobs.values() for config_id in ids}
        if rest := [config_id for config_id in self.missing if config_id not in silent]:
            yield f"never reported: {_named(rest)}"
        for part in self.parts:
            yield from (f"{part.run_id}: {fault}" for fault in part.damaged)
            if not part.finished:
                yield f"{part.run_id} was not finished ({part.folder}); the results that it has are taken"
            if part.own_fault:
                yield f"{part.run_id} exited 1 although no model got worse: see its log"
        yield from _unlike(self.parts)
        for one in self.chosen:
            if one.superseded:
                yield f"{one.config_id}: {one.part.run_id} counts, which finished after {', '.join(one.superseded)}"
        if self.unexpected:
            yield f"not in what was expected, and counted all the same: {_named(self.unexpected)}"


def _named(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:LONGEST_NAMED])
    return shown if len(ids) <= LONGEST_NAMED else f"{shown} and {len(ids) - LONGEST_NAMED} more"


def _unlike(parts: Sequence[Part]) -> Iterator[str]:
    """One verdict over several states of the code says little about any of them."""
    for name in ("commit", "harness_version"):
        found = {str(part.info.get("environment", {}).get(name, "unknown")) for part in parts} - {"unknown"}
        if len(found) > 1:
            yield f"the runs are of different {name}s: {', '.join(sorted(found))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The configs that must report."""

    ids: tuple[str, ...]
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_plan(path: Path) -> Expected:
    """Read what `accuracy-gate list --format json` wrote; raises ConfigError where it is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (version := document["schema"]) != 1:
            raise ConfigError(f"{path}: is a plan of version {version}; this reads 1")
        return Expected(
            ids=tuple(str(config["id"]) for config in document["configs"]),
            jobs={str(job["id"]): tuple(map(str, job["configs"])) for job in document["jobs"]},
        )
    except OSError as error:
        raise ConfigError(f"--expect {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: is no plan of `accuracy-gate list`: {type(error).__name__}: {error}") from error


def find_runs(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Find the run folders that paths name or hold, for instance as artifacts were unpacked.

    Raises ConfigError for a path that is no folder. A folder without any run is none, for its job may have died.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder")
        for run in sorted(path.rglob("run.json")):
            found[run.parent.resolve()] = None
    return tuple(found)


def read_part(folder: Path) -> Part:
    """Read a run folder, whatever state it is in; raises ConfigError where it is of a newer version."""
    damaged: list[str] = []
    info = _object(folder / "run.json", damaged)
    results: dict[str, Path] = {}
    verdicts: dict[str, Verdict] = {}
    finishes: dict[str, datetime] = {}
    for path in sorted(folder.rglob("result.json")):
        result = _object(path, damaged)
        try:
            row = Row.from_result(result)
            finishes[row.config_id] = _moment(result.get("finished"))
            verdicts[row.config_id], results[row.config_id] = row.verdict, path
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            if result:
                damaged.append(f"{path} is damaged: {type(error).__name__}: {error}")
    return Part(folder=folder, info=info, results=results, verdicts=verdicts, finishes=finishes, damaged=tuple(damaged))


def _object(path: Path, damaged: list[str]) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        damaged.append(f"{path} cannot be read: {error}")
        return {}
    if not isinstance(document, dict):
        damaged.append(f"{path} holds no JSON object")
        return {}
    version = document.get("schema")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ConfigError(f"{path}: is of version {version}; this reads up to {SCHEMA_VERSION}: merge with a newer one")
    return document


def _moment(text: Any) -> datetime:
    moment = datetime.fromisoformat(str(text)) if text else _EPOCH
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def merge(parts: Sequence[Part], expected: Expected | None = None) -> Merged:
    """Choose a result for each config, the one that finished last, and say which are missing; pure."""
    unique = tuple({part.run_id: part for part in parts}.values())
    ids = dict.fromkeys(config_id for part in unique for config_id in part.results)
    listed = dict.fromkeys(str(config_id) for part in unique for config_id in part.info.get("listed", ()))
    wanted = tuple(listed) if expected is None else expected.ids
    skipped = {
        config_id: str(why) for part in unique for config_id, why in part.skipped.items() if config_id not in ids
    }
    missing = tuple(config_id for config_id in wanted if config_id not in ids and config_id not in skipped)
    jobs = expected.jobs if expected is not None else {}
    return Merged(
        parts=unique,
        chosen=tuple(_choose(config_id, unique) for config_id in sorted(ids)),
        expected=wanted,
        unexpected=tuple(sorted(set(ids) - set(wanted))) if expected is not None else (),
        missing=missing,
        skipped=skipped,
        silent_jobs={job: tuple(own) for job, own in jobs.items() if own and set(own) <= set(missing)},
    )


def _choose(config_id: str, parts: Sequence[Part]) -> Chosen:
    having = [part for part in parts if config_id in part.results]
    ordered = sorted(having, key=lambda part: (part.finishes[config_id], part.run_id))
    return Chosen(config_id=config_id, part=ordered[-1], superseded=tuple(part.run_id for part in ordered[:-1]))


def write_merged(merged: Merged, record: RunRecord) -> None:
    """Copy what counts into the new run's folder, with the samples of what was never finished, and write `run.json`."""
    for one in sorted(merged.chosen, key=lambda one: one.part.finishes[one.config_id]):
        _copy(one.part.results[one.config_id].parent, one.part.folder, record.folder)
    for part in merged.parts:
        for samples in sorted(part.folder.rglob("samples.jsonl")):
            folder = samples.parent
            if not (record.folder / folder.relative_to(part.folder)).is_dir():
                _copy(folder, part.folder, record.folder, but="result.json")
    record.write_run(_info(merged))


def _copy(folder: Path, run: Path, target: Path, *, but: str | None = None) -> None:
    """Copy one config's own files; folders in it may belong to other configs, whose ids go on from its."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != but]
    if folder.parent != run:
        files += [path for path in (folder.parent / name for name in SHARED_FILES) if path.is_file()]
    for path in files:
        to = target / path.relative_to(run)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)


def _info(merged: Merged) -> dict[str, Any]:
    infos = [part.info for part in merged.parts]
    environments = [info.get("environment", {}) for info in infos]
    names = dict.fromkeys(name for environment in environments for name in environment if name != "ci")
    ci: dict[str, Any] = {}
    for environment in environments:
        ci |= environment.get("ci", {})
    return {
        "started": min((str(info["started"]) for info in infos if info.get("started")), default=now()),
        "finished": now(),
        "exit_code": merged.exit_code,
        "lists": list(dict.fromkeys(str(path) for info in infos for path in info.get("lists", ()))),
        "listed": list(merged.expected),
        "environment": {name: _together(environments, name) for name in names} | {"ci": ci},
        "platform": _together(infos, "platform"),
        "gpus": _gpus(infos),
        "options": next((info["options"] for info in infos if "options" in info), []),
        "written_at": {config_id: place for info in infos for config_id, place in info.get("written_at", {}).items()},
        "skipped": dict(merged.skipped),
        "missing": list(merged.missing),
        "notes": list(merged.notes()),
        "merged_from": [
            {
                "run_id": part.run_id,
                "host": part.info.get("environment", {}).get("host", "unknown"),
                "finished": part.info.get("finished"),
                "exit_code": part.info.get("exit_code"),
                "configs": [one.config_id for one in merged.chosen if one.part is part],
            }
            for part in merged.parts
        ],
    }


def _together(documents: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(str(document[name]) for document in documents if name in document)) or "unknown"


def _gpus(infos: Sequence[Mapping[str, Any]]) -> list[Any]:
    found: list[Any] = []
    for gpu in (gpu for info in infos for gpu in info.get("gpus") or ()):
        if gpu not in found:
            found.append(gpu)
    return found
