"""The Markdown of a run, its caps, GitHub's commands, and what names an annotation."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import HOSTILE, OUTAGE, REGRESSION, finish, mixed_run, sample, write_config
from snapshots import assert_as_kept

from harness.config_lists import load_lists
from harness.gates.threshold import Verdict
from harness.records import RunRecord
from harness.reports import buildkite, github
from harness.reports.documents import ConfigDocument, RunDocument, read_run
from harness.reports.markdown import LIMIT_BYTES, render_markdown
from harness.reports.pointers import gate_key, options_given, places, rerun
from harness.reports.write import write_reports
from harness.serving import RunOptions


@pytest.fixture
def run(tmp_path: Path) -> RunDocument:
    folder = mixed_run(tmp_path)
    return read_run(folder, base=tmp_path)


def named(run: RunDocument, count: int) -> RunDocument:
    """Give the regression of a run so many configs' places."""
    worse = next(config for config in run.configs if config.row.config_id == REGRESSION)
    configs = tuple(replace(worse, row=replace(worse.row, config_id=f"config-{i:04}")) for i in range(count))
    return replace(run, configs=configs)


def assert_whole(text: str) -> None:
    """No folded part and no code block is left open."""
    fence: str | None = None
    depth = 0
    for line in text.splitlines():
        marks = re.match(r"`{3,}", line)
        if fence is not None:
            fence = None if line == fence else fence
        elif marks:
            fence = marks.group()
        else:
            depth += line.count("<details>") - line.count("</details>")
            assert depth in (0, 1)
    assert (fence, depth) == (None, 0)


def test_the_markdown_reads_as_kept(run: RunDocument) -> None:
    """The table first, then each config folded away, failures before the rest."""
    skipping = replace(run, run={**run.run, "skipped": {"gpu/skipped": "needs 2 GPUs, 0 here"}})
    text = render_markdown(skipping)
    assert_whole(text)
    assert_as_kept("run.md", text.replace(Path(run.folder).name, "RUN"))


def test_what_is_too_much_is_left_out_whole(run: RunDocument) -> None:
    """Of two megabytes of details the last configs' go, how many is said, and nothing is left open."""
    many = named(run, 1100)
    assert len(render_markdown(many, limit_bytes=10**9).encode()) > 2_000_000
    text = render_markdown(many)
    assert 0.9 * LIMIT_BYTES < len(text.encode()) <= LIMIT_BYTES
    assert_whole(text)
    shown = text.count("<details>")
    assert f"\n{1100 - shown} configs are left out here" in text
    assert text.count("| `config-") == 1100
    assert f"<code>config-{shown - 1:04}</code>" in text


@pytest.mark.parametrize("limit", [0, 1, 100, 1000, 5000, 20_000, 70_000])
def test_no_limit_is_exceeded(run: RunDocument, limit: int) -> None:
    """Whatever is left to write in, a letter is never cut in half, and the table goes last."""
    wide = replace(run, configs=tuple(renamed(config, f"模型-{n}") for n, config in enumerate(named(run, 50).configs)))
    text = render_markdown(wide, limit_bytes=limit)
    assert len(text.encode()) <= limit
    if limit >= 1000:
        assert_whole(text)
        assert "left out here" in text


def renamed(config: ConfigDocument, name: str) -> ConfigDocument:
    return replace(config, row=replace(config.row, config_id=name))


