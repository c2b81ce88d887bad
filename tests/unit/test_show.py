"""A run in the terminal and its reports made again: from the record alone, this version's and older ones."""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from run_records import FAILED, PASS, REGRESSION, TO_RIGHT, TO_WRONG, TRUNCATED, UNANSWERED, mixed_run

from harness.commands import report_command, show_command
from harness.errors import ConfigError, DataUnavailable
from harness.records import write_json

OLD = Path(__file__).parent / "fixtures" / "run-schema-1"
"""A record as it was first written, by two configs of four questions each; it stays as it is."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_run(tmp_path_factory.mktemp("results"))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "results" / "20261130T194850Z-7ba0"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not broken inside what a test looks for."""
    monkeypatch.setenv("COLUMNS", "120")


def run_command(command: ModuleType, *arguments: object) -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    assert command.run(parser.parse_args([str(argument) for argument in arguments])) == 0


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    run_command(show_command, *arguments)
    return capsys.readouterr().out


def test_run_is_named_by_folder_id_or_as_the_latest(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is found however a person names it."""
    ways = [(mixed,), ("--results-dir", mixed.parent, mixed.name), ("--results-dir", mixed.parent, "latest")]
    tables = {shown(capsys, *way) for way in ways}
    assert len(tables) == 1
    (table,) = tables
    for name in (PASS, REGRESSION, "runner-7", "exit code   1"):
        assert name in table


def test_config_that_never_reported_is_named(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed shows what it owes."""
    run = shutil.copytree(mixed, tmp_path / "run")
    document = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**document, "finished": None, "listed": [*document["listed"], "owed"]})
    out = shown(capsys, run)
    assert "never reported: owed" in out
    assert "not finished" in out


