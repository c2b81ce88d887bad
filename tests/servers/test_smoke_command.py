"""`accuracy-gate smoke`: both sets on one server, quality and throughput together, and outages named by set.

Run as a script, this file is a stand-in for `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loopback import LoopbackServer, Reply, completion, loopback_server
from suite_run import SuiteRun

DATA = Path(__file__).resolve().parents[2] / "harness/tasks/data"
WORD_PROBLEMS = {
    row["question"]: row["answer"] for row in map(json.loads, (DATA / "smoke.jsonl").read_text().splitlines())
}
INSTRUCTIONS = {
    row["prompt"]: row["check"] for row in map(json.loads, (DATA / "instructions.jsonl").read_text().splitlines())
}
PATTERNS = sum("regex" in check for check in INSTRUCTIONS.values())
"""Instructions that the stand-in fails: it makes its replies of the checks, and cannot of a pattern."""
TOKENS = 7
SERVE = f"{sys.executable} {Path(__file__).resolve()} {{model}} --port {{port}} {{args}}"


def reply_to(check: dict[str, Any]) -> str:
    ((kind, expected),) = check.items()
    match kind:
        case "one_of":
            return str(expected[0])
        case "contains":
            return " ".join(expected)
        case "json":
            return json.dumps(expected)
        case "regex":
            return "I cannot do that."
        case _:
            return str(expected)


def chat(text: str, finish_reason: str = "stop") -> Reply:
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]
    return Reply(body={"choices": choices, "usage": {"prompt_tokens": 11, "completion_tokens": TOKENS}})


def answer(body: dict[str, Any], n: int) -> Reply:
    if "prompt" in body:
        question = body["prompt"].rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
        return completion(" " + WORD_PROBLEMS[question], tokens=TOKENS)
    return chat(reply_to(INSTRUCTIONS[body["messages"][-1]["content"]]))


def smoke(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "smoke", *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def table_row(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(name))
    return re.split(r" {2,}", line)


def test_forty_questions_are_asked_of_a_running_server(tmp_path: Path) -> None:
    """Word problems as completions with five examples, instructions as chat, of the only model there is."""
    with loopback_server(answer) as server:
        done = smoke(tmp_path, "--base-url", server.base_url + "/v1", "--save-results", "out.json")
    assert done.returncode == 0, done.stderr
    prompts = [body["prompt"] for body in server.requests if "prompt" in body]
    chats = [body["messages"] for body in server.requests if "messages" in body]
    assert (len(prompts), len(chats)) == (20, 20)
    assert {prompt.count("Question: ") for prompt in prompts} == {6}
    assert {tuple(message["role"] for message in messages) for messages in chats} == {("user",)}
    assert {body["max_tokens"] for body in server.requests} == {256}
    passed = 20 - PATTERNS
    assert table_row(done.stdout, "word problems")[1:6] == ["20 of 20", "0.839-1.000", "0", "0", "0"]
    assert table_row(done.stdout, "instructions")[1] == f"{passed} of 20"
    assert re.search(
        rf"^quality {(20 + passed) / 40:.4f} \({20 + passed} of 40 checks passed, "
        rf"95% interval 0\.\d{{4}} to 0\.\d{{4}}\), "
        rf"throughput \d+\.\d output tokens/s \({40 * TOKENS} tokens in \d+\.\d s\)$",
        done.stdout,
        re.MULTILINE,
    )
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["quality"]["passed"], saved["quality"]["asked"]) == (20 + passed, 40)
    assert saved["throughput"]["output_tokens"] == 40 * TOKENS
    seconds = saved["throughput"]["seconds"]
    assert saved["throughput"]["output_tokens_per_second"] == pytest.approx(40 * TOKENS / seconds)
    assert saved["sets"]["instructions"]["quality"]["passed"] == passed
    assert [failure["set"] for failure in saved["failures"]] == ["instructions"] * PATTERNS
    assert saved["model"] == "m"


def test_a_failure_is_named_with_prompt_reply_and_check(tmp_path: Path) -> None:
    """What failed can be judged without opening a file; --verbose shows the rest, too, and nothing cut."""
    with loopback_server(answer) as server:
        short = smoke(tmp_path, "--base-url", server.base_url, "--model", "m").stdout
        whole = smoke(tmp_path, "--base-url", server.base_url, "--verbose").stdout
    failed = re.findall(
        r"^failed: instructions (\d+), expected (.*)\n  prompt: (.*)\n  reply:  (.*)$", short, re.MULTILINE
    )
    assert len(failed) == PATTERNS
    for number, expected, prompt, reply in failed:
        shown, check = list(INSTRUCTIONS.items())[int(number) - 1]
        assert (prompt, json.loads(expected), reply) == (shown, check, "I cannot do that.")
    assert "passed: " not in short
    assert (
        len(re.findall(r"^passed: (?:word-problems|instructions) \d+, expected ", whole, re.MULTILINE)) == 40 - PATTERNS
    )
    assert "passed: word-problems 1, expected 60\n" in whole


def test_the_run_leaves_a_record(tmp_path: Path) -> None:
    """Config, samples and results of both sets lie in one run folder."""
    with loopback_server(answer) as server:
        done = smoke(tmp_path, "--base-url", server.base_url, "--results-dir", "kept", "--max-tokens", "99")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "kept").iterdir()
    assert f"record: kept/{folder.name}" in done.stdout
    run = json.loads((folder / "run.json").read_text())
    assert [row["config_id"] for row in run["configs"]] == ["smoke:instructions", "smoke:word-problems"]
    for name in ("word-problems", "instructions"):
        assert len((folder / "smoke" / name / "samples.jsonl").read_text().splitlines()) == 20
    assert {body["max_tokens"] for body in server.requests} == {99}


def test_one_server_is_started_for_both_sets_and_stopped(tmp_path: Path) -> None:
    """--model serves: with its arguments, once, and nothing is left."""
    arguments = ["--model", "stand-in", "--serve-command", SERVE, "--server-args", "--max-model-len 4096"]
    done = smoke(tmp_path, *arguments, "--min-quality", "0.5")
    assert done.returncode == 0, done.stderr
    assert f"({40 - PATTERNS} of 40 checks passed" in done.stdout
    (stored,) = (tmp_path / "results").rglob("server.json")
    facts = json.loads(stored.read_text())
    assert "--max-model-len" in facts["command"]
    assert facts["stopping_seconds"] is not None
    (log,) = (tmp_path / "results").rglob("server.log")
    assert log.read_text().count("stand-in started") == 1


SHARES = {"met exactly": (40 - PATTERNS, 0), "one more": (41 - PATTERNS, 1)}


@pytest.mark.parametrize(("wanted", "code"), SHARES.values(), ids=SHARES)
def test_min_quality_decides_the_exit_code(tmp_path: Path, wanted: int, code: int) -> None:
    """Exit 1 below it and 0 at it, compared in counts; the figures are shown either way."""
    with loopback_server(answer) as server:
        done = smoke(tmp_path, "--base-url", server.base_url, "--min-quality", str(wanted / 40))
    assert done.returncode == code, done.stderr
    assert "quality" in done.stdout
    assert ("is below --min-quality" in done.stderr) is bool(code)


def refusing(endpoint: str, message: str) -> Callable[[dict[str, Any], int], Reply]:
    refused = Reply(status=400, body={"error": {"message": message}})
    return lambda body, n: refused if endpoint in body else answer(body, n)


REFUSALS = {
    "no chat template": ("messages", "instructions (chat)", "word problems"),
    "no completions": ("prompt", "word problems (completions)", "instructions"),
}


@pytest.mark.parametrize(("endpoint", "title", "other"), REFUSALS.values(), ids=REFUSALS)
def test_a_set_that_could_not_be_asked_is_named(tmp_path: Path, endpoint: str, title: str, other: str) -> None:
    """It is an outage that says which set and why; the other set is shown, and no quality of half a run."""
    with loopback_server(refusing(endpoint, "no chat template is defined")) as server:
        done = smoke(tmp_path, "--base-url", server.base_url, "--min-quality", "1", "--save-results", "out.json")
    assert done.returncode == 75
    assert (
        f"ERROR: {title} could not be asked: the first 8 of 20 requests were all rejected: HTTP 400: no" in done.stderr
    )
    assert f"{other} (" not in done.stderr
    assert table_row(done.stdout, title)[1] == "-"
    assert table_row(done.stdout, other)[1].endswith(" of 20")
    assert "quality" not in done.stdout
    assert not (tmp_path / "out.json").exists()


def test_a_server_that_does_not_start_is_reported_once(tmp_path: Path) -> None:
    """One reason for both sets is one line."""
    serve = f"{sys.executable} -c 'import sys; sys.exit(3)' {{model}} {{port}} {{args}}"
    done = smoke(tmp_path, "--model", "stand-in", "--serve-command", serve)
    assert done.returncode == 75
    assert "word problems (completions) and instructions (chat) could not be asked: " in done.stderr
    assert done.stderr.count("exited with code 3") == 1


def test_without_token_counts_the_throughput_is_unknown(tmp_path: Path) -> None:
    """It is said, not guessed, and quality is still shown beside it."""

    def mute(body: dict[str, Any], n: int) -> Reply:
        whole = answer(body, n).body
        assert isinstance(whole, dict)
        return Reply(body={"choices": whole["choices"]})

    with loopback_server(mute) as server:
        done = smoke(tmp_path, "--base-url", server.base_url)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^quality 0\.\d+ .* throughput unknown: the server reports no token counts$", done.stdout, re.MULTILINE
    )


def test_a_reply_that_was_cut_off_is_told_apart(tmp_path: Path) -> None:
    """A reasoning model with too few tokens shows as truncated, not as wrong."""
    with loopback_server(
        lambda body, n: answer(body, n) if "prompt" in body else chat("<think>So", "length")
    ) as server:
        done = smoke(tmp_path, "--base-url", server.base_url)
    assert table_row(done.stdout, "instructions")[1:6] == ["0 of 20", "0.000-0.161", "0", "20", "0"]
    assert done.stdout.count("\ntruncated: instructions ") == 20


OFFLINE = ("--model", "m", "--backend", "vllm-offline")
MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "nothing to ask": ([], 4, "--model MODEL to serve one, or --base-url URL"),
    "no address": (["--base-url", "ftp://x"], 4, "--base-url: 'ftp://x' is no http:// address"),
    "arguments for a server that runs": (
        ["--base-url", "x:1", "--server-args=-q"],
        4,
        "--server-args is for a server",
    ),
    "GPUs of a server that runs": (["--base-url", "x:1", "--gpus", "0"], 4, "--gpus is for a server started here"),
    "a backend for a server that runs": (["--base-url", "x:1", "--backend", "vllm"], 4, "--backend is for a server"),
    "a command of no server": ([*OFFLINE, "--serve-command", "sh {model} {port} {args}"], 4, "remove serve_command"),
    "a content format of no server": (
        [*OFFLINE, "--server-args", "--chat-template-content-format string"],
        4,
        "--chat-template-content-format needs a server: leave out --backend vllm-offline",
    ),
    "a key for a server of our own": (["--model", "m", "--api-key", "k"], 4, "--api-key is for --base-url"),
    "a share that is a percentage": (["--model", "m", "--min-quality", "80"], 2, "80 must lie between 0 and 1"),
    "a share that is none": (["--model", "m", "--min-quality", "nan"], 2, "nan must lie between 0 and 1"),
    "no tokens": (["--base-url", "x:1", "--model", "m", "--max-tokens", "0"], 4, "max_tokens"),
}


@pytest.mark.parametrize(("more", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found_before_anything_is_asked(tmp_path: Path, more: list[str], code: int, expected: str) -> None:
    """One line that names the option."""
    done = smoke(tmp_path, *more)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr


def test_two_models_must_be_told_apart(tmp_path: Path) -> None:
    """A server of several models is not asked at random."""
    two = Reply(body={"data": [{"id": "a"}, {"id": "b"}]})
    with loopback_server(answer, models=two) as server:
        done = smoke(tmp_path, "--base-url", server.base_url)
    assert done.returncode == 75
    assert "serves a, b: name one with --model" in done.stderr
    assert isinstance(server, LoopbackServer)
    assert not server.requests


def test_a_users_own_checks_gate_a_config(tmp_path: Path, run_suite: Callable[..., SuiteRun]) -> None:
    """`task: checks` with `dataset` is a config as any other: accuracy is the share of checks passed."""
    capital, code = "What is the capital of France?", "Copy this code exactly and write nothing else: K7-942-QX"
    rows = [
        {"prompt": capital, "check": {"one_of": ["Paris"]}},
        {"prompt": code, "check": {"exact": "another"}, "system": "Be brief.", "max_tokens": 9},
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = f"model_name: stand-in\ntask: checks\ndataset: own.jsonl\ntolerance: 0.0\nserve_command: {SERVE}\n"
    run = run_suite(config + "accuracy_threshold: 0.6\n")
    output = run.output()
    assert run.process.returncode == 1, output
    assert "accuracy 0.5000 (1 of 2, 95% interval 0.0945 to 0.9055) is below the floor 0.6" in output
    assert [(sample["correct"], sample["gold"]) for sample in sorted(run.samples(), key=lambda s: s["index"])] == [
        (True, '{"one_of": ["Paris"]}'),
        (False, '{"exact": "another"}'),
    ]
    assert run.result()["task"]["name"] == "own"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    asked, _ = parser.parse_known_args()
    with loopback_server(answer, model=asked.model, port=asked.port):
        sys.stdout.write("stand-in started\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
