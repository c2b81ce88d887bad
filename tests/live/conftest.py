"""Real vLLM on the CPU: skipped, with the reason, where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.config import load_config
from harness.servers.endpoint import Endpoint
from harness.servers.vllm import vllm_server

ROOT = Path(__file__).resolve().parents[2]
NGRAM = ROOT / "configs/cpu/smollm2-135m-smoke-ngram.yaml"


@pytest.fixture(scope="session")
def ngram_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One real server with n-gram speculation for all tests that only ask."""
    with vllm_server(load_config(NGRAM), tmp_path_factory.mktemp("ngram") / "server.log") as server:
        yield server
