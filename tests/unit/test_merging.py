"""The shards of a list as one run: what counts, what is missing, and how CI is told."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_records import finish, sample, write_config

from harness.commands import merge_command
from harness.errors import ConfigError
from harness.gates.threshold import Verdict
from harness.recordings import read_recordings
from harness.records import RunRecord, write_json

GOOD, WORSE, OUT = "good", "worse", "out"
QUESTIONS = 30


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge in a test is no merge of the CI job that runs the tests."""
    for name in ("GITHUB_ACTIONS", "BUILDKITE"):
        monkeypatch.delenv(name, raising=False)


def leave_run(results: Path, configs: Mapping[str, str], **info: Any) -> Path:
    """Leave a run of configs that came out so; `info` replaces parts of its run.json."""
    record = RunRecord.create(results)
    for config_id, outcome in configs.items():
        samples = [sample(index, right=outcome == GOOD or index % 2 == 0) for index in range(QUESTIONS)]
        write_config(record, config_id, samples, fault="the server exited" if outcome == OUT else None)
    finish(record, list(configs))
    amend(record.folder / "run.json", exit_code=exit_code(configs.values()), **info)
    return record.folder


def exit_code(outcomes: Any) -> int:
    return 1 if WORSE in outcomes else 75 if OUT in outcomes else 0


def amend(path: Path, **changes: Any) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


def finish_at(run: Path, config_id: str, moment: str) -> None:
    amend(run / config_id / "result.json", finished=moment)


def merge_runs(tmp_path: Path, *arguments: object) -> tuple[int, Path]:
    """Merge as the command does; the exit code, and the new run's folder."""
    parser = argparse.ArgumentParser()
    merge_command.add_options(parser)
    into = tmp_path / "merged"
    status = merge_command.run(parser.parse_args([*map(str, arguments), "--results-dir", str(into)]))
    (folder,) = into.iterdir()
    return status, folder


def leave_plan(path: Path, jobs: Mapping[str, Sequence[str]]) -> Path:
    configs = [{"id": config_id, "job": job} for job, ids in jobs.items() for config_id in ids]
    write_json(path, {"schema": 1, "configs": configs, "jobs": [{"id": j, "configs": i} for j, i in jobs.items()]})
    return path


CODES: dict[str, tuple[Sequence[Mapping[str, str]], int]] = {
    "all good": ([{"a": GOOD}, {"b": GOOD}], 0),
    "one worse": ([{"a": GOOD}, {"b": WORSE}], 1),
    "one out": ([{"a": GOOD}, {"b": OUT}], 75),
    "a regression outweighs an outage": ([{"a": OUT}, {"b": WORSE}], 1),
}


@pytest.mark.parametrize(("shards", "expected"), CODES.values(), ids=list(CODES))
def test_exit_code_is_the_suites_over_all_shards(
    tmp_path: Path, shards: Sequence[Mapping[str, str]], expected: int
) -> None:
    """Merged shards exit as one run of all their configs would."""
    for configs in shards:
        leave_run(tmp_path / "shards", configs)
    status, folder = merge_runs(tmp_path, tmp_path / "shards")
    run = json.loads((folder / "run.json").read_text())
    assert status == run["exit_code"] == expected
    assert [row["config_id"] for row in run["configs"]] == ["a", "b"]


def test_merged_run_is_a_run_like_any_other(tmp_path: Path) -> None:
    """The new folder holds every sample, log and report, and is read by what reads runs."""
    first = leave_run(tmp_path / "1", {"a": GOOD, "a/nested": GOOD})
    leave_run(tmp_path / "2", {"b": GOOD})
    (first / "shared" / "task").mkdir(parents=True)
    for name in ("result.json", "samples.jsonl"):
        shutil.copy(first / "a" / name, first / "shared" / "task")
    amend(first / "shared" / "task" / "result.json", config_id="shared:task")
    (first / "shared" / "server.log").write_text("the log of both tasks")
    status, folder = merge_runs(tmp_path, tmp_path / "1", tmp_path / "2")
    assert status == 0
    assert (folder / "shared" / "server.log").read_text() == "the log of both tasks"
    assert (folder / "a" / "samples.jsonl").read_bytes() == (first / "a" / "samples.jsonl").read_bytes()
    found = read_recordings(folder).recordings
    assert sorted(found) == ["a", "a/nested", "b", "shared:task"]
    assert all(len(recording.answers) == QUESTIONS for recording in found.values())
    assert "a/nested" in (folder / "report.md").read_text()
    assert (folder / "report.html").is_file()
    run = json.loads((folder / "run.json").read_text())
    assert [part["configs"] for part in run["merged_from"]] == [["a", "a/nested", "shared:task"], ["b"]]


