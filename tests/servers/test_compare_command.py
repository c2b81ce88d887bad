"""`accuracy-gate compare` on real records: two runs of the suite or of `eval`, against servers on loopback."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import Reply, completion, loopback_server
from suite_run import SuiteRun

from harness import baselines
from harness.commands import compare_command
from harness.errors import ConfigError, DataUnavailable
from harness.gates.history import QuestionHistory
from harness.reports.untrusted import escaped

ROOT = Path(__file__).resolve().parents[2]
SMOKE = [json.loads(line) for line in (ROOT / "harness/tasks/data/smoke.jsonl").read_text().splitlines()]
GOLD = {row["question"]: row["answer"] for row in SMOKE}
STAND_IN = ROOT / "tests/faults/faulty_vllm.py"
CONFIG = "model_name: m\ntask: smoke\naccuracy_threshold: 0.1\ntolerance: 0.0\n"
HOSTILE = "\x1b[2J```\n</details>\n#### 999983"


def script(*wrong: int, tokens: int = 7) -> Callable[[dict[str, Any], int], Reply]:
    """Answer the smoke set rightly but for the questions at these indexes."""
    questions = [row["question"] for row in SMOKE]

    def answer(body: dict[str, Any], n: int) -> Reply:
        question = body["prompt"].rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
        hostile = questions.index(question) in wrong
        return completion(HOSTILE if hostile else f" {GOLD[question]}", tokens=tokens)

    return answer


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of three evaluations of a server each: b has three answers changed, other has other prompts."""
    runs = {"a": (script(0), ()), "b": (script(3, 4), ()), "other": (script(), ("--num-shots", "2"))}
    folder = tmp_path_factory.mktemp("evaluated")
    for name, (replies, more) in runs.items():
        with loopback_server(replies) as server:
            command = [sys.executable, "-m", "harness.cli", "eval", "--base-url", server.base_url, "--task", "smoke"]
            done = subprocess.run(
                [*command, "--save-samples", str(folder / name), *more], cwd=ROOT, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr
    return {name: folder / name for name in runs}


def compare(*arguments: object) -> int:
    """Run the command in this process."""
    parser = argparse.ArgumentParser()
    compare_command.add_options(parser)
    return compare_command.run(parser.parse_args([str(argument) for argument in arguments]))


def stored(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run the command for its JSON."""
    compare(*arguments, "--format", "json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_two_runs_of_the_suite(run_suite: Callable[..., SuiteRun], tmp_path: Path, capsys) -> None:
    """Run folders are compared config by config: accuracy, flips both ways with their texts, speed, settings."""
    folders = []
    for replies, more in ((script(0), ""), (script(3, 4), "max_concurrency: 2\n")):
        with loopback_server(replies) as server:
            run = run_suite(CONFIG + more, f"--base-url={server.base_url}", "-q")
            printed = run.output()
            assert run.process.returncode == 0, printed
            folders.append(run.record.rename(tmp_path / f"run-{len(folders)}"))
    found = stored(capsys, *folders)
    (config,) = found["configs"]
    assert config["config_id"] == {"a": "config", "b": "config"}
    assert config["figures"]["accuracy"]["change"] == pytest.approx(-0.05)
    paired = config["paired"]
    assert (paired["questions"], paired["p_value"], paired["same_text"]) == (20, 1.0, 17)
    assert {flip["index"]: flip["became"] for flip in config["flips"]} == {0: "right", 3: "wrong", 4: "wrong"}
    flip = next(flip for flip in config["flips"] if flip["index"] == 3)
    assert (flip["question"], flip["gold"]) == (SMOKE[3]["question"], SMOKE[3]["answer"])
    assert (flip["a"]["text"], flip["b"]["text"]) == (f" {SMOKE[3]['answer']}", HOSTILE)
    for name in ("tokens_per_second", "questions_per_second", "latency_p50", "latency_p95"):
        assert config["figures"][name]["a"] > 0
        assert config["figures"][name]["change"] is not None
    assert config["settings"] == [{"name": "max_concurrency", "a": "256", "b": "2"}]
    assert [w for w in config["warnings"] if "server arguments" in w]


def test_texts_are_shown_harmlessly_within_80_columns(evaluated: dict[str, Path], capsys) -> None:
    """The text shows the first flips, the Markdown folds all, and neither lets a reply out of its place."""
    assert compare(evaluated["a"], evaluated["b"], "--flips", "1") == 0
    text = capsys.readouterr().out
    assert escaped(text, keep_newlines=True) == text
    assert max(map(len, text.split("\n"))) <= 80
    assert (text.count("wrong in B"), "2 more flips" in text) == (1, True)
    assert "| \\x1b[2J```" in text
    assert compare(evaluated["a"], evaluated["b"], "--format", "markdown") == 0
    markdown = capsys.readouterr().out
    assert "<details><summary>2 became wrong</summary>" in markdown
    assert "````text\n\\x1b[2J```\n</details>\n#### 999983\n````" in markdown


@pytest.mark.parametrize(
    ("conditions", "exit_code", "named"),
    [
        (["accuracy < -0.05"], 0, []),
        (["accuracy <= -0.05"], 1, ["FAILED: m: accuracy <= -0.05: holds: the change is -0.05"]),
        (["accuracy < -0.01", "flips > 2"], 1, ["accuracy < -0.01: holds", "flips > 2: holds: 3 flips"]),
        (["acceptance_length < 0"], 75, ["ERROR: m: acceptance_length < 0: cannot be judged: A and B do not"]),
        (["startup > 0", "flips > 2"], 1, ["startup > 0: cannot be judged", "flips > 2: holds"]),
    ],
    ids=["met", "held", "two-held", "missing", "missing-and-held"],
)
def test_conditions_decide_how_it_exits(
    evaluated: dict[str, Path], capsys, conditions: list[str], exit_code: int, named: list[str]
) -> None:
    """1 where one holds, 75 where one cannot be judged, and stderr names it."""
    options = [word for condition in conditions for word in ("--fail-on", condition)]
    assert compare(evaluated["a"], evaluated["b"], *options) == exit_code
    captured = capsys.readouterr()
    assert [words for words in named if words not in captured.err] == []
    assert bool(captured.err) == bool(named)
    assert [condition for condition in conditions if condition not in captured.out] == []


def test_a_condition_is_read_before_any_file(tmp_path: Path) -> None:
    """Nonsense is a mistake in the call, told before paths that do not exist."""
    with pytest.raises(ConfigError, match="did you mean accuracy"):
        compare(tmp_path / "none", tmp_path / "none", "--fail-on", "acuracy < 0")


def test_other_prompts_are_not_paired(evaluated: dict[str, Path], capsys) -> None:
    """Two worked examples instead of five are other prompts: said, not paired, the rest shown, no condition passed."""
    found = stored(capsys, evaluated["a"], evaluated["other"])["configs"][0]
    assert found["paired"] is None
    assert "the prompts differ in 20 of 20" in found["not_paired_because"]
    assert found["figures"]["accuracy"]["a"] == 0.95
    assert [row["name"] for row in found["settings"]] == ["worked examples"]
    assert compare(evaluated["a"], evaluated["other"], "--fail-on", "accuracy < -0.5") == 75


@pytest.mark.parametrize("name", ["result.json", "samples.jsonl"], ids=["result", "samples"])
def test_files_of_a_record_stand_for_it(evaluated: dict[str, Path], capsys, name: str) -> None:
    """A result or its samples name the config that they lie beside."""
    assert len(stored(capsys, evaluated["a"] / name, evaluated["b"])["configs"][0]["flips"]) == 3


def copied(source: Path, to: Path, keep: int = 20, tail: bytes = b"", result: bool = True) -> Path:
    """Copy a record with its first samples and a tail."""
    to.mkdir()
    lines = (source / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (to / "samples.jsonl").write_bytes(b"".join(lines[:keep]) + tail)
    if result:
        (to / "result.json").write_bytes((source / "result.json").read_bytes())
    return to


@pytest.mark.parametrize("tail", [b"", b'{"index": 9, "sta', '{"index": 9, "text": "é'.encode()[:-1]], ids=range(3))
def test_a_run_that_was_killed_is_compared_over_what_it_answered(
    evaluated: dict[str, Path], tmp_path: Path, capsys, tail: bytes
) -> None:
    """No result and a torn last line, even within a letter: the samples that are whole are compared, and it says so."""
    killed = copied(evaluated["b"], tmp_path / "killed", keep=8, tail=tail, result=False)
    found = stored(capsys, evaluated["a"], killed)["configs"][0]
    assert found["paired"]["questions"] == 8
    assert found["incomplete"] == "B was not finished: it has no result.json, and 8 answers"
    assert found["figures"]["tokens_per_second"]["change"] is None
    assert compare(evaluated["a"], killed, "--fail-on", "flips > 19") == 75


@pytest.mark.parametrize(
    ("asked", "says"), [(20, "B has lost samples: 9 of 20 are left"), (9, "B stopped after 9 of 20 questions")]
)
def test_a_result_with_fewer_samples_than_questions_says_so(
    evaluated: dict[str, Path], tmp_path: Path, capsys, asked: int, says: str
) -> None:
    """A run that stopped early and one whose samples were cut are compared over the rest and judged by nothing."""
    short = copied(evaluated["b"], tmp_path / "short", keep=9)
    result = json.loads((short / "result.json").read_text())
    result["counts"]["asked"] = asked
    (short / "result.json").write_text(json.dumps(result))
    found = stored(capsys, evaluated["a"], short)["configs"][0]
    assert (found["incomplete"], found["paired"]["questions"]) == (says, 9)
    assert compare(evaluated["a"], short, "--fail-on", "accuracy < -0.5") == 75


def test_a_run_that_ended_in_an_outage_is_compared_over_what_both_answered(
    run_suite: Callable[..., SuiteRun], tmp_path: Path, evaluated: dict[str, Path], capsys
) -> None:
    """A real server that dies half-way leaves a record that can be compared, and the report says how far it came."""
    serve = f"serve_command: {sys.executable} {STAND_IN} dies-half-way {{model}} --port {{port}} {{args}}\n"
    run = run_suite(CONFIG + serve + "max_concurrency: 2\nrequest_timeout_seconds: 3\n", "-q")
    printed = run.output()
    assert run.process.returncode == 75, printed
    found = stored(capsys, evaluated["a"], run.record)["configs"][0]
    assert re.match(r"B ended in an outage after \d+ answers \(.*", found["incomplete"])
    assert 0 < found["paired"]["questions"] < 20
    assert found["figures"]["startup"]["b"] > 0


def test_two_runs_in_one_folder_are_not_mixed(evaluated: dict[str, Path], tmp_path: Path, capsys) -> None:
    """Samples that stand twice are of two runs, and are not paired."""
    samples = (evaluated["b"] / "samples.jsonl").read_bytes()
    found = stored(capsys, evaluated["a"], copied(evaluated["b"], tmp_path / "twice", tail=samples))["configs"][0]
    assert "keep each run in a folder of its own" in found["not_paired_because"]


def test_a_baseline_is_compared_with_a_run(evaluated: dict[str, Path], tmp_path: Path, capsys) -> None:
    """How often each question was right in the baseline's runs is set against the run; its digests vouch for it."""
    result = json.loads((evaluated["b"] / "result.json").read_text())
    task = result["task"]
    binding = {key: task[key] for key in ("questions", "questions_sha256", "prompts_sha256", "sampling")}
    kept = [QuestionHistory(right=3 if index else 1, runs=3) for index in range(20)]
    baseline = baselines.Baseline(
        binding={**binding, "model": "m", "task": "smoke", "grader": f"{task['scorer']}, version 1"},
        circumstances={"config_id": "m", "engine_version": "9.9", "command": "unknown", "env": {}, "gpus": []},
        answers=tuple(baselines.KeptAnswer(history=history, text="old") for history in kept),
    )
    baselines.save(tmp_path / "m.json", baseline)
    found = stored(capsys, tmp_path / "m.json", evaluated["b"])["configs"][0]
    assert {flip["index"]: flip["became"] for flip in found["flips"]} == {0: "right", 3: "wrong", 4: "wrong"}
    flip = next(flip for flip in found["flips"] if flip["index"] == 3)
    assert (flip["a"], flip["question"]) == ({"right": 3, "runs": 3, "text": "old"}, SMOKE[3]["question"])
    assert found["paired"]["test"] == "exact permutation test"
    assert found["settings"] == []
    altered = {**baseline.binding, "questions_sha256": "0" * 64}
    baselines.save(
        tmp_path / "m.json",
        baselines.Baseline(binding=altered, circumstances=baseline.circumstances, answers=baseline.answers),
    )
    refused = stored(capsys, tmp_path / "m.json", evaluated["b"])["configs"][0]
    assert "the question texts differ" in refused["not_paired_because"]


def test_the_report_goes_to_a_file(evaluated: dict[str, Path], tmp_path: Path, capsys) -> None:
    """With --output nothing is printed; a folder that is not there is a mistake in the call."""
    assert compare(evaluated["a"], evaluated["b"], "--output", tmp_path / "out.md", "--format", "markdown") == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out.md").read_text().startswith("## Comparison")
    with pytest.raises(ConfigError, match="there is no folder"):
        compare(evaluated["a"], evaluated["b"], "--output", tmp_path / "none" / "out.md")


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({}, ConfigError, "no such file or folder"),
        ({"x/README": ""}, ConfigError, "is it a run's folder?"),
        ({"x/result.json": "{"}, DataUnavailable, "result.json: is damaged"),
        ({"x/result.json": "[]"}, DataUnavailable, "no JSON object"),
        ({"x/result.json": '{"schema": 9}'}, ConfigError, "of version 9"),
        ({"x/result.json": '{"schema": 1}'}, DataUnavailable, "the record is damaged: KeyError: 'config_id'"),
        ({"x/samples.jsonl": "{}\n"}, DataUnavailable, "the record is damaged: KeyError: 'index'"),
        ({"x/samples.jsonl": "nonsense\n"}, DataUnavailable, "the record is damaged"),
        ({"x/run-1/samples.jsonl": "", "x/run-1/a/samples.jsonl": "", "x/run.json": "{}"}, None, ""),
    ],
    ids=["missing", "empty", "torn", "no-object", "version", "no-keys", "bad-sample", "no-json", "odd-but-fine"],
)
def test_what_is_no_record_is_told_with_its_path(
    evaluated: dict[str, Path], tmp_path: Path, files: dict[str, str], error: type[Exception] | None, says: str
) -> None:
    """Each message names the file and what is the matter."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if error is None:
        assert compare(tmp_path / "x", tmp_path / "x") == 0
        return
    with pytest.raises(error, match=re.escape(says)) as fault:
        compare(tmp_path / "x", evaluated["a"])
    assert str(tmp_path / "x") in str(fault.value)


def test_a_file_that_is_neither_is_refused(evaluated: dict[str, Path], tmp_path: Path) -> None:
    """Any other JSON is named as what it is not."""
    (tmp_path / "some.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a result nor a baseline"):
        compare(tmp_path / "some.json", evaluated["a"])