def test_config_shows_gates_interval_settings_and_counts(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config, by its id or the end of it, with all that decided and all that it was run with."""
    out = shown(capsys, mixed, "worse")
    assert out == shown(capsys, mixed, REGRESSION)
    for fact in (
        "REGRESSION  cpu/worse",
        "errors: pass: 1 of 60 requests",
        "95% interval 0.3844 to 0.6316, floor 0.72",
        "--dtype: float32",
        "server version: 0.32.0",
        f"{len((*TO_WRONG, *TO_RIGHT))} changed against the baseline (--flipped)",
        "1 hit the token limit without an answer (--truncated)",
    ):
        assert fact in out


FILTERS = {
    "--flipped": (*TO_WRONG, *TO_RIGHT),
    "--truncated": (TRUNCATED,),
    "--unanswered": (UNANSWERED,),
    "--errors": (FAILED,),
}


@pytest.mark.parametrize(("option", "expected"), FILTERS.items(), ids=list(FILTERS))
def test_filter_lists_its_questions(
    mixed: Path, capsys: pytest.CaptureFixture[str], option: str, expected: tuple[int, ...]
) -> None:
    """Each filter lists just the questions that came out so, a line each."""
    first, *lines = shown(capsys, mixed, REGRESSION, option).splitlines()
    assert first == f"{option.removeprefix('--')}: {len(expected)} of 60"
    assert [int(line.split()[0]) for line in lines] == sorted(expected)


def test_wrong_answers_are_those_that_were_given(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--wrong leaves out what was never answered."""
    lines = shown(capsys, mixed, REGRESSION, "--wrong").splitlines()[1:]
    numbers = {int(line.split()[0]) for line in lines}
    assert set(TO_WRONG) <= numbers
    assert numbers.isdisjoint({TRUNCATED, UNANSWERED, FAILED, *TO_RIGHT})


def test_sample_shows_question_gold_and_reply_with_the_answer_marked(
    mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One question: what was asked, what is right, what was said and read, and what the baseline said."""
    out = shown(capsys, mixed, REGRESSION, TO_WRONG[0])
    for text in (
        "question 10: ok, wrong",
        "| A crate holds 17 boxes of 100 screws.",
        "| #### 1700",
        "| #### >>>1,701<<<",
        "| The baseline said <i>otherwise</i> about 10.",
        "| Question: How many are 2 boxes of 100?",
    ):
        assert text in out


def test_failed_request_is_not_called_wrong(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request without an answer says why, and is not graded."""
    out = shown(capsys, mixed, REGRESSION, FAILED)
    assert "error, not graded" in out
    assert "timeout: no reply within 600 s" in out


def test_hostile_replies_do_not_reach_the_terminal(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a model prints, no control character is passed on."""
    for index in range(7):
        out = shown(capsys, mixed, REGRESSION, index)
        assert not [character for character in out if not character.isprintable() and character != "\n"]


ODD = {
    "no run": (("nowhere",), "is no run: there is no nowhere/run.json"),
    "no config": (("RUN", "worst"), "worst: is no config of this run: cpu/good, cpu/worse, gpu/outage"),
    "no sample": (("RUN", "worse", "60"), "60: no such sample in .*; the last is 59"),
    "filter without config": (("RUN", "--wrong"), "--wrong: name a config"),
}


@pytest.mark.parametrize(("arguments", "message"), ODD.values(), ids=list(ODD))
def test_what_is_not_there_is_named(mixed: Path, arguments: tuple[str, ...], message: str) -> None:
    """A mistake says what there is instead."""
    with pytest.raises(ConfigError, match=message):
        run_command(show_command, *(mixed if argument == "RUN" else argument for argument in arguments))


def test_damaged_samples_are_named(mixed: Path, tmp_path: Path) -> None:
    """A line that is no JSON ends with the file's name, not with a traceback."""
    run = shutil.copytree(mixed, tmp_path / "run")
    with (run / PASS / "samples.jsonl").open("a") as samples:
        samples.write("{\n")
    with pytest.raises(DataUnavailable, match=r"samples\.jsonl: is damaged"):
        run_command(show_command, run, PASS)


def test_reports_are_made_again_from_the_record_alone(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both reports come back after they were deleted, the same each time, and nothing else is touched."""
    before = {path: path.read_bytes() for path in mixed.rglob("*.json*")}
    run_command(report_command, mixed)
    made = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in made] == ["report.md", "report.html"]
    first = [path.read_bytes() for path in made]
    for path in made:
        path.unlink()
    run_command(report_command, mixed)
    assert [path.read_bytes() for path in made] == first
    assert {path: path.read_bytes() for path in mixed.rglob("*.json*")} == before


def test_page_holds_the_runs_before(mixed: Path, tmp_path: Path) -> None:
    """The page's history is of earlier runs of the same results folder, none of them later than its own."""
    run = Path(shutil.copytree(mixed, tmp_path / "20260302T100000Z-0000"))
    for name, started in (("20260301T100000Z-aaaa", "2026-03-01"), ("20260303T100000Z-bbbb", "2026-03-03")):
        other = Path(shutil.copytree(mixed, tmp_path / name))
        for path in (*other.rglob("result.json"), other / "run.json"):
            write_json(path, {**json.loads(path.read_text()), "started": f"{started}T10:00:00.000+00:00"})
    report_command.render(run)
    packed = re.search(r'id="index-0"[^>]*>([^<]*)<', (run / "report.html").read_text())
    assert packed is not None
    timeline = json.loads(gzip.decompress(base64.b64decode(packed[1])))["history"]
    assert [past["run_id"] for past in timeline] == ["20260301T100000Z-aaaa", mixed.name]


def test_first_schemas_record_is_shown_and_reported(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of the first version stays readable: table, config, sample and both reports."""
    assert "answers    0.7500" in shown(capsys, old)
    assert "REGRESSION  worse" in shown(capsys, old, "worse")
    assert "#### >>>41<<<" in shown(capsys, old, "worse", 0)
    run_command(report_command, old)
    assert "REGRESSION" in (old / "report.md").read_text()
    assert '"index-1"' in (old / "report.html").read_text()


@pytest.mark.parametrize("name", ["run.json", "worse/result.json"])
@pytest.mark.parametrize("command", [report_command, show_command], ids=["report", "show"])
def test_newer_record_is_refused_with_both_versions(old: Path, command: ModuleType, name: str) -> None:
    """A record of a version to come is not half understood."""
    path = old / name
    write_json(path, {**json.loads(path.read_text()), "schema": 99})
    with pytest.raises(
        ConfigError, match=rf"{name}: is of version 99; this reads up to \d+: use a later accuracy-gate"
    ):
        run_command(command, old)
