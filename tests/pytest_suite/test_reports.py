"""What a run tells people and programs: terminal, JUnit, report log, GitHub Actions, Buildkite, report.md."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import stat
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from loopback import Reply, Script, completion, loopback_server
from run_records import HOSTILE

SMOKE = Path(__file__).resolve().parents[2] / "harness/tasks/data/smoke.jsonl"
GOLD = {row["question"]: row["answer"] for row in map(json.loads, SMOKE.read_text().splitlines())}
LIST = "--config-list-file=models-small.txt"
AGENT = (
    f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nPath('agent.md').write_bytes(sys.stdin.buffer.read())\n"
)


def right(body: dict[str, Any], n: int) -> Reply:
    return completion(" " + GOLD[body["prompt"].rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")])


def wrong(body: dict[str, Any], n: int) -> Reply:
    return completion("#### 999983")


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "BUILDKITE", "BUILDKITE_PARALLEL_JOB")
    for name in (*names, "NO_COLOR", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)


def run(mini_suite, script: Script, *arguments: str, **server: Any) -> pytest.RunResult:
    with loopback_server(script, **server) as loopback:
        return mini_suite.run(LIST, f"--base-url={loopback.base_url}", *arguments)


def test_the_header_says_where_and_with_what(mini_suite) -> None:
    """Lists, record, platform, GPUs, what answers and the commit stand before the first test."""
    text = run(mini_suite, right).stdout.str()
    assert re.search(r"^accuracy-gate: .*models-small\.txt; record: .*/results/", text, re.MULTILINE)
    line = r"^platform: .+; GPUs: .+; engine: the server at http://127\.0\.0\.1:\d+; commit: \w+$"
    assert re.search(line, text, re.MULTILINE)


def test_a_failure_explains_itself(mini_suite) -> None:
    """After the table: how much worse, whether by chance, what was answered, what to run."""
    result = run(mini_suite, wrong)
    result.stdout.fnmatch_lines(
        [
            "A: REGRESSION",
            "*accuracy 0.0000 is 0.5000 below the floor 0.5: 0 of 4 right*",
            "*the model, or how it is served: 0 of 4 requests failed*",
            "*wrong, such as:",
            "*question 0: gold *, said 999983: *",
            "*pytest --config-list-file=configs/models-small.txt --base-url=http*-k '[[]A[]]'",
            "record: *report.html",
        ]
    )


def test_the_last_green_run_shows_what_was_answered_before(mini_suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A red run after a green one names what changed and what was right then."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run(mini_suite, right).ret == 0
    result = run(mini_suite, wrong)
    result.stdout.fnmatch_lines(["*wrong now and right before:", "*question 0: gold *, said 999983, before *"])
    result.stdout.fnmatch_lines(["*since the last green run, *: no setting that is recorded"])


def test_skipped_configs_are_in_table_and_record_and_deselected_ones_are_not(mini_suite) -> None:
    """A skip is no pass and tells why; what nobody asked for is not told of."""
    mini_suite.add("B", more="skip:\n  - {when: [cpu, cuda, rocm], reason: 'too <big>'}\n")
    mini_suite.add("C")
    mini_suite.list("A", "B", "C")
    with loopback_server(right) as loopback:
        template = f"{sys.executable} -m http.server {{port}} {{model}} {{args}}"
        result = mini_suite.run(LIST, f"--serve-command={template}", "-k", "B")
        assert loopback.requests == []
    assert result.ret == 0
    result.stdout.fnmatch_lines(["B * skipped", "    *too <big>*"])
    assert not re.search(r"^C ", result.stdout.str(), re.MULTILINE)
    assert "too <big>" in mini_suite.run_json()["skipped"]["B"]
    report = (mini_suite.records()[-1] / "report.md").read_text()
    assert "| `B` | skipped: " in report
    assert "<big>" not in report


@pytest.mark.parametrize(
    ("arguments", "env", "coloured"),
    [([], {}, False), (["--color=yes"], {}, True), (["--color=auto"], {"NO_COLOR": "1"}, False)],
    ids=["no terminal", "asked for", "NO_COLOR"],
)
def test_colour_is_where_pytest_has_it(
    mini_suite, monkeypatch: pytest.MonkeyPatch, arguments: list[str], env: dict[str, str], coloured: bool
) -> None:
    """Verdicts are coloured as pytest colours its own, and nothing is where it does not."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    text = run(mini_suite, wrong, *arguments).stdout.str()
    assert bool(re.search(r"^A .*\x1b\[31mREGRESSION", text, re.MULTILINE)) is coloured
    assert ("\x1b" in text) is coloured


