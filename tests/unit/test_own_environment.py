"""Servers are started with the user's environment, whatever an engine or an import in this process has set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from harness.own_environment import changed_environment, users_environment
from harness.servers.embedded_model import model_folder
from harness.servers.vllm import base_environment


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_VARIABLE", "the user's")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def test_what_a_block_sets_is_taken_back() -> None:
    """Variables set by the block, in it, and others overwritten or removed in it, are as before once it is left."""
    before = dict(os.environ)
    with changed_environment({"A_VARIABLE": "the engine's", "ANOTHER": "1"}):
        assert os.environ["A_VARIABLE"] == "the engine's"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/elsewhere"
        del os.environ["PATH"]
    assert dict(os.environ) == before


def test_a_server_started_beside_an_engine_gets_none_of_its_variables() -> None:
    """What an engine in this process has set reaches no server; its compile cache stays in the kept place."""
    alone = base_environment()
    with changed_environment({"A_VARIABLE": "the engine's"}):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/elsewhere"
        with changed_environment({"ANOTHER": "1"}):
            assert users_environment()["A_VARIABLE"] == "the user's"
            assert base_environment() == alone
    assert base_environment() == alone


def test_a_user_who_sets_a_variable_later_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside such a block the environment is what it is at that moment."""
    monkeypatch.setenv("ANOTHER", "2")
    assert users_environment()["ANOTHER"] == "2"


def test_loading_a_tokenizer_changes_no_variable() -> None:
    """Importing transformers, and torch with it, for a tokenizer leaves the environment as it was."""
    pytest.importorskip("transformers")
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "from harness.backends.hf_tokenizer import HfTokenizer\n"
        "HfTokenizer.load(sys.argv[1], trust_remote_code=False, local_only=True)\n"
        "assert 'transformers' in sys.modules\n"
        "print({k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)})\n"
    )
    env: Mapping[str, str] = {**os.environ, "HF_HUB_OFFLINE": "1"}
    folder = str(model_folder("embedded:smollm2-135m-instruct"))
    done = subprocess.run([sys.executable, "-c", code, folder], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
