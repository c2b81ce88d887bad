"""The index over runs, and the trend that it gives: what got worse first, and what is only noise."""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_records import finish, sample, write_config
from scipy import stats

from harness.commands import history_command
from harness.errors import ConfigError
from harness.gates.intervals import wilson
from harness.gates.threshold import Verdict
from harness.history import INDEX, past_runs, update
from harness.records import RunRecord, write_json
from harness.reports.page import PastRun
from harness.trends import Key, Point, band_of, trend

KEY = Key(config_id="c", task="gsm8k", backend="vllm")
QUESTIONS = 1319


def point(number: int, accuracy: float | None, *, questions: int = QUESTIONS, **changes: Any) -> Point:
    interval = wilson(round((accuracy or 0) * questions), questions)
    past = PastRun(
        run_id=f"run-{number:03}",
        started=f"2026-03-{number + 1:02}T10:00:00+00:00",
        commit="c" * 40,
        config_id="c",
        accuracy=accuracy,
        low=interval.low if accuracy is not None else None,
        high=interval.high if accuracy is not None else None,
        tokens_per_second=None,
        acceptance_length=None,
        startup=None,
        verdict=changes.pop("verdict", Verdict.PASS),
        measures=changes.pop("measures", {}),
    )
    return Point(key=KEY, past=past, graded=questions, **changes)


def points(accuracies: Sequence[float | None]) -> list[Point]:
    return [point(number, accuracy) for number, accuracy in enumerate(accuracies)]


def worse(accuracies: Sequence[float | None]) -> list[str]:
    return [judged.point.past.run_id for judged in trend(KEY, points(accuracies)).worse]


TRENDS: dict[str, tuple[Sequence[float | None], list[str]]] = {
    "steady": ([0.62, 0.63, 0.61, 0.62, 0.625], []),
    "the same each time": ([0.62] * 6, []),
    "one drop that stays": ([0.62, 0.63, 0.61, 0.62, 0.5, 0.5, 0.51], ["run-004"]),
    "a drop right after the first run": ([0.62, 0.5, 0.5], ["run-001"]),
    "two drops": ([0.62, 0.62, 0.62, 0.5, 0.5, 0.5, 0.3], ["run-003", "run-006"]),
    "a drop, mended, and again": ([0.6, 0.61, 0.6, 0.45, 0.6, 0.6, 0.45], ["run-003", "run-006"]),
    "better is no drop": ([0.5, 0.5, 0.5, 0.62, 0.62], []),
    "within its own interval": ([0.62, 0.62, 0.62, 0.60], []),
    "an outage has no say": ([0.62, 0.62, None, 0.62, 0.5], ["run-004"]),
    "one run": ([0.5], []),
}


@pytest.mark.parametrize(("accuracies", "expected"), TRENDS.values(), ids=list(TRENDS))
def test_first_run_that_got_worse_is_found(accuracies: Sequence[float | None], expected: list[str]) -> None:
    """Each drop is found in the run where it came, once, and noise is none."""
    assert worse(accuracies) == expected


def test_noisy_runs_seldom_count_as_worse() -> None:
    """Of runs that differ by chance alone, few in a hundred are called worse."""
    chance = random.Random(5)
    series = [[round(sum(chance.random() < 0.6 for _ in range(300)) / 300, 4) for _ in range(20)] for _ in range(50)]
    called = sum(
        len(trend(KEY, [point(n, a, questions=300) for n, a in enumerate(accuracies)]).worse) for accuracies in series
    )
    assert called <= 20, "of 1000 runs"


def test_runs_are_taken_by_time_not_by_order() -> None:
    """A folder synced in any order gives the same trend."""
    given = points([0.62, 0.62, 0.62, 0.5])
    assert trend(KEY, reversed(given)) == trend(KEY, given)


def test_what_an_outage_measured_has_no_say() -> None:
    """A run that broke off half-way has figures, but of other questions than a whole one."""
    broken = point(3, 0.1, verdict=Verdict.INFRASTRUCTURE)
    runs = trend(KEY, [*points([0.62, 0.62, 0.62]), broken, point(4, 0.62)]).runs
    assert [judged.change for judged in runs] == [None] * 5
    assert runs[3].band is None


def test_other_questions_begin_a_new_level() -> None:
    """What was asked other questions is neither worse nor better than before."""
    before = [point(number, 0.8, questions_sha256="a") for number in range(4)]
    after = [point(number, 0.5, questions_sha256="b") for number in range(4, 7)]
    changes = [judged.change for judged in trend(KEY, [*before, *after]).runs]
    assert changes == [None] * 4 + ["other questions"] + [None] * 2