def test_in_a_log_progress_is_a_few_plain_lines(mini_suite) -> None:
    """Under pytest's capture each change of stage is a line of its own, and nothing moves."""
    result = run(mini_suite, right)
    lines = result.stderr.str().splitlines()
    assert [line for line in lines if line.startswith("A: ")] == lines[-3:] == [line for line in lines if line]
    assert lines[-3:-1] == ["A: starting", "A: ready after 0 s"]
    assert lines[-1].startswith("A: 4/4, ")
    assert "\r" not in result.stderr.str()


def test_the_lines_of_workers_reach_the_log(mini_suite) -> None:
    """Under xdist, whose workers have no terminal, each line arrives whole."""
    mini_suite.add("B")
    mini_suite.list("A", "B")
    lines = run(mini_suite, right, "-n2").stderr.str().splitlines()
    for name in ("A", "B"):
        assert [line for line in lines if line.startswith(f"{name}: ")][:2] == [
            f"{name}: starting",
            f"{name}: ready after 0 s",
        ]


def test_on_a_terminal_progress_moves(mini_suite) -> None:
    """A person sees one line that is written over."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", LIST]
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with loopback_server(lambda body, n: Reply(**{**fields(right(body, n)), "delay": 0.3 * n})) as loopback:
        process = subprocess.Popen(
            [*command, f"--base-url={loopback.base_url}"], stdout=subprocess.DEVNULL, stderr=theirs
        )
        assert process.wait(timeout=60) == 0
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\rA: starting 0 s" in shown
    assert re.search(r"\rA: +\d+%.* \d/4 ", shown)
    assert "A: ready" not in shown


def fields(reply: Reply) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in reply.__dataclass_fields__}


@pytest.mark.parametrize("family", ["xunit1", "xunit2"])
def test_junit_properties_are_flat_scalars(mini_suite, family: str) -> None:
    """What CI systems chart is there by name, what was not measured is not, in both families."""
    run(mini_suite, wrong, "--junitxml=junit.xml", "-o", f"junit_family={family}")
    found = {p.get("name"): p.get("value") for p in ElementTree.parse("junit.xml").iter("property")}
    assert (found["config_id"], found["verdict"], found["accuracy"], found["floor"]) == (
        "A",
        "regression",
        "0.0",
        "0.5",
    )
    assert (found["errors"], found["correct"]) == ("0", "0")
    assert "acceptance_length" not in found
    assert "None" not in found.values()


def test_a_report_log_holds_the_figures(mini_suite) -> None:
    """pytest-reportlog writes every property as JSON, of passes and of failures."""
    pytest.importorskip("pytest_reportlog")
    mini_suite.add("B", threshold=0.0)
    mini_suite.list("A", "B")
    run(mini_suite, wrong, "--report-log=log.jsonl")
    events = [json.loads(line) for line in (mini_suite.path / "log.jsonl").read_text().splitlines()]
    calls = [dict(event["user_properties"]) for event in events if event.get("when") == "call"]
    assert {call["config_id"]: (call["verdict"], call["accuracy"]) for call in calls} == {
        "A": ("regression", 0.0),
        "B": ("pass", 0.0),
    }
    assert {type(value) for call in calls for value in call.values()} <= {str, int, float}


@pytest.fixture
def on_github(mini_suite, monkeypatch: pytest.MonkeyPatch) -> Path:
    summary: Path = mini_suite.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(mini_suite.path))
    return summary


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_github_gets_one_summary_and_an_error_on_the_threshold(mini_suite, on_github: Path, workers: list[str]) -> None:
    """The controller alone writes; the annotation stands on the line that holds the threshold."""
    mini_suite.add("B", more="server_args: --served-model-name other\n")
    mini_suite.list("A", "B")
    result = run(mini_suite, wrong, *workers)
    assert result.ret == 1
    text = on_github.read_text()
    assert text.count("## accuracy-gate: 1 got worse, 1 could not be judged") == 1
    assert text == (mini_suite.records()[-1] / "report.md").read_text()
    errors = [line for line in result.stdout.str().splitlines() if line.startswith("::error ")]
    assert len(errors) == 2
    assert errors[0].startswith(
        "::error file=configs/A.yaml,line=3,col=1,title=accuracy-gate%3A A%3A the model got worse"
    )
    assert "title=accuracy-gate%3A B%3A infrastructure%2C not the model::B: " in errors[1]


def test_a_summary_that_cannot_be_written_changes_no_verdict(mini_suite, on_github: Path) -> None:
    """It is one warning."""
    on_github.mkdir()
    result = run(mini_suite, right)
    assert result.ret == 0
    assert result.stdout.str().count("GITHUB_STEP_SUMMARY") == 1
    result.stdout.fnmatch_lines(["WARNING: GITHUB_STEP_SUMMARY *cannot be written*"])


def test_without_ci_nothing_is_written_for_one(mini_suite) -> None:
    """No command on standard output, and report.md alone."""
    result = run(mini_suite, wrong)
    assert "::error" not in result.stdout.str()
    assert (mini_suite.records()[-1] / "report.md").is_file()


def test_a_missing_agent_changes_no_verdict(mini_suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning line, and the exit code of the verdict."""
    monkeypatch.setenv("BUILDKITE", "true")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    result = run(mini_suite, right)
    assert result.ret == 0
    assert result.stdout.str().count("no annotation: ") == 1


