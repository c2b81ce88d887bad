"""The cache checks on real vLLM: a warm prefix cache, and blocks that a connector keeps outside the engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite_run import SuiteRun

from harness.records import read_samples

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("real_vllm")]

ROOT = Path(__file__).resolve().parents[2]
SMOKE = (ROOT / "configs/cpu/smollm2-135m-smoke.yaml").read_text()


def gates(run: SuiteRun) -> dict[str, dict[str, Any]]:
    return {gate["name"]: gate for gate in run.result()["gates"]}


def assert_two_passes(run: SuiteRun) -> None:
    for name in ("samples.jsonl", "samples-2.jsonl"):
        indices = [sample["index"] for sample in read_samples(run.record / "config" / name)]
        assert sorted(indices) == list(range(20)), name
    assert gates(run)["accuracy, pass 2"]["verdict"] == "pass"


def test_a_warm_prefix_cache_answers_as_a_cold_one(run_suite: Callable[..., SuiteRun]) -> None:
    """The smoke set twice: the second pass hits the prefix cache, and its answers differ by no more than noise."""
    run = run_suite(SMOKE + "prefix_cache_check: true\n")
    output = run.output()
    assert run.process.returncode == 0, output
    assert_two_passes(run)
    gate = gates(run)["prefix cache"]
    assert gate["verdict"] == "pass"
    assert gate["measured"] <= gate["required"] <= 4
    assert not run.servers()


def offloading(folder: Path) -> str:
    """Server arguments for the connector that the CPU build has: it writes each prompt's blocks to a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    return f" --kv-transfer-config '{json.dumps(connector)}' --kv-events-config '{json.dumps(events)}'"


def test_the_offloaded_cache_is_used_on_real_vllm(run_suite: Callable[..., SuiteRun], tmp_path: Path) -> None:
    """After the engine's own cache was dropped, prompts come from the connector's, and the floor is met again."""
    pytest.importorskip("zmq")
    added = json.dumps(
        "--dtype float32 --enforce-eager --max-model-len 4096 --block-size 32" + offloading(tmp_path / "blocks")
    )
    head = SMOKE[: SMOKE.index("server_args:")]
    run = run_suite(f"{head}server_args: {added}\nkv_offload_check: true\n")
    output = run.output()
    assert run.process.returncode == 0, output
    assert_two_passes(run)
    gate = gates(run)["KV offload"]
    assert gate["verdict"] == "pass"
    assert gate["measured"] > 20 * 32, "more than a block for each question"
    assert "KV events told of" in gate["message"]
    assert len(list((tmp_path / "blocks").iterdir())) >= 20