def test_more_bits_per_byte_are_worse() -> None:
    """Where there is no accuracy the bits per byte are followed, and lower is better."""
    bits = [0.80, 0.801, 0.799, 0.8, 0.9, 0.9, 0.9, 0.5]
    runs = trend(KEY, [point(n, None, measures={"bits_per_byte": value}) for n, value in enumerate(bits)]).runs
    assert [judged.change for judged in runs] == [None, None, None, None, "worse", None, None, "better"]


def test_band_is_students_prediction_interval() -> None:
    """From three runs on the band is where Student's t expects the next one."""
    accuracies = [0.62, 0.63, 0.61, 0.64, 0.60]
    band = band_of(points(accuracies))
    low, high = stats.t.interval(0.95, 4, loc=0.62, scale=stats.tstd(accuracies) * (1 + 1 / 5) ** 0.5)
    assert band is not None
    assert (band.low, band.high, band.runs) == (pytest.approx(low), pytest.approx(high), 5)


def leave_run(results: Path, name: str, accuracies: dict[str, float], **info: Any) -> Path:
    """Leave a run of that name whose configs have that accuracy, over 60 questions."""
    record = RunRecord(results / name)
    record.folder.mkdir(parents=True)
    for config_id, accuracy in accuracies.items():
        write_config(record, config_id, [sample(index, right=index < accuracy * 60) for index in range(60)])
        path = record.folder / config_id / "result.json"
        write_json(path, {**json.loads(path.read_text()), "started": _moment(name)})
    finish(record, list(accuracies))
    path = record.folder / "run.json"
    write_json(path, {**json.loads(path.read_text()), "started": _moment(name), **info})
    return record.folder


def _moment(name: str) -> str:
    return f"{name[:4]}-{name[4:6]}-{name[6:8]}T10:00:00+00:00"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for day, accuracy in enumerate([0.9, 0.92, 0.9, 0.91, 0.4], start=1):
        leave_run(tmp_path / "results", f"202603{day:02}T100000Z-aaaa", {"a": accuracy, "b": 0.9})
    return tmp_path / "results"


def lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (results / INDEX).read_bytes().split(b"\n")[:-1]]


