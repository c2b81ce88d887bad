"""What is left of a run that was interrupted: real record folders of the suite, stopped half-way."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from loopback import Reply, completion, loopback_server
from suite_run import SuiteRun, start_suite

from harness.config import ModelConfig
from harness.errors import ConfigError, DataUnavailable
from harness.records import read_samples
from harness.resuming import NOT_RECORDED, Asked, find_run, resumable
from harness.tasks.base import Status, Task
from harness.tasks.build import build_task

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "model_name: m\ntask: smoke\naccuracy_threshold: 0.1\nmax_concurrency: 2\n"
SMOKE = [json.loads(line) for line in (ROOT / "harness/tasks/data/smoke.jsonl").read_text().splitlines()]
ANSWERED = 8


def smoke(**keys: Any) -> Task:
    values = {"model_name": "m", "task": "smoke", "accuracy_threshold": 0.1, "max_concurrency": 2, **keys}
    return build_task(ModelConfig.model_validate(values), folder=ROOT, data_dir=None)


def asked_as(result: dict[str, Any]) -> Asked:
    """Say what a finished record says was asked."""
    parts = ("config_id", "model_name", "task", "server")
    return Asked(**{part: result[part] for part in parts})


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config's folder of a suite that SIGTERM stopped: some questions answered, one an error, the rest owed."""
    folder = tmp_path_factory.mktemp("interrupted")
    release = threading.Event()

    def script(body: dict[str, Any], n: int) -> Reply:
        if n > ANSWERED:
            release.wait(60)
        return Reply(status=400) if n == 3 else completion(" 7")

    with loopback_server(script) as server:
        run: SuiteRun = start_suite(folder, CONFIG, f"--base-url={server.base_url}", "-q")
        try:
            run.await_samples(ANSWERED)
            run.process.send_signal(signal.SIGTERM)
            printed = run.output()
        finally:
            run.kill()
            release.set()
    assert (run.record / "config" / "result.json").is_file(), printed
    return run.record / "config"


