"""An engine in a user's own process: what it is told, what it leaves as it was, and that nothing of it remains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.servers.leftovers import start_ticks

FAKE = Path(__file__).with_name("fake_vllm")


def open_engine(folder: Path, server_args: str = "", then: str = "leave") -> dict[str, Any]:
    """Open an engine in a process of its own and return what that saw."""
    env = {
        **os.environ,
        "PYTHONPATH": str(FAKE),
        "SHUTDOWN_NOTE": str(folder / "shutdown"),
        "HOME_OF_TEST": "as it was",
    }
    command = [sys.executable, str(FAKE / "open_engine.py"), server_args, then]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip(), done.stderr
    saw: dict[str, Any] = {"out": done.stdout, "err": done.stderr, **json.loads(done.stdout.splitlines()[-1])}
    return saw


def alive(pids: list[int]) -> list[int]:
    """Leave out the dead, and those that only wait to be collected by whoever inherited them."""
    return [pid for pid in pids if start_ticks(pid) is not None]


def all_gone(pids: list[int], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_an_engine_is_told_what_a_server_would_be(tmp_path: Path) -> None:
    """Flags become keywords, the HTTP side's are dropped, and statistics are kept as a server keeps them."""
    saw = open_engine(tmp_path, "--max-model-len 4096 --disable-uvicorn-access-log --chat-template x.jinja")
    assert saw["keywords"] == {
        "model": "m",
        "max_model_len": 4096,
        "trust_remote_code": True,
        "disable_log_stats": False,
        "chat_template": "x.jinja",
    }
    assert saw["chat"] == {"chat_template_content_format": "auto"}
    assert saw["described"]["arguments"][:2] == ["--max-model-len", "4096"]


def test_the_environment_is_the_engines_and_then_as_before(tmp_path: Path) -> None:
    """The config's variables and the GPUs hold while it runs; afterwards nothing is changed, by us or by vLLM."""
    saw = open_engine(tmp_path)
    assert saw["env"]["FROM_CONFIG"] == "1"
    assert saw["env"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert int(saw["env"]["VLLM_PORT"]) > 1024
    assert saw["restored"]
    assert "a-secret-of-ours" not in json.dumps(saw["described"])


def test_what_it_prints_goes_to_the_log(tmp_path: Path) -> None:
    """The start and all that its processes print is in the log without secrets, and nothing of it on the terminal."""
    saw = open_engine(tmp_path)
    log = (tmp_path / "server.log").read_text()
    assert "the LLM begins" in log
    assert "the engine begins; secret is ***" in log
    assert len(saw["out"].splitlines()) == 1
    assert "begins" not in saw["err"]


@pytest.mark.parametrize("then", ["leave", "raise", "cancel"], ids=["ends-well", "is-interrupted", "was-cancelled"])
def test_an_engine_ends_with_its_block(tmp_path: Path, then: str) -> None:
    """However the block ends, vLLM ends its side of it, and no process is left."""
    saw = open_engine(tmp_path, then=then)
    assert saw["marked"]
    assert (tmp_path / "shutdown").exists()
    assert not alive(saw["marked"])
    assert saw.get("raised", ["KeyboardInterrupt"])[0] == "KeyboardInterrupt"


def test_a_stubborn_engine_is_killed(tmp_path: Path) -> None:
    """One that ignores SIGTERM, and its grandchild in a session of its own, are gone when the block is left."""
    saw = open_engine(tmp_path, "--fault stubborn")
    assert len(saw["marked"]) == 2
    assert not alive(saw["marked"])


def test_a_killed_process_takes_its_engine_along(tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything, and yet no process of the engine outlives it."""
    saw = open_engine(tmp_path, "--fault stubborn", then="die")
    assert len(saw["marked"]) == 2
    assert all_gone(saw["marked"])


STARTS = [
    pytest.param("dies", "ServerExited", ["CUDA out of memory", "likely cause: the device's memory"], id="dies"),
    pytest.param("refuses", "ServerExited", ["greater than the derived", "lower --max-model-len"], id="refuses"),
    pytest.param("slow", "ServerNotReady", ["not ready after 2.0 s", "the LLM begins"], id="slow"),
]


@pytest.mark.parametrize(("fault", "kind", "says"), STARTS)
def test_an_engine_that_does_not_start_is_an_outage(tmp_path: Path, fault: str, kind: str, says: list[str]) -> None:
    """The message names the cause and ends with the log's tail, and nothing is left running or changed."""
    saw = open_engine(tmp_path, f"--fault {fault}")
    name, message = saw["raised"]
    assert name == kind
    assert all(words in message for words in says), message
    assert saw["restored"]


def test_unknown_flags_are_a_mistake(tmp_path: Path) -> None:
    """What `vllm serve` would not take is an error of the config, not of the machine."""
    saw = open_engine(tmp_path, "--no-such-flag 3")
    assert saw["raised"] == ["ConfigError", "server_args: unrecognized arguments: --no-such-flag 3"]


def test_workers_are_checked_in_process(tmp_path: Path) -> None:
    """`startup_rpc_checks` call the workers without a server: ill ones are a regression, no method an outage."""
    saw = open_engine(tmp_path, then="check")
    assert saw["gates"] == ["pass", "regression"]
    assert saw["raised"] == ["ServerError", "startup_rpc_checks: unknown: unknown"]


def test_a_death_comes_with_the_log(tmp_path: Path) -> None:
    """While it lives there is no death; then its message holds the model and what was printed last."""
    saw = open_engine(tmp_path, then="death")
    assert saw["alive"] is None
    assert saw["dead"].startswith("m: the engine's process is gone")
    assert "the engine begins" in saw["dead"]
