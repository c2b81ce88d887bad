"""The annotation as a real agent's command gets it: arguments, standard input, and what its failure comes to."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_records import PASS, mixed_run

from harness.reports import buildkite
from harness.reports.documents import RunDocument, read_run

AGENT = f"""\
#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(__file__).parent
text = sys.stdin.buffer.read()
with (here / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps({{"argv": sys.argv[1:], "bytes": len(text), "text": text.decode()}}) + "\\n")
"""
LISTS = ["configs/models-small.txt"]


@pytest.fixture
def run(tmp_path: Path) -> RunDocument:
    document = read_run(mixed_run(tmp_path / "results"), base=tmp_path)
    return replace(document, run={**document.run, "lists": LISTS})


def put_agent(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = AGENT) -> Path:
    """Put an executable called buildkite-agent first on PATH."""
    folder.mkdir()
    agent = folder / "buildkite-agent"
    agent.write_text(text)
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "calls.jsonl"


def calls_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_agent_gets_markdown_and_where_it_belongs(
    run: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regression is an error in the lists' own context, with links to artifacts."""
    path = put_agent(tmp_path / "bin", monkeypatch)
    assert buildkite.annotate(run, {}) is None
    [call] = calls_of(path)
    assert call["argv"] == ["annotate", "--style", "error", "--context", "accuracy-gate-models-small"]
    text = str(call["text"])
    assert text.startswith("## accuracy-gate: 1 got worse, 1 could not be judged, 1 passed\n")
    assert f'<a href="artifact://{run.folder}/cpu/worse/samples.jsonl">' in text


@pytest.mark.parametrize(
    ("kept", "style"),
    [(("gpu/outage", PASS), "warning"), ((PASS,), "success")],
    ids=["outage", "pass"],
)
def test_the_style_tells_outage_and_pass_apart(
    run: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...], style: str
) -> None:
    """An outage is no error of the model."""
    path = put_agent(tmp_path / "bin", monkeypatch)
    configs = tuple(config for config in run.configs if config.row.config_id in kept)
    assert buildkite.annotate(replace(run, configs=configs), {}) is None
    assert f"--style {style}" in " ".join(calls_of(path)[0]["argv"])  # type: ignore[arg-type]


def test_an_annotation_holds_a_mebibyte_at_most(
    run: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two megabytes of details reach the agent as less than 1 MiB."""
    path = put_agent(tmp_path / "bin", monkeypatch)
    worse = run.failed[0]
    many = tuple(replace(worse, row=replace(worse.row, config_id=f"config-{number}")) for number in range(1200))
    assert buildkite.annotate(replace(run, configs=many), {}) is None
    [call] = calls_of(path)
    assert 900_000 < int(str(call["bytes"])) <= 1024 * 1024
    assert "configs are left out here" in str(call["text"])


def test_an_agent_that_fails_is_a_line(run: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status and its last words, for a person; without having read what it was given."""
    put_agent(tmp_path / "bin", monkeypatch, "#!/bin/sh\necho first >&2\necho 'fatal: no token' >&2\nexit 7\n")
    assert buildkite.annotate(run, {}) == "no annotation: buildkite-agent ended with 7: fatal: no token"


def test_an_agent_that_hangs_is_a_line(run: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after a while."""
    monkeypatch.setattr(buildkite, "AGENT_SECONDS", 0.3)
    put_agent(tmp_path / "bin", monkeypatch, "#!/bin/sh\nexec sleep 60\n")
    assert buildkite.annotate(run, {}) == "no annotation: buildkite-agent did not end within 0.3 s"


def test_a_missing_agent_is_a_line(run: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is missing and where it is to be had."""
    monkeypatch.setenv("PATH", str(tmp_path))
    said = buildkite.annotate(run, {})
    assert said is not None
    assert said.startswith("no annotation: there is no buildkite-agent here")
