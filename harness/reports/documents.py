"""A run's folder read for its reports: every result, and of each failure what explains it."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import DataUnavailable
from harness.gates.threshold import Verdict
from harness.records import Row, read_samples
from harness.redaction import redact
from harness.run_settings import Settings, settings_of_result

EXAMPLES = 3
LOG_LINES = 40
TAIL_BYTES = 64 * 1024
EARLIER_RUNS = 50
"""How many earlier runs of the same results folder are looked at for the last green one."""
_TERMINAL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question that was answered wrongly, or a document that was predicted worst."""

    index: int
    question: str
    gold: str
    text: str | None
    extracted: str | None
    status: str
    value: float | None = None
    before: str | None = None
    """What the baseline or the last green run answered; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Green:
    """The last run in which a config passed."""

    run_id: str
    settings: Settings
    commit: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDocument:
    """One config's part of a run; all but the row and the result is there for failures alone."""

    folder: str
    """Where it lies, as a person can name it from where the report is made."""
    row: Row
    result: Json
    examples: tuple[Example, ...] = ()
    failures: tuple[tuple[str, int], ...] = ()
    """Why requests got no answer, and how many, the most frequent first."""
    log: tuple[str, ...] = ()
    """The last lines of the server's log."""
    green: Green | None = None
    place: Json = field(default_factory=dict)
    """Where its file writes its gates."""

    @property
    def failing(self) -> tuple[Json, ...]:
        """The gates that decided a verdict other than pass."""
        return tuple(gate for gate in self.result["gates"] if gate["verdict"] == self.row.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """All that reports say."""

    folder: str
    run: Json
    configs: tuple[ConfigDocument, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(config.row for config in self.configs)

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why configs did not run, by id."""
        return self.run.get("skipped", {})  # type: ignore[no-any-return]

    @property
    def failed(self) -> tuple[ConfigDocument, ...]:
        """Regressions, then outages."""
        order = (Verdict.REGRESSION, Verdict.INFRASTRUCTURE)
        return tuple(config for verdict in order for config in self.configs if config.row.verdict is verdict)

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(self.run.get("lists", ()))

    @property
    def verdict(self) -> Verdict:
        return self.failed[0].row.verdict if self.failed else Verdict.PASS


def read_run(folder: Path, *, base: Path | None = None) -> RunDocument:
    """Read a run's folder; paths below `base`, by default the working directory, are shown relative to it.

    Raises DataUnavailable where the record is missing or damaged.
    """
    base = base or Path.cwd()
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        lists = [_shown(Path(path), base) for path in run.get("lists", ())]
        history = _History(folder)
        paths = sorted(folder.rglob("result.json"))
        configs = [_read_config(path.parent, folder, run, history, base) for path in paths]
    except _DAMAGE as error:
        raise DataUnavailable(f"{folder}: the record cannot be read: {type(error).__name__}: {error}") from error
    configs.sort(key=lambda config: config.row.config_id)
    return RunDocument(folder=_shown(folder, base), run={**run, "lists": lists}, configs=tuple(configs))


def _shown(path: Path, base: Path) -> str:
    if not path.is_absolute():
        return str(path)
    absolute, base = path.resolve(), base.resolve()
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) else str(absolute)


def _read_config(folder: Path, run_folder: Path, run: Json, history: _History, base: Path) -> ConfigDocument:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    row = Row.from_result(result)
    shown, place = _shown(folder, base), run.get("written_at", {}).get(row.config_id, {})
    if row.verdict is Verdict.PASS:
        return ConfigDocument(folder=shown, row=row, result=result, place=place)
    green = history.last_green(row.config_id, folder.relative_to(run_folder))
    try:
        examples, failures = _samples(folder, result, green)
    except _DAMAGE:
        # The verdict is explained all the same; `compare` and the page say what is damaged.
        examples, failures = (), ()
    return ConfigDocument(
        folder=shown,
        row=row,
        result=result,
        examples=examples,
        failures=failures,
        log=_log(folder, run_folder),
        green=green,
        place=place,
    )


def _samples(
    folder: Path, result: Json, green: Green | None
) -> tuple[tuple[Example, ...], tuple[tuple[str, int], ...]]:
    """Choose what shows the failure best: answers that flipped, else that were right in the last green run."""
    path = folder / "samples.jsonl"
    if not path.is_file():
        return (), ()
    failures: Counter[str] = Counter()
    wrong: dict[int, str | None] = {}
    for sample in read_samples(path):
        if sample["status"] == "error":
            error = sample["error"] or {}
            failures[f"{error.get('kind')}: {error.get('detail')}"] += 1
        elif not sample["correct"]:
            wrong[sample["index"]] = sample["prompt_sha256"]
    if result["task"].get("name") == "perplexity":
        return _worst(path), tuple(failures.most_common(EXAMPLES))
    before = _flipped(folder / "flips.jsonl")
    if len(before) < EXAMPLES and green is not None:
        before |= _right_before(green.folder / "samples.jsonl", wrong)
    chosen = [*before, *(index for index in sorted(wrong) if index not in before)][:EXAMPLES]
    found = {sample["index"]: _example(sample, before) for sample in read_samples(path) if sample["index"] in chosen}
    return tuple(found[index] for index in chosen if index in found), tuple(failures.most_common(EXAMPLES))


def _flipped(path: Path) -> dict[int, str | None]:
    """What the baseline answered to the first questions that became wrong."""
    if not path.is_file():
        return {}
    flips = (flip for flip in read_samples(path) if flip["changed"] == "to wrong")
    return dict(_first(EXAMPLES, ((flip["index"], flip["baseline_text"]) for flip in flips)))


def _right_before(path: Path, wrong: Mapping[int, str | None]) -> dict[int, str | None]:
    """What an earlier run rightly answered to the same prompts."""
    if not path.is_file():
        return {}
    same = (
        (sample["index"], sample["text"])
        for sample in read_samples(path)
        if sample["correct"] and sample["index"] in wrong and sample["prompt_sha256"] == wrong[sample["index"]]
    )
    return dict(_first(EXAMPLES, same))


def _first(count: int, pairs: Iterable[tuple[int, str | None]]) -> Iterator[tuple[int, str | None]]:
    """The ones with the smallest index, whatever order the answers came in."""
    return iter(heapq.nsmallest(count, pairs, key=lambda pair: pair[0]))


def _worst(path: Path) -> tuple[Example, ...]:
    scored = (sample for sample in read_samples(path) if sample.get("value") is not None)
    return tuple(_example(sample, {}) for sample in heapq.nlargest(EXAMPLES, scored, key=lambda one: one["value"]))


def _example(sample: Json, before: Mapping[int, str | None]) -> Example:
    names = ("index", "question", "gold", "text", "extracted", "status")
    facts = {name: sample[name] for name in names}
    return Example(**facts, value=sample.get("value"), before=before.get(sample["index"]))


def _log(folder: Path, run_folder: Path) -> tuple[str, ...]:
    """Read the log's last lines; the tasks of one server share the log one folder up."""
    places = [at / "server.log" for at in (folder, folder.parent) if at != run_folder]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, end - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ()
    text = text.partition("\n")[2] if begin else text
    lines = redact(_TERMINAL_CODES.sub("", text)).splitlines()
    return tuple(line.rstrip() for line in lines if line.strip())[-LOG_LINES:]


class _History:
    """The earlier runs of the same results folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    @cached_property
    def _runs(self) -> Sequence[tuple[Path, Json]]:
        """The latest first: run ids begin with the time."""
        siblings = [path for path in self._folder.parent.iterdir() if path.name < self._folder.name]
        found = ((path, _run_json(path)) for path in sorted(siblings, reverse=True)[:EARLIER_RUNS])
        return [(path, run) for path, run in found if run is not None]

    def last_green(self, config_id: str, place: Path) -> Green | None:
        for path, run in self._runs:
            passed = {row["config_id"] for row in run.get("configs", ()) if row["verdict"] == Verdict.PASS}
            found = _green(path, run, place) if config_id in passed else None
            if found is not None:
                return found
        return None


def _green(path: Path, run: Json, place: Path) -> Green | None:
    """Take a damaged earlier run for none."""
    try:
        result = json.loads((path / place / "result.json").read_text(encoding="utf-8"))
        commit = run.get("environment", {}).get("commit", "unknown")
        return Green(run_id=path.name, settings=settings_of_result(result, run), commit=commit, folder=path / place)
    except _DAMAGE:
        return None


def _run_json(path: Path) -> Json | None:
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return run if isinstance(run, dict) and isinstance(run.get("configs"), list) else None
