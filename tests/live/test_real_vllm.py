"""Real vLLM, a real model, real questions: verdicts, counters and outages as a user meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from harness.config import load_config_file
from harness.config_lists import listed
from harness.errors import Position
from harness.pipeline import evaluate
from harness.records import RunRecord
from harness.reports.terminal import LiveLine
from harness.servers.endpoint import Endpoint
from harness.serving import RunOptions

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]

ROOT = Path(__file__).resolve().parents[2]
NGRAM = ROOT / "configs/cpu/smollm2-135m-smoke-ngram.yaml"
GSM8K = (ROOT / "configs/cpu/smollm2-135m-gsm8k.yaml").read_text()


def test_gsm8k_on_real_vllm_and_an_impossible_threshold(run_suite, gsm8k_dir: Path) -> None:
    """32 real questions are asked and recorded, and a threshold nobody meets exits 1 with measured, floor, interval."""
    run = run_suite(GSM8K.replace("accuracy_threshold: 0.0", "accuracy_threshold: 0.99"), f"--data-dir={gsm8k_dir}")
    output = run.output()
    assert run.process.returncode == 1, output
    assert re.search(
        r"GateFailed: config: accuracy 0\.\d+ \(\d+ of 32, 95% interval 0\.\d+ to 0\.\d+\) is below the floor 0\.99",
        output,
    )
    samples = run.samples()
    assert sorted(sample["index"] for sample in samples) == list(range(32))
    assert all(sample["status"] != "error" and sample["generated_tokens"] > 0 for sample in samples)
    stored = run.result()
    assert stored["counts"]["asked"] == 32
    assert stored["output_tokens"] == sum(sample["generated_tokens"] for sample in samples)
    assert stored["timings"]["startup"] > 1
    assert not run.servers()


def counter(text: str, name: str) -> float:
    """Read one counter by hand, without the code under test."""
    values = re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


def metrics(server: Endpoint) -> str:
    with urllib.request.urlopen(server.base_url + "/metrics", timeout=30) as reply:
        text: str = reply.read().decode()
    return text


def test_acceptance_length_equals_the_counters_by_hand(ngram_server: Endpoint, tmp_path: Path) -> None:
    """What result.json says is what /metrics counted over the evaluation alone, read by hand before and after."""
    (entry,) = listed("ngram", load_config_file(NGRAM), Position(path=NGRAM))
    options = RunOptions(base_url=ngram_server.base_url, api_key=ngram_server.api_key)
    for _ in range(2):
        before = metrics(ngram_server)
        result = evaluate(entry, RunRecord(tmp_path).config("ngram"), options, LiveLine("ngram"))
        after = metrics(ngram_server)
        counted = {
            name: counter(after, f"spec_decode_num_{name}_total") - counter(before, f"spec_decode_num_{name}_total")
            for name in ("drafts", "accepted_tokens")
        }
        stored = json.loads((tmp_path / "ngram/result.json").read_text())["acceptance"]
        assert counted["drafts"] > 20
        assert (stored["drafts"], stored["accepted_tokens"]) == (counted["drafts"], counted["accepted_tokens"])
        assert stored["length"] == pytest.approx(1 + counted["accepted_tokens"] / counted["drafts"], abs=1e-12)
        assert stored["length"] == pytest.approx(1 + sum(stored["rate_by_position"]), abs=1e-9)
        assert result.verdict == "pass", result.reason


def test_eval_asks_a_running_server(ngram_server: Endpoint, tmp_path: Path) -> None:
    """`accuracy-gate eval` finds the model, prints the figures and saves them under vLLM's names."""
    saved = tmp_path / "out.json"
    command = [str(Path(sys.executable).with_name("accuracy-gate")), "eval", "--base-url", ngram_server.base_url]
    done = subprocess.run(
        [*command, "--task", "smoke", "--num-questions", "8", "--max-tokens", "128", "--save-results", str(saved)],
        env={**os.environ, "VLLM_API_KEY": str(ngram_server.api_key)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Accuracy: \d\.\d{4} \(95% interval", done.stdout, re.MULTILINE)
    figures = json.loads(saved.read_text())
    assert (figures["num_questions"], figures["num_shots"], figures["errors"]) == (8, 5, 0)
    assert figures["accuracy"] >= 0.25
    assert figures["model"] == "embedded:smollm2-135m-instruct"
    assert figures["total_output_tokens"] > 8


def test_eval_over_chat(ngram_server: Endpoint) -> None:
    """The chat endpoint answers the same questions; exemplars may be turns or one message."""
    command = [
        sys.executable,
        "-m",
        "harness.cli",
        "eval",
        "--base-url",
        ngram_server.base_url + "/v1",
        "--task",
        "smoke",
    ]
    done = subprocess.run(
        [*command, "--num-questions", "4", "--use-chat-completions", "--temperature", "0"],
        env={**os.environ, "VLLM_API_KEY": str(ngram_server.api_key)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Errors: 0" in done.stdout


def test_a_wrong_key_is_an_outage_that_says_401(ngram_server: Endpoint) -> None:
    """A server that does not take our key says nothing about its model."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "eval", "--base-url", ngram_server.base_url, "--api-key", "wrong"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75
    assert "HTTP 401" in done.stderr
    assert "wrong" not in done.stderr
