"""Asks real vLLM in process and tells what came of it as JSON; a process of its own, for torch stays where it is."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.backends.base import ChatMessage, GenerateRequest, Sampling
from harness.backends.llm_arguments import engine_args
from harness.backends.offline_engine import OfflineEngine, offline_engine
from harness.backends.vllm_offline import VllmOfflineBackend
from harness.config import ModelConfig, load_config
from harness.errors import ConfigError, ServerDied
from harness.offline import evaluate_offline
from harness.servers.leftovers import VARIABLE, Marker, find_marked, kill_marked

CONFIGS = Path(__file__).resolve().parents[2] / "configs/cpu"
LINES = (
    "--dtype float32 --enforce-eager --max_model_len=4k -tp 2",
    "--host ::1 --api-key x --served-model-name a b --disable-uvicorn-access-log --no-enable-prefix-caching",
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\' --disable-log-stats',
    "--chat-template t.jinja --default-chat-template-kwargs '{\"enable_thinking\": false}'",
    "--no-such-flag 3",
    "--dtype floaty",
    "--max-model-len",
)


def conversation(*texts: str) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role="user" if i % 2 == 0 else "assistant", content=t) for i, t in enumerate(texts))


MIXED = (
    GenerateRequest(prompt="The sky is", sampling=Sampling(max_tokens=3)),
    GenerateRequest(prompt="word " * 6000, sampling=Sampling(max_tokens=5)),
    GenerateRequest(prompt="1 2 3 4 5", sampling=Sampling(max_tokens=30, stop=(" 9",))),
    GenerateRequest(prompt=conversation("Say hello."), sampling=Sampling(max_tokens=12)),
    GenerateRequest(prompt=conversation("Hi", "Hello!", "What is 2 + 2?"), sampling=Sampling(max_tokens=12)),
    GenerateRequest(prompt="Once upon", sampling=Sampling(max_tokens=6, temperature=1.0, top_k=1, seed=3)),
)


def smoke(engine: OfflineEngine, config: ModelConfig, folder: str) -> dict[str, Any]:
    """Evaluate as the config says."""
    result = evaluate_offline(
        engine.llm,
        task="smoke",
        max_tokens=config.max_tokens,
        accuracy_threshold=config.accuracy_threshold,
        tolerance=config.tolerance,
        min_acceptance_length=config.min_acceptance_length,
        record_dir=folder,
    )
    return result.to_json()


async def mixed(backend: VllmOfflineBackend) -> list[dict[str, Any]]:
    answers = {index: asdict(response) async for index, response in backend.run(MIXED)}
    return [answers[index] for index in range(len(MIXED))]


async def asked_until_killed(backend: VllmOfflineBackend) -> tuple[str, float]:
    """Kill the engine while it writes; return how the run ended, and how many seconds later."""
    long = [GenerateRequest(prompt="Once upon a time", sampling=Sampling(max_tokens=2000))]
    marker = Marker.parse(os.environ[VARIABLE])
    assert marker is not None
    killed = 0.0

    async def kill() -> None:
        nonlocal killed
        await asyncio.sleep(2.0)
        killed = time.monotonic()
        await asyncio.to_thread(kill_marked, marker, seconds=5.0)

    killing = asyncio.create_task(kill())
    try:
        _ = [answer async for answer in backend.run(long)]
    except ServerDied as error:
        return str(error), time.monotonic() - killed
    finally:
        await killing
    return "it was answered", 0.0


def arguments_of(line: str) -> str:
    try:
        read = engine_args(shlex.split(line), "m", trust_remote_code=True)
    except ConfigError as error:
        return f"ConfigError: {error}"
    return str({"llm": dict(read.llm), "chat": dict(read.chat)})


def marked() -> list[int]:
    marker = Marker.parse(os.environ[VARIABLE])
    return [process.pid for process in find_marked(marker)] if marker else []


def main() -> None:
    saw: dict[str, Any] = {}
    config = load_config(CONFIGS / "smollm2-135m-smoke.yaml")
    with offline_engine(config, Path("smoke.log")) as engine:
        saw["pids"] = marked()
        saw["smoke"] = smoke(engine, config, "smoke")
        saw["mixed"] = asyncio.run(mixed(engine.backend(config)))
        saw["arguments"] = [arguments_of(line) for line in LINES]
    config = load_config(CONFIGS / "smollm2-135m-smoke-ngram.yaml")
    with offline_engine(config, Path("ngram.log")) as engine:
        saw["pids"] += marked()
        saw["ngram"] = smoke(engine, config, "ngram")
        saw["died"] = asyncio.run(asked_until_killed(engine.backend(config)))
    Path(sys.argv[1]).write_text(json.dumps(saw))


if __name__ == "__main__":
    main()