@pytest.fixture
def folder(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of the interrupted run's folder, with what was asked beside it."""
    run = tmp_path / "results" / interrupted.parent.name
    shutil.copytree(interrupted.parent, run)
    result_of(run / "config").write(run / "config")
    return run / "config"


def result_of(folder: Path) -> Asked:
    return asked_as(json.loads((folder / "result.json").read_text()))


def test_what_was_answered_is_not_owed(folder: Path) -> None:
    """Every sample with a response counts, whole as it was; errors and the rest are owed, in order."""
    resumed = resumable(folder, smoke(), result_of(folder))
    rows = {row["index"]: row for row in read_samples(folder / "samples.jsonl")}
    errors = {index for index, row in rows.items() if row["status"] == "error"}
    assert len(errors) >= 1
    assert set(resumed.samples) == set(rows) - errors
    assert len(resumed.samples) >= ANSWERED - 2
    assert resumed.owed == tuple(index for index in range(20) if index not in resumed.samples)
    assert {sample.question for sample in resumed.samples.values()} == {
        SMOKE[index]["question"] for index in resumed.samples
    }
    assert all(json.loads(json.dumps(asdict(sample))) == rows[index] for index, sample in resumed.samples.items())
    assert all(isinstance(sample.status, Status) for sample in resumed.samples.values())


def test_a_config_that_was_not_begun_owes_everything(folder: Path) -> None:
    """Neither a folder without samples nor one that is not there is a mistake."""
    assert resumable(folder / "none", smoke(), result_of(folder)).owed == tuple(range(20))


def test_a_torn_last_sample_is_owed(folder: Path) -> None:
    """A run that SIGKILL ended may leave half a line, and no result."""
    asked = result_of(folder)
    path = folder / "samples.jsonl"
    before = resumable(folder, smoke(), asked)
    last = list(read_samples(path))[-1]["index"]
    path.write_bytes(path.read_bytes()[:-9])
    (folder / "result.json").unlink()
    after = resumable(folder, smoke(), asked)
    assert set(before.samples) - set(after.samples) <= {last}
    assert last in after.owed


@pytest.mark.parametrize("changed", ["question", "gold", "prompt_sha256"])
def test_a_sample_of_another_prompt_is_owed(folder: Path, changed: str) -> None:
    """A sample that does not hold what would be asked now is asked again, whatever its index."""
    asked = result_of(folder)
    path = folder / "samples.jsonl"
    rows = [row for row in read_samples(path) if row["status"] != "error"]
    rows[0][changed] = "other"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    resumed = resumable(folder, smoke(), asked)
    assert rows[0]["index"] in resumed.owed
    assert set(resumed.samples) == {row["index"] for row in rows[1:]}


def changed(asked: Asked, **server: Any) -> Asked:
    return replace(asked, server={**asked.server, **server})


OTHERS: dict[str, tuple[Callable[[Asked], Asked], str]] = {
    "model": (lambda a: replace(a, model_name="n"), 'model: "m" in that run, "n" here'),
    "config": (lambda a: replace(a, config_id="other"), "config_id"),
    "revision": (lambda a: changed(a, revision="0" * 40), f'revision: "{NOT_RECORDED}" in that run'),
    "version": (lambda a: changed(a, version="10"), 'server version: "9.9" in that run, "10" here'),
    "gpus": (lambda a: changed(a, gpus=["H200"]), "GPUs"),
    "grader": (lambda a: replace(a, grader=999), "grader"),
    "harness": (lambda a: replace(a, harness_version="999"), "harness_version"),
    "sampling": (lambda a: replace(a, task=smoke(temperature=0.5).describe()), "task sampling"),
    "worked-examples": (lambda a: replace(a, task=smoke(num_fewshot=1).describe()), "task prompts_sha256"),
    "questions": (lambda a: replace(a, task=smoke(num_questions=5).describe()), "task questions"),
    "argument": (
        lambda a: changed(a, command=["vllm", "serve", "m", "--port", "1", "--dtype", "half"]),
        f'argument --dtype: "{NOT_RECORDED}" in that run, "half" here',
    ),
    "env": (lambda a: changed(a, env={"VLLM_X": "1"}), "env VLLM_X"),
    "offline-arguments": (lambda a: changed(a, arguments=["--x"]), "server arguments"),
    "starter": (lambda a: changed(a, started_by="this run"), "server started_by"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_of_something_else_is_refused(folder: Path, name: str) -> None:
    """Answers of two settings make no one accuracy: what differs is named, with both values."""
    change, says = OTHERS[name]
    with pytest.raises(ConfigError, match=re.escape(says)) as fault:
        resumable(folder, smoke(), change(result_of(folder)))
    assert str(folder) in str(fault.value)


def test_what_is_new_with_every_start_is_no_difference(folder: Path) -> None:
    """The port that the server listens on changes, and where the program lies."""
    asked = result_of(folder)
    starts = [
        changed(
            asked,
            base_url=f"http://127.0.0.1:{port}",
            started_by="this run",
            command=[f"/{port}/vllm", "serve", "m", "--dtype", "half", "--host", "127.0.0.1", "--port", str(port)],
        )
        for port in (8001, 8002)
    ]
    starts[0].write(folder)
    assert resumable(folder, smoke(), starts[1]).samples


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda f: (f / "request.json").unlink(), ConfigError, "what was asked there is not known"),
        (lambda f: (f / "request.json").write_text("{"), DataUnavailable, "request.json: is damaged"),
        (lambda f: (f / "request.json").write_text("[]"), DataUnavailable, "request.json: is damaged"),
        (lambda f: (f / "request.json").write_text('{"schema": 99}'), ConfigError, "is of version 99"),
        (lambda f: (f / "samples.jsonl").write_text('{"index": 1}\n'), DataUnavailable, "samples.jsonl: is damaged"),
        (lambda f: (f / "samples.jsonl").write_text("nonsense\n"), DataUnavailable, "samples.jsonl: is damaged"),
        (
            lambda f: (f / "samples.jsonl").write_bytes((f / "samples.jsonl").read_bytes() * 2),
            DataUnavailable,
            "twice",
        ),
    ],
    ids=["no-request", "torn-request", "no-object", "version", "no-sample", "no-json", "doubled"],
)
def test_a_record_that_cannot_be_trusted_is_refused(
    folder: Path, damage: Callable[[Path], object], error: type[Exception], says: str
) -> None:
    """Each message names the file and what is the matter."""
    asked = result_of(folder)
    damage(folder)
    with pytest.raises(error, match=says) as fault:
        resumable(folder, smoke(), asked)
    assert str(folder) in str(fault.value)


def test_a_run_is_found_by_the_beginning_of_its_id(folder: Path) -> None:
    """Its whole id or as much as is its alone; else those there are are named."""
    results, run = folder.parent.parent, folder.parent
    other = results / f"{run.name[:-1]}_"
    shutil.copytree(run, other)
    assert find_run(results, run.name) == run
    for wrong in (run.name[:8], "nothing", ""):
        with pytest.raises(ConfigError, match=re.escape(run.name)):
            find_run(results, wrong)
    shutil.rmtree(other)
    assert find_run(results, run.name[:8]) == run
    with pytest.raises(ConfigError, match="none"):
        find_run(results / "nowhere", "x")
