"""From a server's answers to exit codes, tables and records, with a pytest of its own and a real loopback server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from loopback import Reply, Script, completion, loopback_server

SMOKE = Path(__file__).resolve().parents[2] / "harness/tasks/data/smoke.jsonl"
GOLD = {row["question"]: row["answer"] for row in map(json.loads, SMOKE.read_text().splitlines())}


def gold_of(body: dict[str, Any]) -> str:
    question = body["prompt"].rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
    return GOLD[question]


def right(body: dict[str, Any], n: int) -> Reply:
    return completion(" " + gold_of(body))


def wrong(body: dict[str, Any], n: int) -> Reply:
    return completion("#### 999983")


LIST = "--config-list-file=models-small.txt"


def run(mini_suite, script: Script, *arguments: str, **server: Any) -> pytest.RunResult:
    with loopback_server(script, **server) as loopback:
        return mini_suite.run(LIST, f"--base-url={loopback.base_url}", *arguments)


def test_right_answers_pass(mini_suite) -> None:
    """A model that meets its floor exits 0, with a table and a record of every sample."""
    result = run(mini_suite, right)
    assert result.ret == 0
    result.stdout.re_match_lines([r"config +accuracy", r"A +1\.0000 +0\.510-1\.000 +0\.500 +4 .* pass$"])
    stored = mini_suite.result("A")
    assert (stored["verdict"], stored["accuracy"], stored["num_questions"]) == ("pass", 1.0, 4)
    assert (stored["output_tokens"], stored["server"]["version"]) == (28, "9.9")
    assert len((mini_suite.records()[0] / "A/samples.jsonl").read_text().splitlines()) == 4
    facts = mini_suite.run_json()
    assert (facts["exit_code"], facts["listed"], facts["finished"] is None) == (0, ["A"], False)


def test_a_regression_exits_1_and_names_measured_floor_and_interval(mini_suite) -> None:
    """A model below its floor fails its test with all that is needed to judge it, and no traceback."""
    result = run(mini_suite, wrong)
    assert result.ret == 1
    message = "*GateFailed: A: accuracy 0.0000 (0 of 4, 95% interval 0.0000 to 0.4899) is below*0.5*"
    result.stdout.fnmatch_lines([message])
    result.stdout.fnmatch_lines(["A * REGRESSION"])
    assert "Traceback" not in result.stdout.str()
    assert "harness/pipeline.py" not in result.stdout.str()


OUTAGES: dict[str, tuple[Script, str]] = {
    "500 for one in four": (
        lambda body, n: Reply(status=500, body="boom") if n == 1 else right(body, n),
        "1 of 4 requests got no answer",
    ),
    "400 for all": (
        lambda body, n: Reply(status=400, body={"error": {"message": "seed is not supported"}}),
        "the first 4 of 4 requests were all rejected: HTTP 400: seed is not supported",
    ),
    "HTML for all": (lambda body, n: Reply(body="<html>login</html>"), "4 of 4 requests got no answer"),
}


@pytest.mark.parametrize(("script", "reason"), OUTAGES.values(), ids=OUTAGES)
def test_an_outage_exits_75(mini_suite, script: Script, reason: str) -> None:
    """Requests without an answer say nothing about the model: infrastructure, whatever the others answered."""
    result = run(mini_suite, script)
    assert result.ret == 75
    result.stdout.fnmatch_lines([f"*InfrastructureError: A: {reason}*"])
    assert mini_suite.result("A")["verdict"] == "infrastructure"


def test_all_rejected_stops_asking(mini_suite) -> None:
    """After eight rejections for one reason, from the first, the other twelve questions are not asked."""
    mini_suite.add("A", n=20, more="max_concurrency: 1\n")
    with loopback_server(lambda body, n: Reply(status=400, body="no")) as loopback:
        result = mini_suite.run(LIST, f"--base-url={loopback.base_url}")
    assert result.ret == 75
    assert len(loopback.requests) <= 9


def test_a_regression_outweighs_an_outage_in_the_exit_code(mini_suite) -> None:
    """One model that got worse and one that could not be asked: 1, so that nobody just retries."""
    mini_suite.add("B", more="server_args: --served-model-name other\n")
    mini_suite.list("A", "B")
    result = run(mini_suite, wrong)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["A * REGRESSION", "B * INFRA"])
    result.stdout.fnmatch_lines(["*B: http://127.0.0.1:* serves m, not other"])


def test_allowed_errors_leave_the_accuracy_over_those_answered(mini_suite) -> None:
    """Within max_error_rate the verdict is about the answers there are."""
    mini_suite.add("A", more="max_error_rate: 0.25\n")
    result = run(mini_suite, lambda body, n: Reply(status=500) if n == 0 else right(body, n))
    assert result.ret == 0
    stored = mini_suite.result("A")
    assert (stored["accuracy"], stored["counts"]["errors"], stored["counts"]["asked"]) == (1.0, 1, 4)


def spec_decode(drafts: int, accepted: int, finished: int) -> Reply:
    return Reply(
        body=f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
        f'vllm:request_success_total{{finished_reason="stop"}} {finished}\n'
    )


ACCEPTANCE: dict[str, tuple[Any, int, str]] = {
    "enough": (lambda asked: spec_decode(100 + 10 * asked, 30 + 5 * asked, asked), 0, "*A * 1.50 * pass"),
    "too little": (lambda asked: spec_decode(10 * asked, asked, asked), 1, "*acceptance length 1.100 is below*1.2*"),
    "no drafts": (lambda asked: spec_decode(7, 7, asked), 1, "*speculative decoding made no draft at all*"),
    "no series": (lambda asked: Reply(body="x 1\n"), 75, "*has no vllm:spec_decode_num_drafts_total*"),
    "empty": (lambda asked: Reply(body=""), 75, "*/metrics answered with nothing*"),
    "500": (lambda asked: Reply(status=500, body="boom"), 75, "*/metrics answered HTTP 500: boom*"),
    "restarted": (lambda asked: spec_decode(100 - asked, 50, asked), 75, "*went backwards*"),
}


@pytest.mark.parametrize(("metrics", "code", "line"), ACCEPTANCE.values(), ids=ACCEPTANCE)
def test_acceptance_length_is_judged_over_the_evaluation_alone(mini_suite, metrics: Any, code: int, line: str) -> None:
    """Counters are taken before and after; what cannot be read is an outage, dead speculation a regression."""
    mini_suite.add("A", more="min_acceptance_length: 1.2\n")
    result = run(mini_suite, right, metrics=metrics)
    assert result.ret == code
    result.stdout.fnmatch_lines([line])


def test_counters_nobody_gates_on_are_no_outage(mini_suite) -> None:
    """A server without /metrics passes where no acceptance length is asked for."""
    assert run(mini_suite, right).ret == 0
    assert mini_suite.result("A")["acceptance"] is None


def test_the_junit_file_holds_figures(mini_suite) -> None:
    """JUnit properties are flat scalars that CI systems show."""
    run(mini_suite, right, "--junitxml=junit.xml")
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("junit.xml").iter("property")}
    assert properties["accuracy"] == "1.0"
    assert properties["num_questions"] == "4"


@pytest.mark.parametrize("workers", ["-n2", "-n2 --dist=loadgroup"])
def test_under_xdist_there_is_one_record_and_one_table(mini_suite, workers: str) -> None:
    """Workers write into the controller's record; the exit code tells an outage as without xdist."""
    mini_suite.add("B", more="server_args: --served-model-name other\n")
    mini_suite.list("A", "B")
    result = run(mini_suite, right, *workers.split(), "-p", "xdist")
    assert result.ret == 75
    assert len(mini_suite.records()) == 1
    result.stdout.fnmatch_lines(["A * pass", "B * INFRA"])
    assert mini_suite.run_json()["exit_code"] == 75


