"""Backends by name: the project's own, and those that somebody registered."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import RequestKind
from harness.backends.registry import BUILT_IN, BackendType, Start, build_backend, names
from harness.config import ModelConfig
from harness.engine_settings import EngineSettings
from harness.errors import ConfigError

PLUGIN = """
from contextlib import contextmanager

from harness.backends.base import RequestKind
from harness.backends.registry import BackendType


@contextmanager
def start(config, start):
    yield None


BACKEND = BackendType(name="loop", kinds=frozenset({RequestKind.GENERATE}), start=start)


def wrong():
    return 7
"""
ENTRY_POINTS = "[accuracy_gate.backends]\nloop = training_loop:BACKEND\nwrong = training_loop:wrong\ngone = nowhere:X\n"
PROGRAM = """
from harness.backends.registry import build_backend, names
from harness.config import ModelConfig
print(names()[-3:])
print(build_backend("loop").name, ModelConfig(model_name="m", accuracy_threshold=0.5, backend="loop").arguments)
for name in ("wrong", "gone"):
    try:
        build_backend(name)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_of_our_own_says_what_it_can_be_asked(name: str) -> None:
    """Every built-in backend loads without its engine being installed, and names its kinds of request."""
    kind = build_backend(name)
    assert isinstance(kind, BackendType)
    assert kind.name == name
    assert kind.kinds == (frozenset({RequestKind.GENERATE}) if name == "openai" else frozenset(RequestKind))


def test_a_name_that_nobody_registered_is_a_mistake() -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigError, match=r"backend nobody: .* known: vllm, vllm-offline, transformers"):
        build_backend("nobody")
    assert names()[: len(BUILT_IN)] == tuple(BUILT_IN)


def test_others_register_by_entry_point(tmp_path: Path) -> None:
    """A package's entry point is a backend like our own; one that cannot be loaded says why."""
    (tmp_path / "training_loop.py").write_text(PLUGIN)
    installed = tmp_path / "training_loop-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: training-loop\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, wrong, gone = done.stdout.splitlines()
    assert first == "('gone', 'loop', 'wrong')"
    assert second == "loop ()"
    assert wrong == "ConfigError backend wrong: training_loop:wrong makes int, not BackendType"
    assert gone.startswith("ConfigError backend gone: nowhere:X cannot be loaded: ModuleNotFoundError")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"gpu_memory_fraction": 0.5}, "engine.gpu_memory_fraction: transformers has no such setting"),
        ({"max_batched_tokens": 512}, "use options: {batch_size: N}"),
        ({"tensor_parallel_size": 2}, "use num_gpus and options: {device_map: auto}"),
    ],
)
def test_what_transformers_cannot_do_is_refused_before_the_start(engine: dict[str, Any], said: str) -> None:
    """A shared setting that an engine does not have is a mistake with a way out, never ignored."""
    config = ModelConfig(
        model_name="m", accuracy_threshold=0.5, backend="transformers", engine=EngineSettings(**engine)
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_backend("transformers").check(config, Start(log_path=Path("log")))


def test_the_suite_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process would write a record of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    config = ModelConfig(model_name="m", accuracy_threshold=0.5, backend="transformers")
    with pytest.raises(ConfigError, match="the suite is one process"):
        build_backend("transformers").check(config, Start(log_path=Path("log")))


def test_a_remote_api_without_a_key_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is said before anything starts, by the suite's own check."""
    for name in ("OPENAI_API_KEY", "ACCURACY_GATE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    config = ModelConfig(model_name="m", accuracy_threshold=0.5, backend="openai")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        build_backend("openai").check(config, Start(log_path=Path("log")))


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed here")
def test_an_engine_that_is_not_installed_is_refused_before_the_start() -> None:
    """The message names the package."""
    config = ModelConfig(model_name="m", accuracy_threshold=0.5, backend="sglang-offline")
    with pytest.raises(ConfigError, match="pip install sglang"):
        build_backend("sglang-offline").check(config, Start(log_path=Path("log")))
