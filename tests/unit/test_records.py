"""The run record: whole files or none, torn lines owed, figures beside what they come from."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import ConfigError, RecordUnwritable
from harness.gates.threshold import Counts, Verdict
from harness.records import EvalResult, RunRecord, Timings, commit_of, read_samples, write_json
from harness.tally import Tally
from harness.tasks.base import Sample, Status


def sample(index: int, *, status: Status = Status.OK, correct: bool = True, tokens: int | None = 5) -> Sample:
    return Sample(
        index=index,
        status=status,
        correct=correct,
        scores={"numeric": correct},
        question="q\u2028?",
        gold="#### 1",
        text="#### 1",
        extracted="1",
        found_by="hash",
        finish_reason="stop",
        generated_tokens=tokens,
        prompt_tokens=3,
        latency=0.1 * (index + 1),
        attempts=1 + (index == 3),
        error={"kind": "rejected", "status": 400, "detail": "no"} if status is Status.ERROR else None,
    )


def result(**keys: object) -> EvalResult:
    facts: dict[str, object] = {
        "config_id": "sub/M",
        "model_name": "org/M",
        "task": {"name": "gsm8k"},
        "verdict": Verdict.PASS,
        "reason": "fine",
        "counts": Counts(asked=10, correct=6, errors=2),
        "threshold": 0.5,
        "tolerance": 0.1,
        "floor": 0.4,
    }
    return EvalResult(**{**facts, **keys})  # type: ignore[arg-type]


def test_samples_are_on_disk_as_they_come(tmp_path: Path) -> None:
    """A line is in the file before the next sample is there, one line a sample whatever the text holds."""
    record = RunRecord(tmp_path).config("sub/M")
    for index in range(3):
        record.append(sample(index))
        lines = (tmp_path / "sub/M/samples.jsonl").read_bytes().split(b"\n")
        assert len(lines) == index + 2
        assert json.loads(lines[index])["question"] == "q\u2028?"
    record.close()


def test_a_torn_last_line_is_a_sample_that_is_owed(tmp_path: Path) -> None:
    """What a killed run wrote half is not read as a sample."""
    record = RunRecord(tmp_path).config("M")
    record.append(sample(0))
    record.close()
    path = tmp_path / "M/samples.jsonl"
    whole = path.read_bytes()
    for torn in (b'{"index": 1, "sta', b'{"text": "\xe2\x82'):
        path.write_bytes(whole + torn)
        assert [row["index"] for row in read_samples(path)] == [0]


def test_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    """What no encoding holds, and a model may print, is escaped instead of ending the run."""
    record = RunRecord(tmp_path).config("M")
    record.append(replace(sample(0), text="a\ud83d"))
    record.append(sample(1))
    record.close()
    assert [row["text"] for row in read_samples(tmp_path / "M/samples.jsonl")] == ["a\ud83d", "#### 1"]


def test_results_hold_derived_figures(tmp_path: Path) -> None:
    """Accuracy is over graded questions, rates over the time of asking, and a row reads it back."""
    record = RunRecord(tmp_path)
    record.config("sub/M").write_result(result(timings=Timings(asking=4.0, startup=9.0), output_tokens=100))
    stored = json.loads((tmp_path / "sub/M/result.json").read_text())
    assert (stored["accuracy"], stored["questions_per_second"], stored["tokens_per_second"]) == (0.75, 2.0, 25.0)
    row = record.rows()[0]
    assert (row.config_id, row.accuracy, row.graded, row.errors, row.startup) == ("sub/M", 0.75, 8, 2, 9.0)


def test_a_run_lists_its_configs(tmp_path: Path) -> None:
    """`run.json` has one row a config, in order of id, whoever wrote the results."""
    record = RunRecord(tmp_path)
    for name in ("b", "a"):
        record.config(name).write_result(result(config_id=name))
    record.write_run({"finished": None})
    stored = json.loads((tmp_path / "run.json").read_text())
    assert [row["config_id"] for row in stored["configs"]] == ["a", "b"]


def test_a_number_that_is_none_never_reaches_a_file(tmp_path: Path) -> None:
    """NaN is not JSON; the file that was there stays whole."""
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_results_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    """A file where the folder should be is refused before anything starts."""
    (tmp_path / "results").write_text("")
    with pytest.raises(ConfigError, match=r"--results-dir .*results: cannot be written"):
        RunRecord.create(tmp_path / "results")


def test_a_record_that_goes_away_is_an_outage(tmp_path: Path) -> None:
    """A folder that vanished says nothing about the model."""
    record = RunRecord(tmp_path).config("M")
    record.folder.rmdir()
    with pytest.raises(RecordUnwritable, match="cannot be written: No such file"):
        record.append(sample(0))
    with pytest.raises(RecordUnwritable, match="cannot be written"):
        record.write_result(result())


def test_a_changed_checkout_is_not_taken_for_its_commit(tmp_path: Path) -> None:
    """The commit is named whole, is marked where files differ from it, and is unknown where there is none."""
    assert commit_of(tmp_path) == "unknown"

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "a")
    git("tag", "-am", "v", "v1")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "results").mkdir()
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_two_runs_get_two_folders(tmp_path: Path) -> None:
    """Runs that start in the same second do not share a folder."""
    assert len({RunRecord.create(tmp_path).folder for _ in range(20)}) == 20


def test_a_tally_counts_what_became_of_each_question() -> None:
    """Truncated, unanswered, failed and retried are counted apart; latencies and tokens come from answers alone."""
    tally = Tally()
    tally.start()
    statuses = [Status.OK, Status.OK, Status.TRUNCATED, Status.UNANSWERED, Status.ERROR]
    for index, status in enumerate(statuses):
        tally.add(sample(index, status=status, correct=index == 0))
    tally.stop()
    assert tally.counts == Counts(asked=5, correct=1, truncated=1, unanswered=1, errors=1, retried=1)
    timings = tally.timings()
    assert timings.latency_mean == pytest.approx(0.25)
    assert timings.latency_p50 == pytest.approx(0.25)
    assert tally.output_tokens == 20


def test_tokens_nobody_reported_are_unknown() -> None:
    """One reply without usage makes the sum unknown rather than too small."""
    tally = Tally()
    for tokens in (5, None, 5):
        tally.add(sample(0, tokens=tokens))
    assert tally.output_tokens is None


def test_one_reason_for_all_first_rejections_is_seen() -> None:
    """The count grows while every sample from the first was rejected alike, and stops at the first that was not."""
    tally = Tally()
    for index in range(3):
        tally.add(sample(index, status=Status.ERROR, correct=False))
    assert tally.same_rejection == 3
    tally.add(sample(3))
    tally.add(sample(4, status=Status.ERROR, correct=False))
    assert tally.same_rejection == 3
