"""Small damage to a real model: seen by likelihoods, long before answers change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.servers.embedded_model import model_folder

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]

ROOT = Path(__file__).resolve().parents[2]
DAMAGED = "model.layers.2.self_attn.o_proj.weight"
CONFIG = """
model_name: {model}
engine: {{dtype: {dtype}, max_model_len: 2048}}
server_args: "--enforce-eager"
accuracy_threshold: 0.0
num_fewshot: 5
max_tokens: 128
tasks:
"""
ROWS = {
    "smoke": "  - {task: smoke}\n",
    "choice": "  - {task: choice}\n",
    "perplexity": "  - {task: perplexity, max_bits_per_byte: 8.0}\n",
}
BESIDE = {
    "smoke": "baseline: baselines/whole/smoke.json",
    "choice": "baseline: baselines/whole/choice.json",
    "perplexity": "baseline: baselines/whole/perplexity.json, max_bits_per_byte_increase: 0.01",
}
"""What a config says more once there are baselines."""


class Lab:
    """One model that is damaged in place, so that a baseline of it stays its baseline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.whole = model_folder("embedded:smollm2-135m-instruct")
        shutil.copytree(self.whole, self.model)

    def scale(self, factor: float) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(self.whole / "model.safetensors")
        tensors[DAMAGED] = tensors[DAMAGED] * factor
        save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})

    def run(self, name: str, *more: str, tasks: Sequence[str], dtype: str = "float32") -> dict[str, dict[str, Any]]:
        """Run tasks and return their results by task; all but the first run are held against its baselines."""
        rows = [ROWS[task] if name == "whole" else ROWS[task].replace("}", f", {BESIDE[task]}}}") for task in tasks]
        (self.folder / f"{name}.yaml").write_text(CONFIG.format(model=self.model, dtype=dtype) + "".join(rows))
        (self.folder / f"{name}.txt").write_text(f"{name}.yaml\n")
        results = self.folder / f"results-{name}"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--results-dir={results}", *more]
        done = subprocess.run(
            [*command, f"--config-list-file={self.folder / f'{name}.txt'}"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode in {0, 1}, done.stdout + done.stderr
        record = next(results.glob("*/run.json")).parent / name
        return {task: json.loads((record / task / "result.json").read_text()) for task in tasks}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A whole model with its baselines."""
    made = Lab(tmp_path_factory.mktemp("damage"))
    made.run("whole", f"--save-baseline={made.folder / 'baselines'}", tasks=tuple(ROWS))
    return made


def damage(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = results["perplexity"]["against_baseline"]
    return told


def test_half_an_output_projection_is_red_by_perplexity(lab: Lab) -> None:
    """Layer 2's attention output scaled by 0.5 fails over 30 documents, p < 0.001, while 20 answers say nothing."""
    lab.scale(0.5)
    results = lab.run("half", tasks=("smoke", "perplexity"))
    assert results["perplexity"]["verdict"] == "regression"
    assert damage(results)["values"]["p_increase"] < 0.001
    assert results["smoke"]["verdict"] == "pass"
    assert results["smoke"]["against_baseline"]["paired"]["p_value"] > 0.001


def test_a_tenth_off_is_drift_beyond_numeric_noise(lab: Lab) -> None:
    """Scaled by 0.9 it is reported as drift, though no gate fails."""
    lab.scale(0.9)
    results = lab.run("tenth", tasks=("smoke", "perplexity"))
    assert damage(results)["drift"]["beyond_noise"]
    assert results["smoke"]["verdict"] == "pass"
    assert results["smoke"]["against_baseline"]["paired"]["p_value"] > 0.001


def test_bfloat16_is_neither(lab: Lab) -> None:
    """Another precision of the same weights is neither red nor drift, for documents and for choices."""
    lab.scale(1.0)
    results = lab.run("bfloat16", tasks=("choice", "perplexity"), dtype="bfloat16")
    assert results["perplexity"]["verdict"] == "pass"
    assert not damage(results)["drift"]["beyond_noise"]
    assert not results["choice"]["against_baseline"]["drift"]["beyond_noise"]
