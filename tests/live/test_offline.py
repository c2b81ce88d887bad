"""Real vLLM in process: the same answers as its server's, its counters, its death, and nothing left of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ask_offline import CONFIGS, MIXED

from harness.backends.server import ServerBackend
from harness.config import load_config
from harness.records import read_samples
from harness.servers.endpoint import Endpoint
from harness.servers.leftovers import start_ticks
from harness.servers.vllm import vllm_server
from harness.tasks.base import Sample, Status
from harness.tasks.build import build_task

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]
SCRIPT = Path(__file__).with_name("ask_offline.py")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory, real_vllm: None) -> dict[str, Any]:
    """What a process of its own saw that asked two engines, one after the other."""
    folder = tmp_path_factory.mktemp("offline")
    command = [sys.executable, str(SCRIPT), "saw.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saw: dict[str, Any] = json.loads((folder / "saw.json").read_text())
    saw["samples"] = {row["index"]: row for row in read_samples(folder / "smoke" / "samples.jsonl")}
    return saw


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, offline: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's server answers to the same requests, once the engines in process are gone."""
    config = load_config(CONFIGS / "smollm2-135m-smoke.yaml")
    task = build_task(config, folder=CONFIGS, data_dir=None)
    with vllm_server(config, tmp_path_factory.mktemp("served") / "server.log") as endpoint:
        answers, mixed = asyncio.run(ask(endpoint, task.requests)), asyncio.run(ask(endpoint, MIXED))
    return {"samples": [task.score(index, answer) for index, answer in enumerate(answers)], "mixed": mixed}


async def ask(endpoint: Endpoint, requests: Any) -> list[Any]:
    backend = ServerBackend(endpoint.base_url, model=endpoint.model, api_key=endpoint.api_key)
    async with backend:
        answers = {index: answer async for index, answer in backend.run(requests)}
    return [answers[index] for index in range(len(requests))]


def test_server_and_process_agree(offline: dict[str, Any], served: dict[str, Any]) -> None:
    """The smoke questions get the same text on at least 19 of 20, and as many right answers within one."""
    samples: list[Sample] = served["samples"]
    assert all(sample.status is not Status.ERROR for sample in samples)
    same = [sample for sample in samples if sample.text == offline["samples"][sample.index]["text"]]
    assert len(same) >= 19
    for sample in same:
        row = offline["samples"][sample.index]
        assert (row["generated_tokens"], row["prompt_tokens"]) == (sample.generated_tokens, sample.prompt_tokens)
        assert (row["finish_reason"], row["prompt_sha256"]) == (sample.finish_reason, sample.prompt_sha256)
    right = offline["smoke"]["counts"]["correct"]
    assert abs(right - sum(sample.correct for sample in samples)) <= 1
    assert 13 <= right <= 17
    assert offline["smoke"]["verdict"] == "pass"


def test_kinds_and_settings_mix(offline: dict[str, Any], served: dict[str, Any]) -> None:
    """Prompts and conversations of unlike settings in one call are answered as the server answers them."""
    told = [asdict(answer) for answer in served["mixed"]]
    keys = ("text", "finish_reason", "generated_tokens", "prompt_tokens", "kind")
    for here, there in zip(offline["mixed"], told, strict=True):
        assert {key: here.get(key) for key in keys} == {key: there.get(key) for key in keys}
    refused = offline["mixed"][1]
    assert refused["kind"] == "rejected"
    assert "maximum context length is 4096" in refused["detail"]


def test_the_record_says_what_answered(offline: dict[str, Any]) -> None:
    """Engine, version, type, device and context are in the result, and every sample has its own latency."""
    server = offline["smoke"]["server"]
    assert (server["engine"], server["dtype"], server["device"]) == ("vllm-offline", "float32", "cpu")
    assert server["max_model_len"] == 4096
    assert server["version"][0].isdigit()
    latencies = {row["latency"] for row in offline["samples"].values()}
    assert len(latencies) == 20
    assert 0 < min(latencies) < offline["smoke"]["timings"]["asking"]


def test_acceptance_length_in_process(offline: dict[str, Any]) -> None:
    """A second engine in the same process speculates, and its counters give the acceptance length its gate needs."""
    result = offline["ngram"]
    found = result["acceptance"]
    assert result["verdict"] == "pass", result["reason"]
    assert found["drafts"] > 20
    assert found["length"] == pytest.approx(1 + found["accepted_tokens"] / found["drafts"])
    assert found["length"] == pytest.approx(1 + sum(found["rate_by_position"]))
    assert found["length"] >= 1.2


def test_a_killed_engine_ends_the_run(offline: dict[str, Any]) -> None:
    """SIGKILL on the engine while it writes is an outage within 5 s, with the end of its log."""
    message, seconds = offline["died"]
    assert "the engine's process is gone" in message
    assert "the end of ngram.log" in message
    assert seconds < 5


def test_nothing_is_left(offline: dict[str, Any]) -> None:
    """Neither engine nor worker outlives its block, whether it ended well or was killed."""
    assert len(offline["pids"]) >= 2
    assert not [pid for pid in offline["pids"] if start_ticks(pid) is not None]


READ = [
    (0, ["'dtype': 'float32'", "'enforce_eager': True", "'max_model_len': 4000", "'tensor_parallel_size': 2"]),
    (1, ["'enable_prefix_caching': False", "'disable_log_stats': False", "'trust_remote_code': True"]),
    (2, ["'num_speculative_tokens': 3", "'disable_log_stats': True"]),
    (3, ["'chat_template': 't.jinja'", "'chat_template_kwargs': {'enable_thinking': False}"]),
    (4, ["ConfigError: server_args: unrecognized arguments: --no-such-flag 3"]),
    (5, ["ConfigError: server_args: argument --dtype: invalid choice: 'floaty'"]),
    (6, ["ConfigError: server_args: argument --max-model-len: expected one argument"]),
]


@pytest.mark.parametrize(
    ("line", "found"), READ, ids=["spellings", "http-side", "json", "chat", "unknown", "impossible", "no-value"]
)
def test_arguments_keep_their_meaning(line: int, found: list[str], offline: dict[str, Any]) -> None:
    """vLLM's own parser reads the flags; those of the HTTP side are dropped, what it would not take is a mistake."""
    said = offline["arguments"][line]
    assert all(part in said for part in found), said
    assert not any(word in said for word in ("'host'", "api_key", "uvicorn"))
