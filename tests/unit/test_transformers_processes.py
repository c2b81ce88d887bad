"""One evaluation by two processes that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers torch")

ROOT = Path(__file__).resolve().parents[2]

SHARED = """
import asyncio, json, os, sys
from pathlib import Path
from harness.backends.base import GenerateRequest, LoglikelihoodRequest, RollingRequest, Sampling
from harness.backends.transformers_engine import transformers_engine
from harness.config import ModelConfig

folder, scratch, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
config = ModelConfig(model_name=str(folder), accuracy_threshold=0.5)
words = "the quick brown fox jumps over a lazy dog".split()
requests = [
    [RollingRequest(text=" ".join(words[: 1 + i % 9])),
     LoglikelihoodRequest(context=words[i % 9], continuations=(" fox", " dog jumps")),
     GenerateRequest(prompt=words[i % 9], sampling=Sampling(max_tokens=3))][i % 3]
    for i in range(101)
]

async def run(backend, asked, wanted):
    answers, error = [], None
    stream = backend.run(asked)
    try:
        async for index, response in stream:
            answers.append((index, repr(response).split(", latency")[0]))
            if len(answers) == wanted:
                break
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    await stream.aclose()
    return {"answers": answers, "error": error}

async def main(engine):
    said, rows = {}, []
    model = engine.causal.model
    model.register_forward_pre_hook(lambda m, a, k: rows.append(k["input_ids"].shape[0]), with_kwargs=True)
    async with engine.backend(config) as backend:
        said["all"] = await run(backend, requests, None)
        said["rows"] = sum(rows)
        said["three"] = await run(backend, requests, 3)
        said["unlike"] = await run(backend, requests[rank:], None)
        if rank == 1:
            model.register_forward_pre_hook(lambda *_: 1 / 0)
        said["fault"] = await run(backend, requests, None)
    (scratch / f"{rank}.json").write_text(json.dumps(said))

with transformers_engine(config, scratch / "server.log", dtype="float32", device="cpu", batch_size=4) as engine:
    asyncio.run(main(engine))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes under torchrun got, in several runs of one backend."""
    scratch = tmp_path_factory.mktemp("processes")
    make_model().save_pretrained(scratch / "tiny")
    make_tokenizer().save_pretrained(scratch / "tiny")
    script = scratch / "shared.py"
    script.write_text(SHARED)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(scratch / "tiny"), str(scratch)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_share_the_work(said: list[dict[str, Any]]) -> None:
    """Each of two processes asks its share; the main one yields every answer once, the other none."""
    main, other = said
    assert sorted(index for index, _ in main["all"]["answers"]) == list(range(101))
    assert all("Failure" not in answer for _, answer in main["all"]["answers"])
    assert other["all"] == {"answers": [], "error": None}
    assert min(main["rows"], other["rows"]) > 0


def test_two_processes_answer_as_one(said: list[dict[str, Any]]) -> None:
    """Requests that repeat every 9 words get the same answer from whichever process asks them."""
    texts: dict[int, set[str]] = {}
    for index, answer in said[0]["all"]["answers"]:
        if index % 3 == 2:
            texts.setdefault(index % 9, set()).add(answer)
    assert all(len(answers) == 1 for answers in texts.values())


def test_two_processes_end_together(said: list[dict[str, Any]]) -> None:
    """When the main process wants no more, the other stops as well instead of waiting for ever."""
    main, other = said
    assert len(main["three"]["answers"]) == 3
    assert other["three"] == {"answers": [], "error": None}


def test_processes_asked_unlike_things_are_told(said: list[dict[str, Any]]) -> None:
    """Processes that were not given the same requests end with an error that says so, in all of them."""
    assert all("unlike numbers of requests: [101, 100]" in each["unlike"]["error"] for each in said)


def test_a_fault_in_one_process_is_told_to_all(said: list[dict[str, Any]]) -> None:
    """A model that fails in one process ends the run in both, naming the process."""
    main, other = said
    assert main["fault"]["error"].startswith("ServerDied: process 1 of 2: the model failed: ZeroDivisionError")
    assert "ZeroDivisionError" in other["fault"]["error"]