def test_config_that_never_reported_is_an_outage_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard that died, and a config that its shard lost, are named, and the whole is retried."""
    run = leave_run(tmp_path / "shards", {"a": GOOD})
    plan = leave_plan(tmp_path / "plan.json", {"1-of-2": ["a", "lost"], "2-of-2": ["c", "d"]})
    status, folder = merge_runs(tmp_path, run, "--expect", plan)
    said = capsys.readouterr().err
    assert status == 75
    assert "job 2-of-2 never reported: c, d" in said
    assert "never reported: lost" in said
    assert json.loads((folder / "run.json").read_text())["missing"] == ["lost", "c", "d"]


def test_regression_outweighs_a_missing_shard(tmp_path: Path) -> None:
    """What was measured as worse stays worse, whatever else is missing."""
    plan = leave_plan(tmp_path / "plan.json", {"1": ["a"], "2": ["b"]})
    assert merge_runs(tmp_path, leave_run(tmp_path / "s", {"a": WORSE}), "--expect", plan)[0] == 1


def test_no_shard_at_all_is_an_outage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every job died there is still a run, a report and an exit code."""
    (tmp_path / "empty").mkdir()
    plan = leave_plan(tmp_path / "plan.json", {"1": ["a"]})
    status, folder = merge_runs(tmp_path, tmp_path / "empty", "--expect", plan)
    assert status == 75
    assert (folder / "report.md").is_file()
    assert "job 1 never reported: a" in capsys.readouterr().err


def test_expected_configs_come_from_lists_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--expect takes the list itself; what is not in it counts all the same, and is named."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("model_name: org/M\naccuracy_threshold: 0.5\n")
    (tmp_path / "list.txt").write_text("a.yaml\nb.yaml\n")
    run = leave_run(tmp_path / "shards", {"a": GOOD, "other": GOOD})
    assert merge_runs(tmp_path, run, "--expect", tmp_path / "list.txt")[0] == 75
    said = capsys.readouterr().err
    assert "never reported: b" in said
    assert "not in what was expected, and counted all the same: other" in said


def test_config_skipped_with_a_reason_is_not_missing(tmp_path: Path) -> None:
    """A config that does not run on its shard's platform reported so."""
    run = leave_run(tmp_path / "s", {"a": GOOD}, skipped={"b": "runs on rocm only"})
    plan = leave_plan(tmp_path / "plan.json", {"1": ["a", "b"]})
    status, folder = merge_runs(tmp_path, run, "--expect", plan)
    assert status == 0
    assert json.loads((folder / "run.json").read_text())["skipped"] == {"b": "runs on rocm only"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["retry given last", "retry given first"])
def test_retried_config_counts_as_it_finished_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[int, int]
) -> None:
    """Of a job that ran twice the later result counts, whatever order the folders come in, and that is said."""
    first = leave_run(tmp_path / "1", {"a": OUT})
    second = leave_run(tmp_path / "2", {"a": GOOD})
    finish_at(first, "a", "2026-03-02T10:04:00.000+00:00")
    finish_at(second, "a", "2026-03-02T12:00:00.000+01:00")
    runs = [first, second]
    status, folder = merge_runs(tmp_path, *(runs[i] for i in order))
    assert status == 0
    assert json.loads((folder / "a" / "result.json").read_text())["verdict"] == Verdict.PASS
    assert f"a: {second.name} counts, which finished after {first.name}" in capsys.readouterr().err