def test_a_text_of_megabytes_is_clipped(tmp_path: Path) -> None:
    """One endless reply does not crowd out the rest; its end, where the answer stands, is kept."""
    record = RunRecord.create(tmp_path)
    write_config(record, "A", [sample(i, right=False, reply="word " * 400_000) for i in range(6)])
    finish(record, ["A"])
    text = render_markdown(read_run(record.folder))
    assert "#### 701" in text
    assert "letters …]" in text
    assert len(text) < 40_000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, name: str) -> None:
    """Replies, reasons and logs bring no HTML, no link, no escape and no end of a code block."""
    record = RunRecord.create(tmp_path)
    text = HOSTILE[name]
    rows = [sample(i, right=False, reply=text, extracted=text, gold=text, question=text) for i in range(6)]
    write_config(record, "A", rows)
    write_config(record, "B", [], fault=text)
    (record.folder / "B/server.log").write_bytes(text.encode(errors="surrogatepass"))
    finish(record, ["A", "B"])
    markdown = render_markdown(read_run(record.folder))
    assert_whole(markdown)
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", markdown)
    outside = re.sub(r"(`+)[^`].*?\1", "", outside)
    assert set(re.findall(r"<(/?\w+)", outside)) <= {"details", "summary", "code", "/details", "/summary", "/code"}
    assert "](" not in outside
    assert [c for c in markdown if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn"} and c != "\n"] == []


def test_report_md_is_made_again_from_the_record_alone(run: RunDocument, tmp_path: Path) -> None:
    """The same record gives the same file."""
    folder = next(path.parent for path in tmp_path.glob("*/run.json"))
    first = write_reports(folder).read_bytes()
    assert write_reports(folder).read_bytes() == first
    assert (folder / "report.md").read_bytes() == first


CONFIG = """\
model_name: m
task: smoke

accuracy_threshold: 0.5
tolerance: 0.1
min_acceptance_length: 1.2
overrides:
  cpu:
    accuracy_threshold: 0.4
tasks:
  - task: smoke
  - name: harder
    task: smoke
    accuracy_threshold: 0.9
"""


def test_gates_are_found_where_the_file_writes_them(tmp_path: Path) -> None:
    """In a task's own row, or at the top where the row says nothing of it."""
    (tmp_path / "A.yaml").write_text(CONFIG)
    (tmp_path / "list.txt").write_text("A.yaml\n")
    plain, harder = load_lists([tmp_path / "list.txt"])
    assert places(plain)["keys"]["accuracy_threshold"] == [4, 1]
    assert places(harder)["keys"]["accuracy_threshold"] == [14, 5]
    assert places(harder)["keys"]["min_acceptance_length"] == [6, 1]
    assert "max_flip_rate" not in places(plain)["keys"]
    overridden = replace(plain, config=plain.config.model_copy(update={"accuracy_threshold": 0.4}))
    assert places(overridden)["keys"]["accuracy_threshold"] == [9, 5]


@pytest.mark.parametrize(
    ("gate", "key"),
    [
        ("accuracy", "accuracy_threshold"),
        ("accuracy, pass 2", "accuracy_threshold"),
        ("bits per byte", "max_bits_per_byte"),
        ("bits per byte increase", "max_bits_per_byte_increase"),
        ("startup check reset", "startup_rpc_checks"),
        ("something new", "accuracy_threshold"),
    ],
)
def test_each_gate_has_its_key(gate: str, key: str) -> None:
    """A failed gate points at the line that asks for it."""
    assert gate_key(gate) == key


def annotated(run: RunDocument, path: Path, **env: str) -> list[str]:
    keys = {"model_name": [1, 1], "accuracy_threshold": [4, 1], "max_flip_rate": [7, 3]}
    configs = tuple(replace(config, place={"path": str(path), "keys": keys}) for config in run.configs)
    return list(github.commands(replace(run, configs=configs), env))


def test_each_failure_is_annotated_on_its_line(run: RunDocument, tmp_path: Path) -> None:
    """A regression first, then the outage, on the threshold's line, the path as the repository has it."""
    worse, outage = annotated(run, tmp_path / "configs/A, B.yaml", GITHUB_WORKSPACE=str(tmp_path))
    assert worse.startswith(
        "::error file=configs/A%2C B.yaml,line=4,col=1,"
        "title=accuracy-gate%3A cpu/worse%3A the model got worse::cpu/worse: accuracy 0.5085 is 0.2115 below"
    )
    assert "95%25 interval" in worse
    assert "title=accuracy-gate%3A gpu/outage%3A infrastructure, not the model".replace("e, n", "e%2C n") in outage
    assert outage.endswith("::gpu/outage: the server exited with code 1 while it started")


def test_a_failure_of_another_gate_is_annotated_on_that_one(run: RunDocument, tmp_path: Path) -> None:
    """Whoever looks at the flips' limit is shown the flips' limit."""
    worse = next(config for config in run.configs if config.row.config_id == REGRESSION)
    gate = {"name": "flip rate", "verdict": "regression", "message": "too many"}
    flipped = replace(worse, result={**worse.result, "gates": [gate]})
    [line] = annotated(replace(run, configs=(flipped,)), tmp_path / "A.yaml", GITHUB_WORKSPACE=str(tmp_path))
    assert line.startswith("::error file=A.yaml,line=7,col=3,")
    assert line.endswith("::cpu/worse: too many")


@pytest.mark.parametrize(("failures", "lines"), [(9, 9), (10, 10), (11, 10), (40, 10)])
def test_github_shows_ten_errors(run: RunDocument, tmp_path: Path, failures: int, lines: int) -> None:
    """Beyond ten the last one sums up, so that no failure goes without a word."""
    found = annotated(named(run, failures), tmp_path / "A.yaml")
    assert len(found) == lines
    if failures > 10:
        assert f"title=accuracy-gate%3A {failures - 9} more configs failed::" in found[-1]
        assert f"config-{failures - 1:04}" in found[-1]


def test_an_old_record_is_annotated_without_a_place(run: RunDocument) -> None:
    """Where nobody wrote down where the gates stand, there is a title all the same."""
    first, _ = github.commands(run, {})
    assert first.startswith("::error title=accuracy-gate%3A cpu/worse")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_makes_no_command(run: RunDocument, name: str) -> None:
    """Nothing that others wrote begins a workflow command or ends one early."""
    outage = next(config for config in run.configs if config.row.config_id == OUTAGE)
    evil = f"{HOSTILE[name]}\r\n::error::owned\n##[error]owned"
    row = replace(outage.row, reason=evil, config_id=f"x::{name}, y=\n")
    config = replace(outage, row=row, log=("::stop-commands::x", "  ::error::owned", "a ##[group]owned", evil))
    lines = [*github.commands(replace(run, configs=(config,)), {}), *github.log_groups(replace(run, configs=(config,)))]
    assert [re.match(r"\s*::(\S+?)[ :]", line).group(1) for line in lines if line.lstrip().startswith("::")] == [  # type: ignore[union-attr]
        "error",
        "group",
        "endgroup",
    ]
    assert all("\n" not in line and "\r" not in line and "##[" not in line for line in lines)


def test_the_summary_is_added_within_what_is_left(run: RunDocument, tmp_path: Path) -> None:
    """What other writers of the step put there stays, and counts against the limit."""
    path = tmp_path / "summary.md"
    path.write_text("x" * (LIMIT_BYTES - 3000))
    assert github.write_summary(run, {"GITHUB_STEP_SUMMARY": str(path)}) is None
    assert path.stat().st_size <= LIMIT_BYTES
    assert "| `cpu/worse` | **REGRESSION** |" in path.read_text()


def test_a_summary_that_cannot_be_written_is_a_line(run: RunDocument, tmp_path: Path) -> None:
    """It names the file and why."""
    said = github.write_summary(run, {"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert said is not None
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("lists", "env", "context"),
    [
        (["configs/models-small.txt"], {}, "accuracy-gate-models-small"),
        (["a/one.txt", "two.txt"], {}, "accuracy-gate-one+two"),
        (["odd name;.txt"], {}, "accuracy-gate-odd-name-"),
        (["m.txt"], {"BUILDKITE_PARALLEL_JOB": "3"}, "accuracy-gate-m-3"),
    ],
)
def test_an_annotation_is_named_after_its_lists(lists: list[str], env: Mapping[str, str], context: str) -> None:
    """A second try replaces the first, and other lists or shards have their own."""
    assert buildkite.context_of(lists, env) == context


@pytest.mark.parametrize(
    ("config_id", "command"),
    [
        ("cpu/good", "pytest --config-list-file=m.txt --gpus=0 -k '[cpu/good]'"),
        ("a:task-2", "pytest --config-list-file=m.txt --gpus=0 -k '[a:task-2]'"),
        ("an id", "pytest --config-list-file=m.txt --gpus=0 'tests/test_accuracy.py::test_accuracy[an id]'"),
    ],
)
def test_one_config_can_be_run_again(config_id: str, command: str) -> None:
    """The command names this config alone, whatever its id, with the options of the run."""
    assert rerun(config_id, ["m.txt"], options_given(RunOptions(gpu_choice="0", api_key="secret"))) == command


def test_options_hold_no_secret() -> None:
    """A password in an address is masked before it is written down."""
    given = options_given(RunOptions(base_url="http://me:hunter2hunter2@host:8000", require_gpus=True))
    assert "hunter2" not in " ".join(given)
    assert given[-1] == "--require-gpus"


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_style(verdict: Verdict) -> None:
    """Red for a model that got worse, a warning for an outage."""
    expected: dict[Verdict, Any] = {
        Verdict.REGRESSION: "error",
        Verdict.INFRASTRUCTURE: "warning",
        Verdict.PASS: "success",
    }
    assert buildkite.STYLES[verdict] == expected[verdict]
