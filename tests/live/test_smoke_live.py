"""`accuracy-gate smoke` on real vLLM: all 40 are asked, and quality and throughput are shown together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.servers.endpoint import Endpoint

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]


def smoke(folder: Path, *more: str, key: str = "") -> dict[str, Any]:
    """Run the command; check that the two figures stand together and come from all 40 samples."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "smoke", "--max-tokens", "128", "--save-results", "out.json", *more],
        cwd=folder,
        env={**os.environ, "VLLM_API_KEY": key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^quality 0\.\d{4} \(\d+ of 40 checks passed, .*\), throughput \d+\.\d output tokens/s \(\d+ tokens in",
        done.stdout,
        re.MULTILINE,
    )
    assert not key or key not in done.stdout + done.stderr
    saved: dict[str, Any] = json.loads((folder / "out.json").read_text())
    lines = [line for path in folder.rglob("samples.jsonl") for line in path.read_text().splitlines()]
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 40
    assert {sample["error"] for sample in samples} == {None}
    assert saved["throughput"]["output_tokens"] == sum(sample["generated_tokens"] for sample in samples)
    assert saved["quality"]["passed"] == sum(sample["correct"] for sample in samples)
    return saved


def passed(saved: dict[str, Any]) -> dict[str, int]:
    return {name: figures["quality"]["passed"] for name, figures in saved["sets"].items()}


def test_smoke_asks_forty_of_a_running_server(ngram_server: Endpoint, tmp_path: Path) -> None:
    """A model of 135M parameters passes some of each set."""
    found = passed(smoke(tmp_path, "--base-url", ngram_server.base_url, key=str(ngram_server.api_key)))
    assert found["word-problems"] >= 8
    assert found["instructions"] >= 4


def test_smoke_asks_forty_without_a_server(tmp_path: Path) -> None:
    """`--backend vllm-offline` asks the same of a vllm.LLM in its own process."""
    arguments = "--dtype float32 --enforce-eager --max-model-len 4096"
    offline = ("--model", "embedded:smollm2-135m-instruct", "--backend", "vllm-offline", "--server-args", arguments)
    found = passed(smoke(tmp_path, *offline))
    assert found["word-problems"] >= 8
    assert found["instructions"] >= 4
