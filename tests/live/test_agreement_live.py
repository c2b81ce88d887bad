"""The same questions asked of three engines: a vLLM server, vLLM in process and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.records import read_samples

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("vllm", "vllm-offline", "transformers")
CLOSE = 1e-3
"""Nats per token."""
SCORES = """
model_name: embedded:smollm2-135m-instruct
engine: {dtype: float32, max_model_len: 4096}
accuracy_threshold: 0.0
num_fewshot: 5
max_tokens: 128
max_concurrency: 16
tasks:
  - {task: smoke}
  - {task: choice}
  - {task: perplexity, max_bits_per_byte: 8.0}
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run in which every engine answers the three tasks."""
    folder = tmp_path_factory.mktemp("agreement")
    for backend in BACKENDS:
        flags = 'server_args: "--enforce-eager"\n' if backend != "transformers" else ""
        (folder / f"{backend}.yaml").write_text(f"{SCORES}backend: {backend}\n{flags}")
    (folder / "list.txt").write_text("".join(f"{backend}.yaml\n" for backend in BACKENDS))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--config-list-file={folder / 'list.txt'}"]
    done = subprocess.run(
        [*command, f"--results-dir={folder / 'results'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = next((folder / "results").glob("*/run.json")).parent
    return {backend: record / backend for backend in BACKENDS}


def rows(folder: Path, task: str) -> list[dict[str, Any]]:
    return sorted(read_samples(folder / task / "samples.jsonl"), key=lambda row: row["index"])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_every_choice_is_as_likely_to_each_engine(records: dict[str, Path], backend: str) -> None:
    """Each choice's log-likelihood agrees with the server's to a thousandth of a nat per token."""
    for served, other in zip(rows(records["vllm"], "choice"), rows(records[backend], "choice"), strict=True):
        assert served["measures"]["tokens"] == other["measures"]["tokens"]
        pairs = zip(served["measures"]["per_token"], other["measures"]["per_token"], strict=True)
        assert all(abs(a - b) < CLOSE for a, b in pairs), served["question"]


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_every_document_is_as_likely_to_each_engine(records: dict[str, Path], backend: str) -> None:
    """Each document's log-likelihood agrees with the server's to a thousandth of a nat per token."""
    for served, other in zip(rows(records["vllm"], "perplexity"), rows(records[backend], "perplexity"), strict=True):
        a, b = served["measures"], other["measures"]
        assert (a["tokens"], a["bytes"], a["words"]) == (b["tokens"], b["bytes"], b["words"])
        assert abs(a["nll"] - b["nll"]) / a["tokens"] < CLOSE, served["question"][:80]


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_engines_write_the_same_answers(records: dict[str, Path], backend: str) -> None:
    """At least 19 of the 20 smoke answers are the same text."""
    both = zip(rows(records["vllm"], "smoke"), rows(records[backend], "smoke"), strict=True)
    assert sum(served["text"] == other["text"] for served, other in both) >= 19


def test_each_engine_says_what_it_is(records: dict[str, Path]) -> None:
    """Engine, version and dtype are in every record."""
    for backend, folder in records.items():
        server = json.loads((folder / "choice" / "result.json").read_text())["server"]
        assert server["backend"] == backend
        assert server["version"] != "unknown", backend