def run_history(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    parser = argparse.ArgumentParser()
    history_command.add_options(parser)
    assert history_command.run(parser.parse_args([str(argument) for argument in arguments])) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_index_has_a_line_for_each_config_of_each_run(results: Path) -> None:
    """The index is filled once, grows by new runs alone, and never changes what it has."""
    update(results)
    first = (results / INDEX).read_bytes()
    assert [(line["run_id"], line["config_id"]) for line in lines(results)] == [
        (f"202603{day:02}T100000Z-aaaa", config_id) for day in range(1, 6) for config_id in ("a", "b")
    ]
    update(results)
    assert (results / INDEX).read_bytes() == first
    leave_run(results, "20260306T100000Z-aaaa", {"a": 0.9})
    update(results)
    grown = (results / INDEX).read_bytes()
    assert grown.startswith(first)
    assert grown.count(b"\n") == 11


def test_index_outlives_its_folders_until_it_is_rebuilt(results: Path) -> None:
    """Runs whose folders were cleaned up stay in the index; a rebuilt one is of the folders that are there."""
    before = update(results)
    shutil.rmtree(results / "20260301T100000Z-aaaa")
    assert update(results) == before
    assert len(update(results, rebuild=True).points) == 8
    assert len(lines(results)) == 8


def test_rebuilt_index_says_what_a_grown_one_says(results: Path) -> None:
    """Rebuilding loses nothing."""
    grown = update(results)
    content = (results / INDEX).read_bytes()
    assert update(results, rebuild=True) == grown
    assert (results / INDEX).read_bytes() == content


@pytest.mark.parametrize("cut", [1, 40, 700], ids=["its end", "some of it", "lines before it too"])
def test_torn_line_is_ignored_and_made_good(results: Path, cut: int) -> None:
    """A line that a killed writer left is no run; the next update writes that run again, on lines of its own."""
    whole = update(results)
    content = (results / INDEX).read_bytes()
    (results / INDEX).write_bytes(content[:-cut])
    assert set(map(str, update(results).points)) == set(map(str, whole.points))
    assert (results / INDEX).read_bytes().startswith(content[:-cut] + b"\n")
    shutil.rmtree(results / "20260305T100000Z-aaaa")
    assert len(update(results).points) == len(whole.points)


def test_lines_that_are_none_are_ignored(results: Path) -> None:
    """Whatever else stands in the index does not stop it."""
    whole = update(results)
    with (results / INDEX).open("a") as index:
        index.write('{"schema": 99}\nnull\n\n{"schema": 1, "run_id": "x"}\n[1]\nno JSON\n')
    assert update(results).points == whole.points


def test_runs_that_cannot_be_read_are_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged, unfinished or newer run is left out by name, and the others are told."""
    leave_run(results, "20260310T100000Z-dead", {"a": 0.9}, finished=None)
    leave_run(results, "20260311T100000Z-next", {"a": 0.9}, schema=99)
    (leave_run(results, "20260312T100000Z-torn", {"a": 0.9}) / "run.json").write_text("{")
    (leave_run(results, "20260313T100000Z-half", {"a": 0.9, "b": 0.9}) / "a" / "result.json").write_text("{")
    out, said = run_history(capsys, "--results", results)
    for name in (
        "dead is left out: it was not finished",
        "next is left out: of version 99",
        "torn is left out: run.json",
    ):
        assert name in said
    assert "20260313T100000Z-half/a/result.json is left out" in said
    assert out.count("20260313T100000Z-half") == 1


def test_artifacts_are_found_at_any_depth(results: Path, tmp_path: Path) -> None:
    """A folder of unpacked artifacts is read as it lies."""
    deep = tmp_path / "synced" / "build-7" / "shard-1" / "results"
    shutil.copytree(results, deep)
    assert len(update(tmp_path / "synced").points) == 10


def test_merged_run_replaces_its_shards(results: Path) -> None:
    """A merged run repeats its shards' results; they count once, whichever was indexed first."""
    update(results)
    leave_run(results, "20260306T100000Z-full", {"a": 0.4, "b": 0.9}, merged_from=[{"run_id": "20260305T100000Z-aaaa"}])
    runs = {one.past.run_id for one in update(results).points}
    assert "20260306T100000Z-full" in runs
    assert "20260305T100000Z-aaaa" not in runs


def test_results_folder_that_cannot_be_written_is_still_told(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A read-only copy of the results has a history all the same."""
    (results / INDEX).mkdir()
    out, said = run_history(capsys, "--results", results)
    assert "is not kept" in said
    assert "first got worse in 20260305T100000Z-aaaa" in out


def test_text_names_the_first_run_that_got_worse(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trend of each config, its band, and where it fell; another config's fall is not told of this one."""
    out, _ = run_history(capsys, "--results", results)
    a, b = out.split("b (gsm8k, vllm)")
    assert "first got worse in 20260305T100000Z-aaaa, 0.4000" in a
    assert a.count("WORSE") == 1
    assert "got worse" not in b
    assert "Student's 95% prediction interval" in b


def test_csv_and_json_hold_every_run(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both forms for programs have a row for each run of a config, with band and change."""
    table = list(csv.DictReader(io.StringIO(run_history(capsys, "--results", results, "--format=csv")[0])))
    assert len(table) == 10
    fallen = [row for row in table if row["change"] == "worse"]
    assert [(row["config_id"], row["run_id"]) for row in fallen] == [("a", "20260305T100000Z-aaaa")]
    assert float(fallen[0]["high"]) < float(fallen[0]["band_low"])
    document = json.loads(run_history(capsys, "--results", results, "--format=json", "--config=a")[0])
    assert [one["first_worse"] for one in document["trends"]] == ["20260305T100000Z-aaaa"]
    assert [row["accuracy"] for row in document["trends"][0]["runs"]] == [
        0.9,
        pytest.approx(56 / 60),
        0.9,
        *[pytest.approx(55 / 60), 0.4],
    ]


def test_config_that_never_ran_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped config is no empty history."""
    with pytest.raises(ConfigError, match="--config c: never ran; known: a, b"):
        run_history(capsys, "--results", results, "--config=c")


def test_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there is no empty history; an empty one is."""
    with pytest.raises(ConfigError, match="no such folder"):
        run_history(capsys, "--results", tmp_path / "nowhere")
    assert "no finished run yet" in run_history(capsys, "--results", tmp_path)[0]


def test_past_runs_are_read_without_writing(results: Path) -> None:
    """The page's history is of one config, oldest first, with or without an index, and leaves nothing behind."""
    found = past_runs(results, "a")
    assert [past.started for past in found] == sorted(past.started for past in found)
    assert {past.config_id for past in found} == {"a"}
    assert len(found) == 5
    assert not (results / INDEX).exists()
    update(results)
    stamp = (results / INDEX).stat().st_mtime_ns
    assert past_runs(results, "a") == found
    assert len(past_runs(results)) == 10
    assert (results / INDEX).stat().st_mtime_ns == stamp


def test_backends_and_tasks_have_trends_of_their_own(tmp_path: Path) -> None:
    """Results are the same thing where config, task and backend are."""
    leave_run(tmp_path, "20260301T100000Z-aaaa", {"a": 0.9})
    run = leave_run(tmp_path, "20260302T100000Z-aaaa", {"a": 0.4})
    path = run / "a" / "result.json"
    result = json.loads(path.read_text())
    write_json(path, {**result, "server": {**result["server"], "backend": "sglang"}})
    keys = [str(one.key) for one in update(tmp_path).trends()]
    assert keys == ["a (gsm8k, sglang)", "a (gsm8k, vllm)"]
