"""An SGLang engine in a user's own process: what it is told, how it dies, and that nothing of it remains.

The package is a stand-in with the parts of SGLang's that are used here, its habits included: it prints what it was
told, its worker sends SIGQUIT when it fails, and its `shutdown` would kill every child there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.backends.sglang_offline import check_sglang_offline
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.servers.leftovers import start_ticks

ARGUMENTS = """
from dataclasses import dataclass

@dataclass
class ServerArgs:
    model_path: str
    nccl_port: int
    context_length: int
    trust_remote_code: bool
    dtype: str = "auto"

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--nccl-port", type=int)
        parser.add_argument("--context-length", type=int, default=64)
        parser.add_argument("--trust-remote-code", action="store_true")

    @classmethod
    def from_cli_args(cls, told):
        return cls(**vars(told))
"""
PACKAGE = """
import asyncio, atexit, os, subprocess, sys, threading, time
from types import SimpleNamespace

__version__ = "0.5.16"
WORKER = "import os, signal, sys, time\\nwhile not os.path.exists('fail'): time.sleep(0.02)\\n" \\
         "os.kill(int(sys.argv[1]), signal.SIGQUIT)\\ntime.sleep(3600)"

class Watchdog:
    def stop(self):
        open("watchdog-stopped", "w").close()

class Engine:
    def __init__(self, server_args):
        assert threading.current_thread() is not threading.main_thread()
        asyncio.get_running_loop()
        print("server_args:", server_args, os.environ.get("MY_API_KEY"), flush=True)
        if server_args.model_path == "broken":
            raise RuntimeError("CUDA out of memory")
        self.server_args = server_args
        self.worker = subprocess.Popen([sys.executable, "-c", WORKER, str(os.getpid())], start_new_session=True)
        if server_args.model_path == "slow":
            while self.worker.poll() is None:
                time.sleep(0.02)
            raise RuntimeError("the scheduler died")
        model = SimpleNamespace(context_len=64, get_default_sampling_params=dict)
        self.tokenizer_manager = SimpleNamespace(model_config=model, _subprocess_watchdog=Watchdog())
        atexit.register(self.shutdown)

    def get_all_child_pids(self):
        return [self.worker.pid]

    def shutdown(self):
        open("shut-down", "w").close()

    async def async_generate(self, prompt, sampling_params):
        about = {"finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 1}
        return [{"text": text + "!", "meta_info": about} for text in prompt]
"""
USER = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
from harness.backends.base import GenerateRequest, Sampling
from harness.backends.sglang_offline import sglang_engine
from harness.config import ModelConfig

async def ask(backend):
    async with backend:
        request = GenerateRequest(prompt="hi", sampling=Sampling(max_tokens=1))
        return [reply.text async for _, reply in backend.run([request])]

model, then = sys.argv[1:]
keys = {"startup_max_wait_seconds": 2.0} if model == "slow" else {}
config = ModelConfig(model_name=model, accuracy_threshold=0.5, backend="sglang-offline",
                     server_args="--context-length 32", env={"MY_API_KEY": "a-secret-of-ours"}, **keys)
before, handler, saw = dict(os.environ), signal.getsignal(signal.SIGQUIT), {}
try:
    with sglang_engine(config, Path("run/server.log"), env={"CUDA_VISIBLE_DEVICES": "3"}) as engine:
        saw["pid"] = engine.engine.worker.pid
        saw["env"] = os.environ["CUDA_VISIBLE_DEVICES"]
        saw["args"] = [engine.engine.server_args.context_length, engine.engine.server_args.trust_remote_code]
        saw["version"], saw["described"] = engine.version, str(engine.description)
        saw["answers"] = asyncio.run(ask(engine.backend(config))) + asyncio.run(ask(engine.backend(config)))
        saw["alive"] = engine.death()
        if then == "fail":
            Path("fail").touch()
            until = time.monotonic() + 10
            while engine.death() is None and time.monotonic() < until:
                time.sleep(0.02)
            saw["dead"] = engine.death()
        if then == "kill-worker":
            os.kill(saw["pid"], signal.SIGKILL)
            until = time.monotonic() + 10
            while engine.death() is None and time.monotonic() < until:
                time.sleep(0.02)
            saw["dead"] = engine.death()
        if then == "die":
            print(json.dumps(saw), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if then == "raise":
            raise KeyboardInterrupt
except BaseException as error:
    saw["raised"] = [type(error).__name__, str(error)]
saw["restored"] = dict(os.environ) == before and signal.getsignal(signal.SIGQUIT) is handler
print(json.dumps(saw), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stand-in package and a user's program."""
    package = tmp_path / "site" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "srt" / "__init__.py").touch()
    (package / "srt" / "server_args.py").write_text(ARGUMENTS)
    (tmp_path / "user.py").write_text(USER)
    return tmp_path


