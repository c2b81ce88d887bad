"""What earlier runs measured, and the guess where there is nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from harness.config import ModelConfig
from harness.durations import KEPT_RUNS, Duration, DurationKey, Durations, MeasuredRun, guessed
from harness.model_size import Size, model_size

KEY = DurationKey(config_id="a/config", task="gsm8k", backend="vllm", gpu="NVIDIA H200")
WRITER = """
import sys
from pathlib import Path
from harness.durations import DurationKey, Durations, MeasuredRun

for n in range(10):
    key = DurationKey(config_id=f"{sys.argv[2]}-{n}", task="gsm8k", backend="vllm", gpu="cpu")
    Durations(Path(sys.argv[1])).record(key, MeasuredRun(startup=1.0, asking=2.0, questions=3))
"""


def config(model_name: str = "Qwen/Qwen3-8B", **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model_name": model_name, "accuracy_threshold": 0.5, **keys})


def run(startup: float | None, asking: float, questions: int = 1319) -> MeasuredRun:
    return MeasuredRun(startup=startup, asking=asking, questions=questions)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".accuracy-gate" / "durations.json"


SIZES: dict[str, Size | None] = {
    "Qwen/Qwen3-0.6B-FP8": Size(total=0.6),
    "embedded:smollm2-135m": Size(total=0.135),
    "RedHatAI/Llama-3.2-1B-Instruct-quantized.w8a8": Size(total=1),
    "nm-testing/Meta-Llama-3-8B-Instruct-nonuniform-test": Size(total=8),
    "RedHatAI/Qwen2.5-VL-3B-Instruct-FP8-Dynamic": Size(total=3),
    "Qwen/Qwen3-4B": Size(total=4),
    "nm-testing/Qwen1.5-MoE-A2.7B-Chat-quantized.w4a16": Size(total=13.5, active=2.7),
    "nm-testing/Qwen3-30B-A3B-MXFP4A16": Size(total=30, active=3),
    "nvidia/Qwen3-30B-A3B-FP4": Size(total=30, active=3),
    "RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic": Size(total=26, active=4),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": Size(total=30, active=3),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": Size(total=120, active=12),
    "nvidia/Qwen3.5-397B-A17B-NVFP4": Size(total=397, active=17),
    "nvidia/Llama-4-Scout-17B-16E-Instruct-FP8": Size(total=17 * (1 + 16 / 3), active=17),
    "mistralai/Mixtral-8x7B-v0.1": Size(total=56, active=14),
    "amd/Mixtral-8x7B-Instruct-v0.1-FP8-KV": Size(total=56, active=14),
    "deepseek-ai/DeepSeek-R1": Size(total=671, active=37),
    "deepseek-ai/DeepSeek-V3.2": Size(total=671, active=37),
    "RedHatAI/DeepSeek-Coder-V2-Lite-Instruct-FP8": Size(total=15.7, active=2.4),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Size(total=7),
    "/models/llama_70b/checkpoint": Size(total=70),
    "/models-8b-old/Qwen3-1.7B": Size(total=1.7),
    "moonshotai/Kimi-1T-A32B": Size(total=1000, active=32),
    "Qwen/Qwen2.5-7B-Instruct-1M": Size(total=7),
    "deepseek-ai/DeepSeek-V4-Flash": None,
    "some/model-4bit-8k-v0.1": None,
    "mine": None,
}


@pytest.mark.parametrize(("name", "size"), SIZES.items(), ids=SIZES)
def test_size_in_a_models_name(name: str, size: Size | None) -> None:
    """Parameters and active ones are read off; precisions, versions and context lengths are no sizes."""
    found = model_size(name)
    assert (found and (found.total, found.active)) == (size and (pytest.approx(size.total), size.active))


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (config("Qwen/Qwen3-0.6B"), config("Qwen/Qwen3-8B")),
        (config("Qwen/Qwen3-30B-A3B"), config("meta/Llama-3-70B")),
        (config(num_questions=100), config(num_questions=1319)),
        (config(max_tokens=256), config(max_tokens=4096)),
        (config(max_tokens=4096), config("Qwen/QwQ-8B", max_tokens=4096, use_chat_completions=True)),
        (
            config(use_chat_completions=True, chat_template_kwargs={"enable_thinking": False}),
            config(use_chat_completions=True, chat_template_kwargs={"enable_thinking": True}),
        ),
        (config(use_chat_completions=True), config(use_chat_completions=True, reasoning_effort="high")),
        (config("mine"), config("mine", num_gpus=8)),
        (config(task="choice", num_questions=20), config(num_questions=20)),
    ],
    ids=["model", "active", "questions", "tokens", "named", "thinking", "effort", "unknown by its GPUs", "scored"],
)
def test_more_work_is_guessed_longer(less: ModelConfig, more: ModelConfig) -> None:
    """The guess grows with the model, the questions, the tokens, and with thinking."""
    assert 0 < guessed(less).seconds < guessed(more).seconds
    assert not guessed(less).measured


def test_the_guess_is_the_documented_formula() -> None:
    """45 s and 1 s a billion to start; 0.1 s and 0.01 s an active billion for 1,000 tokens, half of them used."""
    guess = guessed(config("Qwen/Qwen3-30B-A3B", num_questions=1000, max_tokens=200))
    assert (guess.startup, guess.asking) == pytest.approx((75, 100 * 0.13))


def test_what_was_measured_is_told(path: Path) -> None:
    """A measured config is told with start and asking apart, by whoever reads the file."""
    Durations(path).record(KEY, run(50.0, 20.0))
    found = Durations(path).estimate(KEY, config())
    assert found == Duration(startup=50.0, asking=20.0, measured=True)
    assert found.seconds == 70.0


def test_one_outlier_does_not_count(path: Path) -> None:
    """The median of the last runs is told, so that one cold download moves nothing and a lasting change does."""
    durations = Durations(path)
    for seconds in (50.0, 900.0, 52.0):
        durations.record(KEY, run(seconds, 20.0))
    assert durations.estimate(KEY, config()).startup == 52.0
    for _ in range(KEPT_RUNS):
        durations.record(KEY, run(30.0, 10.0))
    assert durations.estimate(KEY, config()) == Duration(startup=30.0, asking=10.0, measured=True)
    assert len(json.loads(path.read_text())["durations"][0]["runs"]) == KEPT_RUNS


def test_each_key_stands_for_itself(path: Path) -> None:
    """Another task, backend or config says nothing; another GPU does where this one has no measurement."""
    durations = Durations(path)
    durations.record(KEY, run(50.0, 20.0))
    durations.record(
        DurationKey(config_id="a/config", task="gsm8k", backend="vllm", gpu="NVIDIA B200"), run(40.0, 10.0)
    )
    for other in (
        DurationKey(config_id="another", task="gsm8k", backend="vllm", gpu="NVIDIA H200"),
        DurationKey(config_id="a/config", task="smoke", backend="vllm", gpu="NVIDIA H200"),
        DurationKey(config_id="a/config", task="gsm8k", backend="sglang", gpu="NVIDIA H200"),
    ):
        assert not durations.estimate(other, config()).measured
    assert durations.estimate(KEY, config()).seconds == 70.0
    for gpu in ("AMD Instinct MI300X", None):
        key = DurationKey(config_id="a/config", task="gsm8k", backend="vllm", gpu=gpu)
        assert durations.estimate(key, config()) == Duration(startup=45.0, asking=15.0, measured=True)


def test_a_shorter_run_is_stretched(path: Path) -> None:
    """A run with fewer questions counts in proportion, and not at all beside one with as many."""
    durations = Durations(path)
    durations.record(KEY, run(50.0, 2.0, questions=100))
    assert durations.estimate(KEY, config(num_questions=200)).asking == pytest.approx(4.0)
    durations.record(KEY, run(50.0, 3.0, questions=200))
    assert durations.estimate(KEY, config(num_questions=200)).asking == 3.0


def test_a_server_that_already_ran_tells_no_start(path: Path) -> None:
    """The start of a second task's server is not 0 s: it was not measured."""
    durations = Durations(path)
    durations.record(KEY, run(None, 20.0))
    assert durations.estimate(KEY, config()).startup == guessed(config()).startup
    durations.record(KEY, run(70.0, 20.0))
    assert durations.estimate(KEY, config()).startup == 70.0


