"""Backends by name: the project's own, and those that somebody registered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.backends.base import RequestKind
from harness.backends.registry import BUILT_IN, BackendType, build_backend, names
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