@pytest.mark.parametrize("method", ["signal"])
def test_a_test_timeout_is_an_outage_with_its_record(mini_suite, method: str) -> None:
    """pytest-timeout's end of a hung config leaves what was answered, and exits 75."""
    script: Script = lambda body, n: right(body, n) if n < 2 else Reply(body="", delay=4.0)  # noqa: E731
    result = run(mini_suite, script, "--timeout=2", f"--timeout-method={method}")
    assert result.ret == 75
    stored = mini_suite.result("A")
    assert stored["verdict"] == "infrastructure"
    assert "Timeout" in stored["reason"]
    assert stored["counts"]["asked"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "xdist"])
def test_a_cancelled_job_leaves_its_records(mini_suite, number: signal.Signals, workers: list[str]) -> None:
    """SIGTERM and SIGINT end pytest within 8 s with result, run record and JUnit file written."""
    hang: Script = lambda body, n: right(body, n) if n < 2 else Reply(body="", delay=6.0)  # noqa: E731
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", LIST, "--junitxml=junit.xml", *workers]
    with loopback_server(hang) as loopback:
        process = subprocess.Popen([*command, f"--base-url={loopback.base_url}"], start_new_session=True)
        deadline = time.monotonic() + 30
        while answered(mini_suite) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=8) == 2
    assert mini_suite.run_json()["exit_code"] == 2
    assert (mini_suite.path / "junit.xml").is_file()
    stored = mini_suite.result("A")
    assert (stored["verdict"], stored["counts"]["asked"]) == ("infrastructure", 2)
    assert stored["reason"].startswith("interrupted")


def answered(mini_suite) -> int:
    """How many samples of A are on disk."""
    return sum(len(path.read_bytes().splitlines()) for path in mini_suite.path.glob("results/*/A/samples.jsonl"))