def use(folder: Path, model: str = "m", then: str = "leave") -> dict[str, Any]:
    """Run the user's program and return what it saw."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "site"), root])}
    done = subprocess.run(
        [sys.executable, "user.py", model, then],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip(), done.stderr
    saw: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return saw


def gone(pid: int, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while start_ticks(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_an_engine_is_made_asked_and_ended(folder: Path) -> None:
    """It gets the config's arguments and GPUs, answers from one event loop after the other, and leaves nothing."""
    saw = use(folder)
    assert saw.get("raised") is None, saw
    assert saw["args"] == [32, True]
    assert (saw["env"], saw["version"]) == ("3", "0.5.16")
    assert saw["answers"] == ["hi!", "hi!"]
    assert saw["alive"] is None
    assert saw["restored"]
    assert gone(saw["pid"])
    # Its own way to end would take every child of the user's process with it.
    assert not (folder / "shut-down").exists()
    assert (folder / "watchdog-stopped").exists()


def test_no_secret_is_left_in_the_log(folder: Path) -> None:
    """The engine prints what it was told; afterwards its log does not hold the config's key."""
    saw = use(folder)
    log = (folder / "run" / "server.log").read_text()
    assert "server_args" in log
    assert "a-secret-of-ours" not in log
    assert "a-secret-of-ours" not in saw["described"]


@pytest.mark.parametrize(
    ("then", "how"), [("fail", "a process of the engine failed"), ("kill-worker", "of the engine is gone")]
)
def test_a_failed_worker_is_a_death_and_not_the_users(folder: Path, then: str, how: str) -> None:
    """SIGQUIT, which would have ended the user's own process, is noted; so is a worker that is simply gone."""
    saw = use(folder, then=then)
    assert saw["alive"] is None
    assert how in saw["dead"]
    assert saw["restored"]
    assert gone(saw["pid"])


@pytest.mark.parametrize("then", ["raise", "die"])
def test_nothing_of_an_engine_outlives_its_user(folder: Path, then: str) -> None:
    """Whether the user's block ends by an exception or its process by SIGKILL."""
    assert gone(use(folder, then=then)["pid"])


def test_an_engine_that_does_not_start_says_why(folder: Path) -> None:
    """Its own words, the likely cause and the end of its log."""
    name, message = use(folder, "broken")["raised"]
    assert name == "ServerExited"
    assert "RuntimeError: CUDA out of memory" in message
    assert "likely cause: the device's memory is exhausted" in message
    assert "server_args" in message


def test_an_engine_that_starts_too_slowly_is_ended(folder: Path) -> None:
    """Its processes are killed when its time is up."""
    name, message = use(folder, "slow")["raised"]
    assert name == "ServerNotReady"
    assert "not ready after 2.0 s" in message


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(**{"model_name": "m", "accuracy_threshold": 0.5, "backend": "sglang-offline", **keys})


def test_without_sglang_there_is_a_remedy() -> None:
    """It is known before anything starts."""
    with pytest.raises(ConfigError, match=r"there is no sglang in .*: pip install sglang"):
        check_sglang_offline(config())


def test_a_flag_that_only_a_server_acts_on_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a chat would be answered otherwise than by a server."""
    monkeypatch.syspath_prepend(folder / "site")
    chat = config(use_chat_completions=True, server_args="--chat-template x.jinja")
    with pytest.raises(ConfigError, match="--chat-template has no meaning for backend sglang-offline"):
        check_sglang_offline(chat)
    check_sglang_offline(config(server_args="--chat-template x.jinja"))
