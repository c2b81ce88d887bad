"""A transformers model from a config: loaded, let go of, and not stopped by packages it does not need."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Memory, ask, make_model, make_tokenizer, prompt

from harness.backends.base import (
    Generation,
    Response,
)
from harness.backends.transformers_engine import transformers_engine
from harness.config import ModelConfig
from harness.errors import ServerDied, ServerError, ServerExited, ServerNotReady

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers torch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def saved(tokenizer: Any, llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(folder: Path, **keys: Any) -> ModelConfig:
    return ModelConfig(model_name=str(folder), accuracy_threshold=0.5, **keys)


def test_an_engine_comes_from_a_config_and_goes(saved: Path, tokenizer: Any, llama: Any, tmp_path: Path) -> None:
    """A folder's model answers as the one in memory, is described, and is let go of at the end."""
    expected = ask(llama, tokenizer, [prompt(6)])[0]
    config = config_of(saved)

    async def run(engine: Any) -> Response:
        async with engine.backend(config) as backend:
            answers = [response async for _, response in backend.run([prompt(6)])]
            return answers[0]

    with transformers_engine(config, tmp_path / "server.log", dtype="float32", device="cpu") as engine:
        answer = asyncio.run(run(engine))
        assert (engine.model, engine.death(), engine.check_workers([])) == (str(saved), None, ())
        assert engine.startup_seconds > 0
        assert engine.description["arguments"]["dtype"] == "float32"
        with pytest.raises(ServerError, match="no workers"):
            engine.check_workers(["verify"])
    assert isinstance(expected, Generation)
    assert isinstance(answer, Generation)
    assert answer.text == expected.text
    assert engine.causal.model is None


def test_a_model_that_died_is_told(saved: Path, tmp_path: Path) -> None:
    """After a fault of the model, the engine says what it died of."""
    config = config_of(saved)

    async def run(engine: Any) -> None:
        async with engine.backend(config) as backend:
            _ = [answer async for answer in backend.run([prompt(6)])]

    with transformers_engine(config, tmp_path / "server.log", device="cpu") as engine:
        Memory(engine.causal.model, 1, lambda: RuntimeError("illegal memory access"))
        with pytest.raises(ServerDied):
            asyncio.run(run(engine))
        assert "illegal memory access" in str(engine.death())


def test_a_model_that_is_not_there_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a model ends as ServerExited with the cause, not as a traceback."""
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(ServerExited, match="the model did not load"),
        transformers_engine(config_of(tmp_path / "empty"), tmp_path / "server.log", device="cpu"),
    ):
        pytest.fail("an empty folder was loaded")


def test_a_start_out_of_time_is_not_ready(saved: Path, tmp_path: Path) -> None:
    """A model that takes longer than allowed is not asked."""
    with (
        pytest.raises(ServerNotReady, match="to load, allowed 0"),
        transformers_engine(config_of(saved), tmp_path / "server.log", within=0.0, device="cpu"),
    ):
        pytest.fail("it was given")


LOADS = """
import asyncio, json, os, sys
from pathlib import Path
from harness.backends.base import RollingRequest
from harness.backends.transformers_engine import transformers_engine
from harness.config import ModelConfig

config = ModelConfig(model_name=sys.argv[1], accuracy_threshold=0.5)

async def run(engine):
    async with engine.backend(config) as backend:
        return [r async for _, r in backend.run([RollingRequest(text="the quick brown fox")])]

with transformers_engine(config, Path(sys.argv[2]), device="cpu", dtype="float32") as engine:
    (answer,) = asyncio.run(run(engine))
    print(json.dumps({"logprob": answer.logprob, "left_out": engine.description["left_out"]}))
"""


@pytest.mark.parametrize(
    ("name", "version", "source", "left_out"),
    [
        ("torchao", "0.1.0", "raise ImportError('made for torch 1.13')", []),
        ("torchao", "99.0.0", "import torch; torch.was_removed", ["torchao"]),
        ("torchao", None, "raise OSError('libcudart.so.9: cannot open shared object file')", ["torchao"]),
        ("torchao", None, "", ["torchao"]),
        ("accelerate", "0.1.0", "", []),
    ],
    ids=["old", "incompatible", "no-metadata", "no-version", "old-accelerate"],
)
def test_a_misfit_among_optional_packages_stops_nobody(
    saved: Path, tmp_path: Path, name: str, version: str | None, source: str, left_out: list[str]
) -> None:
    """A package that transformers would use if it fitted is left out, and said so, where the model needs it not."""
    packages = tmp_path / "packages"
    (packages / name).mkdir(parents=True)
    (packages / name / "__init__.py").write_text(source)
    if version is not None:
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    command = [sys.executable, "-c", LOADS, str(saved), str(tmp_path / "server.log")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["left_out"] == left_out
    assert said["logprob"] < 0
