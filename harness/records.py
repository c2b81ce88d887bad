"""The run record: the folder of files one run leaves behind, written atomically or append-only."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

from harness import __version__
from harness.errors import ConfigError, RecordUnwritable
from harness.gates.power import smallest_drop
from harness.gates.threshold import Counts, Gate, Verdict
from harness.metrics import Acceptance
from harness.tasks.base import Sample

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds; None for what did not happen."""

    startup: float | None = None
    """From the server's start until it was ready."""
    asking: float | None = None
    """From the first request until the last response."""
    latency_mean: float | None = None
    latency_p50: float | None = None
    latency_p95: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What one config's evaluation came to, as `result.json` keeps it."""

    config_id: str
    model_name: str
    task: Mapping[str, Any]
    verdict: Verdict
    reason: str
    """What decided the verdict, for a person; ends with the server's log tail where a process died."""
    counts: Counts
    threshold: float | None
    """None with tolerance and floor where nothing is right or wrong, as for perplexity."""
    tolerance: float | None
    floor: float | None
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the task measures beside accuracy: bits per byte, perplexities, the mean margin in nats."""
    correct_by_scorer: Mapping[str, int] = field(default_factory=dict)
    """Right answers by every reading; `counts` goes by the one that gates."""
    stopped_early: Mapping[str, Any] | None = None
    """What settled the verdict before all questions were asked; its interval, not the one of the counts, holds then."""
    against_baseline: Mapping[str, Any] | None = None
    """The paired comparison and the flips, where the config names a baseline."""
    gates: Sequence[Gate] = ()
    timings: Timings = field(default_factory=Timings)
    output_tokens: int | None = None
    """Written in this run; what was reused is not in it."""
    reused: Mapping[str, Any] = field(default_factory=dict)
    """What came from the sample cache or from an interrupted run; empty where all was asked."""
    acceptance: Acceptance | None = None
    counters: Mapping[str, Any] | None = None
    server: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""
    finished: str = ""

    def to_json(self) -> dict[str, Any]:
        """Flatten for `result.json`, with the derived figures beside what they come from."""
        counts, asking = self.counts, self.timings.asking
        answered_per_second = (counts.graded - counts.reused) / asking if asking else None
        return {
            "schema": SCHEMA_VERSION,
            **asdict(self),
            "num_questions": counts.asked,
            "accuracy": counts.accuracy if self.threshold is not None else None,
            "interval": asdict(counts.interval),
            "smallest_drop": smallest_drop(counts.graded, self.threshold)
            if counts.graded and self.threshold is not None
            else None,
            "questions_per_second": answered_per_second,
            "tokens_per_second": self.output_tokens / asking if asking and self.output_tokens is not None else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One config's line in a run: what tables show."""

    config_id: str
    verdict: Verdict
    reason: str
    accuracy: float | None
    low: float
    high: float
    floor: float | None
    graded: int
    unanswered: int
    truncated: int
    errors: int
    acceptance_length: float | None
    tokens_per_second: float | None
    questions_per_second: float | None
    startup: float | None
    scorer: str | None
    correct_by_scorer: Mapping[str, int]
    measures: Mapping[str, float] = field(default_factory=dict)
    change: Mapping[str, float] | None = None
    """Against the baseline: of accuracy, or of the mean score, with its unit as the name; None without one."""
    drift: str | None = None
    """What is to be said of scores that moved beyond numeric noise; None where they did not."""
    reused: int = 0
    """Answers that came from the sample cache or an interrupted run."""

    @classmethod
    def from_result(cls, result: Mapping[str, Any]) -> Self:
        """Read what `EvalResult.to_json` wrote."""
        counts = result["counts"]
        return cls(
            config_id=result["config_id"],
            verdict=Verdict(result["verdict"]),
            reason=result["reason"],
            accuracy=result["accuracy"],
            low=result["interval"]["low"],
            high=result["interval"]["high"],
            floor=result["floor"],
            graded=counts["asked"] - counts["errors"],
            unanswered=counts["unanswered"],
            truncated=counts["truncated"],
            errors=counts["errors"],
            acceptance_length=(result["acceptance"] or {}).get("length"),
            tokens_per_second=result["tokens_per_second"],
            questions_per_second=result["questions_per_second"],
            startup=result["timings"]["startup"],
            scorer=result["task"].get("scorer"),
            correct_by_scorer=result["correct_by_scorer"],
            measures=result.get("measures", {}),
            change=_change(result),
            drift=_drift(result),
            reused=counts.get("reused", 0),
        )