def test_nothing_measured_is_a_guess(path: Path) -> None:
    """Without a file the guess is told, and nothing is written."""
    assert Durations(path).estimate(KEY, config()) == guessed(config())
    assert not path.parent.exists()


def test_runs_that_write_at_once_lose_nothing(path: Path) -> None:
    """What several processes measure at the same time is all there afterwards."""
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, f"writer{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    ids = [row["config_id"] for row in json.loads(path.read_text())["durations"]]
    assert ids == sorted(f"writer{n}-{m}" for n in range(3) for m in range(10))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"schema": 1, "dura',
        b"\xff\xfe",
        b"[]",
        b'{"schema": 2, "durations": []}',
        b'{"schema": 1, "durations": [{"config_id": "a"}]}',
        b'{"schema": 1, "durations": [{"config_id": "a", "task": "t", "backend": "b", "gpu": null, "runs": [{}]}]}',
    ],
    ids=["empty", "torn", "no text", "a list", "another schema", "no row", "no run"],
)
def test_a_damaged_file_is_kept_aside(path: Path, content: bytes) -> None:
    """It warns, starts afresh and loses nothing, however often that happens."""
    path.parent.mkdir()
    for number in (1, 2):
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=rf"durations\.json: no file .*kept as durations\.damaged-{number}\.json"):
            Durations(path).record(KEY, run(50.0, 20.0))
        assert path.with_name(f"durations.damaged-{number}.json").read_bytes() == content
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Durations(path).estimate(KEY, config()).seconds == 70.0


def test_a_place_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    """Durations are worth a warning, not a red run."""
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="durations are not kept"):
        Durations(tmp_path / "file" / "durations.json").record(KEY, run(50.0, 20.0))
