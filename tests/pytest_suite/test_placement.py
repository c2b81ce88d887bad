"""Where configs run: enough GPUs or a skip with both numbers, the platform's overrides, and the GPUs a server sees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "faults/faulty_vllm.py"
LIST = "--config-list-file=models-small.txt"
CONFIG = f"""\
model_name: stand-in
task: smoke
accuracy_threshold: 0.9
tolerance: 0.0
serve_command: {sys.executable} {STAND_IN} none {{model}} --port {{port}} {{args}}
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi names two H100s; its driver library is not installed."""
    rows = "".join(f"{n}, GPU-{n}aaa, 81559, 9.0, Disabled, NVIDIA H100\n" for n in range(2))
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def write(mini_suite, more: str) -> None:
    (mini_suite.path / "configs/A.yaml").write_text(CONFIG + more)


@pytest.mark.usefixtures("two_gpus")
def test_too_few_gpus_are_a_skip_with_both_numbers(mini_suite) -> None:
    """A config that needs four of two GPUs is skipped, and the reason says so; --require-gpus makes it an outage."""
    write(mini_suite, "server_args: --tensor-parallel-size 2 -pp 2\n")
    result = mini_suite.run(LIST, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*needs 4 GPUs, 2 here*"])
    required = mini_suite.run(LIST, "--require-gpus")
    assert required.ret == 75
    required.stdout.fnmatch_lines(["*A: needs 4 GPUs, 2 here*"])


@pytest.mark.usefixtures("two_gpus")
def test_chosen_gpus_are_what_the_server_sees(mini_suite) -> None:
    """--gpus picks among the visible ones, and run.json names them."""
    write(mini_suite, "")
    assert mini_suite.run(LIST, "--gpus=1").ret == 0
    assert [gpu["uuid"] for gpu in mini_suite.run_json()["gpus"]] == ["GPU-1aaa"]
    assert mini_suite.result("A")["server"]["gpus"] == ["NVIDIA H100"]
    assert mini_suite.run_json()["platform"] == "cuda 9.0"


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_a_mistake(mini_suite) -> None:
    """An option or a variable that names no GPU exits 4 instead of running on fewer."""
    write(mini_suite, "")
    result = mini_suite.run(LIST, "--gpus=5")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--gpus*5*"])


PLATFORMS = {
    "runs here": ("platforms: [rocm, cuda>=8.0]\n", "passed", ""),
    "another platform": ("platforms: rocm\n", "skipped", "*runs on rocm only; this is cuda 9.0*"),
    "too old": ("platforms: cuda>=10.0\n", "skipped", "*runs on cuda>=10.0 only*"),
    "a row": ("skip:\n  - when: cuda:9.0\n    reason: kernel missing\n", "skipped", "*kernel missing*"),
    "an override": ("overrides: {cuda: {accuracy_threshold: 1.0}, rocm: {max_tokens: 1}}\n", "passed", ""),
}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("more", "outcome", "line"), PLATFORMS.values(), ids=PLATFORMS)
def test_platforms_are_data(mini_suite, more: str, outcome: str, line: str) -> None:
    """Where a config runs, where not and why, and what differs there, stands in its YAML."""
    write(mini_suite, more)
    result = mini_suite.run(LIST, "-rs")
    result.assert_outcomes(**{outcome: 1})
    if line:
        result.stdout.fnmatch_lines([line])
    else:
        assert mini_suite.result("A")["threshold"] == (1.0 if "overrides" in more else 0.9)