def _change(result: Mapping[str, Any]) -> Mapping[str, float] | None:
    against = result.get("against_baseline") or {}
    found: dict[str, float] = {}
    if (paired := against.get("paired")) is not None:
        found["accuracy"] = -paired["loss"]
    if (values := against.get("values")) is not None:
        found["score"] = values["mean"]
    return found or None


def _drift(result: Mapping[str, Any]) -> str | None:
    found = (result.get("against_baseline") or {}).get("drift") or {}
    return found["sentence"] if found.get("beyond_noise") else None


class ConfigRecord:
    """One config's folder in a run record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.server_log = folder / "server.log"
        self._samples: dict[int, IO[str]] = {}

    def append(self, sample: Sample, number: int = 1) -> None:
        """Add one line to `samples.jsonl`, or for pass 2 `samples-2.jsonl`, and hand it to the system at once."""
        path = self.folder / ("samples.jsonl" if number == 1 else f"samples-{number}.jsonl")
        with _writing(path):
            if number not in self._samples:
                self._samples[number] = path.open("a", encoding="utf-8", newline="\n")
            self._samples[number].write(_json_text(asdict(sample)) + "\n")
            self._samples[number].flush()

    def write_result(self, result: EvalResult) -> None:
        write_json(self.folder / "result.json", result.to_json())

    def write_flips(self, flips: Iterable[Mapping[str, Any]]) -> None:
        """Write `flips.jsonl`: every answer that changed against the baseline, both ways, with both texts."""
        write_text(self.folder / "flips.jsonl", "".join(_json_text(flip) + "\n" for flip in flips))

    def close(self) -> None:
        for samples in self._samples.values():
            with _writing(Path(samples.name)):
                samples.close()


class RunRecord:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, results_dir: Path) -> RunRecord:
        """Make a new run folder.

        Raises ConfigError where the results folder cannot be written.
        """
        run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        folder = results_dir / run_id
        try:
            folder.mkdir(parents=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"--results-dir {results_dir}: cannot be written: {error.strerror or error}") from error
        return cls(folder)

    def config(self, config_id: str) -> ConfigRecord:
        return ConfigRecord(self.folder / config_id)

    def rows(self) -> list[Row]:
        """Read the results there are, in order of config id."""
        results = (json.loads(path.read_text(encoding="utf-8")) for path in self.folder.rglob("result.json"))
        return sorted((Row.from_result(result) for result in results), key=lambda row: row.config_id)

    def write_run(self, info: Mapping[str, Any]) -> list[Row]:
        """Write `run.json` from the results there are, and return its rows."""
        rows = self.rows()
        document = {
            "schema": SCHEMA_VERSION,
            "run_id": self.folder.name,
            **info,
            "configs": [asdict(row) for row in rows],
        }
        write_json(self.folder / "run.json", document)
        return rows


def environment() -> dict[str, Any]:
    """Say where and with what this ran; what cannot be told is "unknown"."""
    return {
        "harness_version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node() or "unknown",
        "commit": commit_of(Path(__file__).parent),
        "ci": {
            name: os.environ[name]
            for name in ("BUILDKITE_BUILD_URL", "GITHUB_RUN_ID", "GITHUB_SHA")
            if name in os.environ
        },
    }


def commit_of(folder: Path) -> str:
    """Name the commit that a folder is checked out at, "…-dirty" where tracked files differ from it, or "unknown"."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            cwd=folder,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Read `samples.jsonl`; a torn last line, be it inside a letter, is a sample that is owed, and is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _json_text(document: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Render JSON that UTF-8 can hold: half a surrogate pair, which a model may print, is escaped.

    Raises ValueError for NaN and infinity, which are no JSON.
    """
    text = json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(document, indent=indent, allow_nan=False)
    return text


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; NaN and infinity are refused, for they are no JSON."""
    write_text(path, _json_text(document, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def now() -> str:
    """The present moment as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordUnwritable(f"{path}: cannot be written: {error.strerror or error}") from error