def hostile_script(text: str) -> Script:
    """Answer wrongly, with hostile text and workflow commands around the answer."""

    def answer(body: dict[str, Any], n: int) -> Reply:
        return completion(f"::error::owned\n##[error]owned\n{text}\n#### 999983")

    return answer


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "long line"])
def test_hostile_text_is_harmless_everywhere(
    mini_suite, on_github: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What a model or a server wrote steers no terminal, no page, no runner and breaks no XML."""
    monkeypatch.setenv("BUILDKITE", "true")
    agent = mini_suite.path / "bin/buildkite-agent"
    agent.parent.mkdir()
    agent.write_text(AGENT)
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{agent.parent}{os.pathsep}{os.environ['PATH']}")
    text = HOSTILE[name]
    refusing: Callable[..., Reply] = lambda body, n: Reply(  # noqa: E731
        status=400, body={"error": {"message": f"{text}\n::error::owned ##[error]owned"}}
    )
    for script, code in ((hostile_script(text), 1), (refusing, 75)):
        result = run(mini_suite, script, "--junitxml=junit.xml")
        assert result.ret == code
        ElementTree.parse("junit.xml")
        lines = result.stdout.str().splitlines()
        commands = [line for line in lines if line.lstrip().startswith("::")]
        assert [line.partition(" ")[0] for line in commands] == ["::error"]
        assert not any("##[" in line for line in lines)
        report = (mini_suite.records()[-1] / "report.md").read_text()
        for shown in (result.stdout.str(), report, on_github.read_text(), Path("agent.md").read_text()):
            assert [c for c in shown if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co"} and c != "\n"] == []
