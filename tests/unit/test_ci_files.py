"""The pipelines and recipes that teams copy: valid by their published schemas, and run as far as they go alone."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from loopback import Reply, loopback_server
from run_records import OUTAGE, PASS, REGRESSION, mixed_run

from harness.commands import list_command, merge_command
from harness.records import write_json

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW, PIPELINE = ROOT / ".github" / "workflows" / "accuracy.yml", ROOT / "docs" / "ci" / "buildkite.yml"


def published_schema(name: str) -> Any:
    """Take a schema from check-jsonschema, which carries those of schemastore and Buildkite."""
    found = importlib.util.find_spec("check_jsonschema")
    assert found is not None, "check-jsonschema is not installed: `make test` installs it from requirements/dev.lock"
    assert found.origin is not None
    return json.loads((Path(found.origin).parent / "builtin_schemas" / "vendor" / f"{name}.json").read_text())


def faults(document: Any, schema: str) -> list[str]:
    validator = jsonschema.validators.validator_for(published := published_schema(schema))(published)
    return [f"{'/'.join(map(str, error.path))}: {error.message[:300]}" for error in validator.iter_errors(document)]


def workflow() -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    document["on"] = document.pop(True)  # YAML 1.1 reads `on` as true; GitHub does not
    return document


def test_workflow_is_valid() -> None:
    """The workflow keeps to GitHub's published schema, which does refuse what is none."""
    assert faults(workflow(), "github-workflows") == []
    assert faults({**workflow(), "permission": {}}, "github-workflows")


def test_workflow_may_read_alone_and_ends() -> None:
    """No job may write to the repository, and none runs for ever."""
    document = workflow()
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is True
    for job in document["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"]


def test_workflow_keeps_every_record() -> None:
    """Records are kept whatever became of the job that made them."""
    for job in ("ask", "verdict"):
        (kept,) = [step for step in workflow()["jobs"][job]["steps"] if step.get("with", {}).get("path") == "results/"]
        assert kept["if"] == "always()"
        assert kept["uses"].startswith("actions/upload-artifact@")


def test_pipelines_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline, and the steps that it uploads, keep to Buildkite's published schema."""
    assert faults(yaml.safe_load(PIPELINE.read_text()), "buildkite") == []
    parser = argparse.ArgumentParser()
    list_command.add_options(parser)
    list_command.run(parser.parse_args(["models-small.txt", "--format=buildkite", "--shards=3"]))
    uploaded = yaml.safe_load(capsys.readouterr().out)
    assert faults(uploaded, "buildkite") == []
    assert faults({"steps": [{**uploaded["steps"][0], "retry": 3}]}, "buildkite")


def test_commands_in_the_pipelines_are_ours() -> None:
    """Every option of our own commands that the files use is one that there is."""
    scripts = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    scripts += [step["command"] for step in yaml.safe_load(PIPELINE.read_text())["steps"] if "command" in step]
    used: set[str] = set()
    for module, name in ((list_command, "list"), (merge_command, "merge")):
        parser = argparse.ArgumentParser()
        module.add_options(parser)
        known = set(parser._option_string_actions)
        lines = [line for text in scripts for line in text.replace("\\\n", " ").splitlines()]
        for line in (line for line in lines if f"accuracy-gate {name} " in line):
            options = set(re.findall(r"(?<= )--[a-z-]+", re.sub(r"'[^']*'", "", line)))
            assert options <= known, line
            used |= options
    assert {"--shards", "--expect", "--plan", "--format"} <= used


STAND_IN = """#!/usr/bin/env bash
echo "$@" >> calls
trap 'sleep 0.2; echo stopped >> calls; exit 2' TERM
status=$(sed -n "$(wc -l < calls)p" statuses)
if [ "$status" = wait ]; then touch waiting; for i in $(seq 600); do sleep 0.1; done; fi
exit "$status"
"""


@pytest.fixture
def asking(tmp_path: Path) -> list[str]:
    """The step of the workflow that asks, as GitHub runs it, with a stand-in for pytest."""
    (script,) = [step["run"] for step in workflow()["jobs"]["ask"]["steps"] if "--configs" in step.get("run", "")]
    (tmp_path / "step.sh").write_text(script)
    stand_in = tmp_path / ".venv" / "bin" / "pytest"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(tmp_path / "step.sh")]


ATTEMPTS = {
    "good": (["0"], 0),
    "worse is not tried again": (["1"], 1),
    "out, then good": (["75", "0"], 0),
    "out, then worse": (["75", "1"], 1),
    "out twice": (["75", "75", "0"], 75),
    "a mistake is not tried again": (["4"], 4),
}