def test_run_that_was_not_finished_is_named_and_its_results_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed shard's results count, its unfinished samples are kept, and its missing config is an outage."""
    run = leave_run(tmp_path / "s", {"a": GOOD, "b": GOOD}, finished=None)
    (run / "b" / "result.json").unlink()
    with (run / "b" / "samples.jsonl").open("a") as samples:
        samples.write('{"index": 30, "torn')
    status, folder = merge_runs(tmp_path, run)
    said = capsys.readouterr().err
    assert status == 75
    assert f"{run.name} was not finished" in said
    assert "never reported: b" in said
    assert (folder / "b" / "samples.jsonl").read_bytes() == (run / "b" / "samples.jsonl").read_bytes()
    assert len(read_recordings(folder).recordings["b"].answers) == QUESTIONS


DAMAGE = {"no JSON": "{", "no object": "[]", "no result": '{"schema": 1}'}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=list(DAMAGE))
def test_damaged_result_is_named_and_never_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """A result that cannot be read is an outage with its file named; the others are reported."""
    run = leave_run(tmp_path / "s", {"a": GOOD, "b": GOOD})
    (run / "b" / "result.json").write_text(content)
    assert merge_runs(tmp_path, run)[0] == 75
    said = capsys.readouterr().err
    assert str(run / "b" / "result.json") in said
    assert "never reported: b" in said


def test_shard_that_failed_of_itself_fails_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard that exited 1 without a regression has a fault of its own, which must stay loud."""
    run = leave_run(tmp_path / "s", {"a": GOOD})
    amend(run / "run.json", exit_code=1)
    assert merge_runs(tmp_path, run)[0] == 1
    assert "exited 1 although no model got worse" in capsys.readouterr().err


def test_merged_report_is_githubs_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job of GitHub the one report of all shards is shown with the job."""
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    leave_run(tmp_path / "s", {"a": GOOD})
    leave_run(tmp_path / "s", {"b": GOOD})
    _, folder = merge_runs(tmp_path, tmp_path / "s")
    assert summary.read_text().strip() == (folder / "report.md").read_text().strip()


def test_shards_of_different_commits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One verdict over two states of the code is not silently given."""
    leave_run(tmp_path / "s", {"a": GOOD}, environment={"commit": "1" * 40})
    leave_run(tmp_path / "s", {"b": GOOD}, environment={"commit": "2" * 40})
    merge_runs(tmp_path, tmp_path / "s")
    assert f"different commits: {'1' * 40}, {'2' * 40}" in capsys.readouterr().err


def test_same_run_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is found by two of the paths is one run."""
    run = leave_run(tmp_path / "s", {"a": GOOD})
    shutil.copytree(run, tmp_path / "copy" / run.name)
    assert merge_runs(tmp_path, run, run, tmp_path / "copy")[0] == 0
    assert "1 runs merged" in capsys.readouterr().out


def test_newer_record_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A record of a version that this does not know is not guessed at."""
    run = leave_run(tmp_path / "s", {"a": GOOD})
    amend(run / "a" / "result.json", schema=99)
    with pytest.raises(ConfigError, match=r"is of version 99; this reads up to \d+"):
        merge_runs(tmp_path, run)
    assert not (tmp_path / "merged").exists()


PATHS = {"missing": (["nowhere"], "no such folder"), "no run": (["."], "no run.json in it or below")}


@pytest.mark.parametrize(("paths", "message"), PATHS.values(), ids=list(PATHS))
def test_paths_without_runs_are_refused(tmp_path: Path, paths: list[str], message: str) -> None:
    """Without anything expected, nothing to merge is a mistake."""
    with pytest.raises(ConfigError, match=message):
        merge_runs(tmp_path, *(tmp_path / path for path in paths))


PLANS = {"no JSON": "[", "no plan": "{}", "newer": '{"schema": 2, "configs": [], "jobs": []}'}


@pytest.mark.parametrize("content", PLANS.values(), ids=list(PLANS))
def test_file_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    """--expect says which file is wrong."""
    plan = tmp_path / "plan.json"
    plan.write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.json: is"):
        merge_runs(tmp_path, leave_run(tmp_path / "s", {"a": GOOD}), "--expect", plan)