@pytest.mark.parametrize(("statuses", "expected"), ATTEMPTS.values(), ids=list(ATTEMPTS))
def test_workflow_asks_again_after_an_outage_alone(
    tmp_path: Path, asking: list[str], statuses: list[str], expected: int
) -> None:
    """The step runs the suite once more for exit code 75, once, and for no other."""
    (tmp_path / "statuses").write_text("\n".join(statuses) + "\n")
    env = {**os.environ, "LIST": "a list.txt", "CONFIGS": "a b,c"}
    done = subprocess.run(asking, cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == expected, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["--config-list-file=a list.txt --configs=a b,c --require-gpus"] * (2 if statuses[0] == "75" else 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cancelled_workflow_stops_the_suite(tmp_path: Path, asking: list[str], number: signal.Signals) -> None:
    """A cancellation reaches the suite, which is waited for and not started again."""
    (tmp_path / "statuses").write_text("wait\n75\n")
    step = subprocess.Popen(asking, cwd=tmp_path, env={**os.environ, "LIST": "l", "CONFIGS": "c"})
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "waiting").exists():
            assert time.monotonic() < deadline, "the stand-in did not start"
            time.sleep(0.02)
        step.send_signal(number)
        assert step.wait(timeout=30) == 2
    finally:
        step.kill()
        step.wait()
    assert (tmp_path / "calls").read_text().splitlines()[1:] == ["stopped"]


def recipe(title: str) -> str:
    text = (ROOT / "docs" / "recipes.md").read_text()
    found = re.search(rf"^## {re.escape(title)}\n.*?^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no recipe {title}"
    return found[1]


def run_recipe(title: str, folder: Path, run: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe as it stands, with the modules that lie in the folder."""
    (folder / "recipe.py").write_text(recipe(title))
    done = subprocess.run(
        [sys.executable, str(folder / "recipe.py"), str(run)],
        env={**os.environ, "PYTHONPATH": str(folder), "no_proxy": "127.0.0.1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


RECORDER = """
import json, pathlib
def call(name, *arguments, **keywords):
    with open({calls!r}, "a") as calls:
        calls.write(json.dumps([name, arguments, keywords], allow_nan=False) + "\\n")
"""
MLFLOW = (
    RECORDER
    + """
import contextlib
def set_experiment(name): call("set_experiment", name)
def set_tags(tags): call("set_tags", tags)
def log_artifact(path): call("log_artifact", path, there=pathlib.Path(path).is_file())
def log_metrics(metrics): call("log_metrics", {{name: float(value) for name, value in metrics.items()}})
def start_run(run_name): call("start_run", run_name); return contextlib.nullcontext()
"""
)
WANDB = (
    RECORDER
    + """
class Table:
    def __init__(self, columns, data):
        assert all(len(row) == len(columns) for row in data)
        self.columns, self.data = columns, data
class Run:
    summary = {{}}
    def __enter__(self): return self
    def __exit__(self, *fault): call("summary", self.summary)
    def log(self, logged): call("log", {{name: [table.columns, table.data] for name, table in logged.items()}})
def init(project, name, config): call("init", project, name, config); return Run()
"""
)


def recorded(folder: Path, module: str, source: str, title: str, run: Path) -> list[Any]:
    (folder / f"{module}.py").write_text(source.format(calls=str(folder / "calls")))
    run_recipe(title, folder, run)
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_mlflow_recipe_logs_each_config(tmp_path: Path) -> None:
    """Each config becomes a run with its verdict and the figures that it has; one without any has none."""
    run = mixed_run(tmp_path / "results")
    calls = recorded(tmp_path, "mlflow", MLFLOW, "MLflow", run)
    started = [arguments[0] for name, arguments, _ in calls if name == "start_run"]
    assert started == [f"{config_id} {run.name}" for config_id in (PASS, REGRESSION, OUTAGE)]
    good, _, out = [arguments[0] for name, arguments, _ in calls if name == "log_metrics"]
    assert good["accuracy"] == pytest.approx(50 / 60)
    assert good["acceptance_length"] == pytest.approx(2.333)
    assert "accuracy" not in out
    assert all(keywords["there"] for name, _, keywords in calls if name == "log_artifact")


def test_wandb_recipe_logs_a_table(tmp_path: Path) -> None:
    """The run becomes a table of its configs and a summary."""
    run = mixed_run(tmp_path / "results")
    calls = {name: arguments for name, arguments, _ in recorded(tmp_path, "wandb", WANDB, "Weights & Biases", run)}
    columns, rows = calls["log"][0]["configs"]
    assert [row[columns.index("verdict")] for row in rows] == ["pass", "regression", "infrastructure"]
    assert calls["summary"][0] == {
        f"{PASS}/accuracy": pytest.approx(50 / 60),
        f"{REGRESSION}/accuracy": pytest.approx(30 / 59),
        f"{OUTAGE}/accuracy": None,
        "exit_code": 1,
    }


def test_hugging_face_recipe_prints_a_model_index(tmp_path: Path) -> None:
    """What passed becomes YAML as model cards hold it; what did not is left out."""
    printed = run_recipe("Hugging Face evaluation results", tmp_path, mixed_run(tmp_path / "results")).stdout
    (model,) = yaml.safe_load(printed)["model-index"]
    assert model["name"] == "example/good-8B"
    (result,) = model["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": 0.8333, "verified": False}]
    assert result["dataset"] == {"name": "gsm8k", "type": "gsm8k"}


def test_slack_recipe_posts_what_failed(tmp_path: Path) -> None:
    """What is worse, out or missing is posted, with what others wrote made harmless; a good run posts nothing."""
    run = mixed_run(tmp_path / "results")
    document = json.loads((run / "run.json").read_text())
    document["configs"][2]["reason"] = "a <!channel> & more"
    write_json(run / "run.json", {**document, "missing": ["gpu/lost"]})
    posted: list[dict[str, Any]] = []

    def hook(body: dict[str, Any]) -> Reply:
        posted.append(body)
        return Reply(body="ok")

    with loopback_server(lambda body, number: Reply(status=404), posts={"/hook": hook}) as server:
        address = f"{server.base_url}/hook"
        run_recipe("Slack", tmp_path, run, SLACK_WEBHOOK_URL=address)
        good = [row for row in document["configs"] if row["verdict"] == "pass"]
        write_json(run / "run.json", {**document, "configs": good})
        run_recipe("Slack", tmp_path, run, SLACK_WEBHOOK_URL=address)
    (message,) = posted
    lines = message["text"].splitlines()
    assert lines[0] == f"accuracy-gate {run.name}"
    assert lines[1].startswith(f"*{REGRESSION}*: regression: accuracy 0.5085")
    assert lines[2] == f"*{OUTAGE}*: infrastructure: a &lt;!channel&gt; &amp; more"
    assert lines[3] == "*gpu/lost*: never reported"
