"""A server's process that is started ahead: it waits without a GPU, becomes the server, or is gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from trials import FAKE, KEY, QUICK, eventually, is_gone

from harness.ahead import SPARE_BYTES, Ahead
from harness.config import ModelConfig
from harness.gpus.inventory import Gpu
from harness.servers.compile_caches import compile_caches
from harness.servers.leftovers import VARIABLE
from harness.servers.ports import PortBlock
from harness.servers.prestart import Prestarted, why_not
from harness.servers.process import ServerProcess, ServerSpec, start_with_retry
from harness.servers.vllm import base_environment, environment

IMPORTED = """
import json, os, sys, time
from pathlib import Path
folder = Path(os.environ["STAND_IN"])
print("importing", flush=True)
with (folder / "imports").open("a") as file:
    print(json.dumps({"pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}), file=file)
while (folder / "hold").exists():
    time.sleep(0.01)
if os.environ.get("FAULT") == "raises" and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    raise RuntimeError("no GPU to be seen")
if os.environ.get("FAULT") == "exits" and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    sys.exit(5)
if os.environ.get("FAULT") == "changes":
    os.environ["LEFT_BY_IMPORT"] = "1"
"""
MAIN = f"""
import json, multiprocessing, os, runpy, sys
from pathlib import Path

def engine(path):
    main = sys.modules["__mp_main__"]
    Path(path).write_text(json.dumps({{"main": main.__file__, "env": dict(os.environ)}}))

def main():
    folder = Path(os.environ["STAND_IN"])
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(str(folder / "engine"),))
    process.start()
    process.join()
    saw = {{"pid": os.getpid(), "argv": sys.argv, "path": sys.path[0], "env": dict(os.environ)}}
    (folder / "served").write_text(json.dumps(saw))
    print("serving", flush=True)
    port = sys.argv[sys.argv.index("--port") + 1]
    sys.argv = ["fake", "--port", port, "--key", os.environ["VLLM_API_KEY"]]
    runpy.run_path({str(FAKE)!r}, run_name="__main__")
"""
COMMAND = f"""#!{sys.executable}
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""


class Installed:
    """A stand-in for an installed vLLM, and what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "site/vllm"
        (package / "entrypoints/cli").mkdir(parents=True)
        for part in ("entrypoints", "entrypoints/cli"):
            (package / part / "__init__.py").touch()
        (package / "__init__.py").write_text(IMPORTED)
        (package / "entrypoints/cli/main.py").write_text(MAIN)
        (package / "entrypoints/cli/serve.py").touch()
        self.command = folder / "bin/vllm"
        self.command.parent.mkdir()
        self.command.write_text(COMMAND)
        self.command.chmod(0o755)

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder / "site"), "STAND_IN": str(self.folder), **more}

    def prestarted(self, **more: str) -> Prestarted:
        return Prestarted(str(self.command), self.env(**more), run_id="run", stop_seconds=QUICK)

    def spec(self, ports: PortBlock, **more: str) -> ServerSpec:
        late = {"CUDA_VISIBLE_DEVICES": "3", "VLLM_PORT": str(ports.engine_port), "VLLM_API_KEY": KEY}
        return ServerSpec(
            argv=(str(self.command), "serve", "m", "--port", str(ports.port)),
            env=self.env(**late, **more),
            log_path=self.folder / "record" / "server.log",
            base_url=f"http://127.0.0.1:{ports.port}",
            served_model="tiny",
            api_key=KEY,
            startup_seconds=30.0,
        )

    def saw(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    def imports(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.folder / "imports").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def log(self) -> str:
        return (self.folder / "record" / "server.log").read_text()


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


@pytest.fixture
def ports() -> Iterator[PortBlock]:
    with PortBlock.reserve() as block:
        yield block


def serve(spec: ServerSpec, ahead: Prestarted) -> ServerProcess:
    return ServerProcess(spec, stop_seconds=QUICK, started_ahead=ahead.take)


def test_it_becomes_the_server_without_importing_again(installed: Installed, ports: PortBlock) -> None:
    """The process that waited serves, with the order's arguments, key and GPU, of which its imports saw none."""
    ahead = installed.prestarted(FAULT="changes")
    assert ahead.wait(30)
    with serve(installed.spec(ports, FAULT="changes"), ahead) as server:
        served, engine = installed.saw("served"), installed.saw("engine")
        assert (served["pid"], server.pid) == (ahead.pid, ahead.pid)
        assert served["argv"] == list(server.spec.argv)
        late = {name: served["env"][name] for name in ("CUDA_VISIBLE_DEVICES", "VLLM_API_KEY", "VLLM_PORT")}
        assert late == {"CUDA_VISIBLE_DEVICES": "3", "VLLM_API_KEY": KEY, "VLLM_PORT": str(ports.engine_port)}
        assert engine["env"]["CUDA_VISIBLE_DEVICES"] == "3"
        assert [seen["gpus"] for seen in installed.imports() if seen["pid"] == server.pid] == [""]
        assert served["env"]["LEFT_BY_IMPORT"] == "1"
    assert ahead.note is None
    assert is_gone(served["pid"])


def test_its_engine_runs_the_main_file_of_the_plain_command(installed: Installed, ports: PortBlock) -> None:
    """A spawned engine begins as under `vllm serve` itself: it neither waits for an order nor finds our modules."""
    with serve(installed.spec(ports), installed.prestarted()):
        assert installed.saw("engine")["main"] == str(installed.command)
        assert installed.saw("served")["path"] == str(installed.command.parent)


def test_the_log_holds_all_that_it_printed(installed: Installed, ports: PortBlock) -> None:
    """What was printed before there was a log stands in it once, in order."""
    ahead = installed.prestarted()
    assert eventually(installed.imports)
    with serve(installed.spec(ports), ahead):
        lines = installed.log().splitlines()
    assert lines[0] == "importing"
    assert "serving" in lines[1:]
    assert "anew" not in installed.log()


def test_an_order_may_come_before_the_imports_are_over(installed: Installed, ports: PortBlock) -> None:
    """A lease that is granted early costs nothing: the order waits for the imports, and nobody else does."""
    (installed.folder / "hold").touch()
    ahead = installed.prestarted()
    assert eventually(installed.imports)
    spec = installed.spec(ports)
    spec.log_path.parent.mkdir()
    child = ahead.take(spec)
    assert child is not None
    try:
        assert not (installed.folder / "served").exists()
        (installed.folder / "hold").unlink()
        assert eventually(lambda: (installed.folder / "served").exists())
    finally:
        child.stop()


PLAIN = {
    "an import raises": ({"FAULT": "raises"}, {"FAULT": "raises"}, "RuntimeError: no GPU to be seen"),
    "an import exits": ({"FAULT": "exits"}, {"FAULT": "exits"}, "SystemExit: 5"),
    "a variable has changed": ({"HF_HOME": "/a"}, {"HF_HOME": "/b"}, "HF_HOME is not what it was"),
    "a variable is new": ({}, {"HF_HOME": "/b"}, "HF_HOME is not what it was"),
    "a variable has gone": ({"HF_HOME": "/a"}, {}, "HF_HOME is not what it was"),
}


@pytest.mark.parametrize(("before", "after", "why"), PLAIN.values(), ids=PLAIN)
def test_what_cannot_serve_as_it_is_starts_plainly(
    installed: Installed, ports: PortBlock, before: dict[str, str], after: dict[str, str], why: str
) -> None:
    """Where the imports failed or may have read what no longer holds, the plain command runs in its place."""
    ahead = installed.prestarted(**before)
    with serve(installed.spec(ports, **after), ahead) as server:
        served = installed.saw("served")
        assert (served["pid"], ahead.note) == (server.pid, None)
        assert served["env"].get("HF_HOME") == after.get("HF_HOME")
        assert [seen["gpus"] for seen in installed.imports() if seen["pid"] == server.pid] == ["", "3"]
        assert why in installed.log()
        assert VARIABLE in psutil.Process(server.pid).environ()


def test_one_that_is_dead_is_replaced(installed: Installed, ports: PortBlock) -> None:
    """Where the process was killed meanwhile the server is started as ever, and a note says so."""
    ahead = installed.prestarted()
    assert eventually(installed.imports)
    assert ahead.pid is not None
    os.kill(ahead.pid, signal.SIGKILL)
    assert eventually(lambda: is_gone(ahead.pid))
    server = start_with_retry(installed.spec, stop_seconds=QUICK, started_ahead=ahead.take)
    try:
        assert server.pid != ahead.pid
        assert installed.saw("served")["pid"] == server.pid
        assert ahead.note is not None
        assert "could not be used" in ahead.note
        assert ahead.note.endswith("it last printed: importing")
    finally:
        server.stop()
    ahead.discard()


@pytest.mark.parametrize("importing", [True, False], ids=["during the imports", "when it waits"])
def test_one_that_is_not_needed_leaves_nothing(installed: Installed, importing: bool) -> None:
    """Discarding ends it at once, in whatever it does, and leaves neither process nor file nor descriptor."""
    before, opened = set(installed.folder.rglob("*")), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if importing:
        (installed.folder / "hold").touch()
    ahead = installed.prestarted(PYTHONDONTWRITEBYTECODE="1")
    assert eventually(installed.imports)
    assert ahead.wait(0.01 if importing else 30) is not importing
    pid = ahead.pid
    assert pid is not None
    ahead.discard()
    ahead.discard()
    assert is_gone(pid)
    mine = {installed.folder / "hold", installed.folder / "imports"}
    assert set(installed.folder.rglob("*")) - mine == before
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208


HARNESS = """
import os, sys
sys.path[:0] = {path!r}
from harness.servers.prestart import Prestarted
ahead = Prestarted({command!r}, dict(os.environ), run_id="run")
print(ahead.pid or "", flush=True)
sys.stdin.read()
"""


def test_it_does_not_outlive_the_harness(installed: Installed) -> None:
    """A harness that is killed takes it along; until then the mark in its environment finds it."""
    program = HARNESS.format(path=sys.path, command=str(installed.command))
    harness = subprocess.Popen(
        [sys.executable, "-c", program], env=installed.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with harness:
        assert eventually(installed.imports)
        pid = installed.imports()[0]["pid"]
        assert psutil.Process(pid).environ()[VARIABLE].startswith("run:")
        harness.kill()
    assert eventually(lambda: is_gone(pid))


def test_a_stranger_is_not_told_the_key(installed: Installed, ports: PortBlock) -> None:
    """Whoever else calls is hung up on, for any process may: the order goes to the launcher alone."""
    ahead = installed.prestarted()
    with socket.socket(socket.AF_UNIX) as stranger:
        # Sooner than a Python can start: this call is answered before the launcher's.
        stranger.connect(ahead._calls.getsockname())
        with serve(installed.spec(ports), ahead):
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
            assert installed.saw("served")["env"]["VLLM_API_KEY"] == KEY
    assert ahead.note is None


def gpu(kind: str = "cuda", name: str = "NVIDIA H200") -> Gpu:
    return Gpu(kind=kind, index=0, uuid="GPU-a", name=name, memory_total=1, arch="9.0", selector="0")  # type: ignore[arg-type]


REFUSED = {
    "another backend": ({"backend": "transformers"}, {}, "backend transformers"),
    "a template of its own": ({"serve_command": "ssh there {model} {port} {args}"}, {}, "serve_command"),
    "a template for all": ({}, {"serve_command": "docker run {args}"}, "serve_command"),
    "AMD": ({}, {"gpus": [gpu("rocm")]}, "NVIDIA"),
    "unlike GPUs": ({}, {"gpus": [gpu(), gpu(name="NVIDIA L4")]}, "several kinds"),
}


@pytest.mark.parametrize(("config", "options", "says"), REFUSED.values(), ids=REFUSED)
def test_only_plain_vllm_is_started_ahead(config: dict[str, Any], options: dict[str, Any], says: str) -> None:
    """Where imports before the lease could go wrong, or are not ours, nothing is started ahead, and why is said."""
    asked: dict[str, Any] = {"serve_command": None, "gpus": [], **options}
    reason = why_not(ModelConfig(model_name="m", accuracy_threshold=0.5, **config), **asked)
    assert reason is not None
    assert says in reason


@pytest.fixture
def ahead(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    """One whose `vllm` is the stand-in, on a machine with memory to spare."""
    monkeypatch.setattr("harness.ahead.own_vllm", lambda: str(installed.command))
    monkeypatch.setattr("harness.servers.prestart.own_vllm", lambda: str(installed.command))
    monkeypatch.setattr("harness.ahead.memory_for_cache", lambda: 2 * SPARE_BYTES)
    for name, value in {"PYTHONPATH": str(installed.folder / "site"), "STAND_IN": str(installed.folder)}.items():
        monkeypatch.setenv(name, value)
    one = Ahead(prestart=True)
    yield one
    one.stop()


def config(**env: str) -> ModelConfig:
    return ModelConfig(model_name="m", accuracy_threshold=0.5, env=env)


def server_spec(installed: Installed, ports: PortBlock, of: ModelConfig) -> ServerSpec:
    env = {**environment(of, base_environment(), KEY, ports.engine_port), "CUDA_VISIBLE_DEVICES": "3"}
    return replace(installed.spec(ports), env=env)


def test_the_next_config_takes_what_was_started_for_it(ahead: Ahead, installed: Installed, ports: PortBlock) -> None:
    """One process waits, however often that is asked for; the next server is made of it, and another begins."""
    ahead.follow([config()], more=True)
    ahead.asking(config(), serve_command=None, gpus=())
    ahead.ready_for(config(), serve_command=None, gpus=())
    assert ahead.await_imports(30)
    spec = server_spec(installed, ports, config())
    with ServerProcess(spec, stop_seconds=QUICK, started_ahead=ahead.take) as server:
        assert ahead.await_imports(30), "its imports are over, and so those of the next may begin"
        waited = [seen["pid"] for seen in installed.imports() if seen["gpus"] == ""]
        assert waited[0] == server.pid
        assert len(waited) == 2
    assert ahead.facts() == {}


def test_the_last_server_starts_nothing_more(ahead: Ahead, installed: Installed, ports: PortBlock) -> None:
    """A process that nobody will take is not started."""
    ahead.follow([], more=False)
    ahead.ready_for(config(), serve_command=None, gpus=())
    assert ahead.await_imports(30)
    with ServerProcess(server_spec(installed, ports, config()), stop_seconds=QUICK, started_ahead=ahead.take):
        assert not ahead.await_imports(0)


def test_a_config_with_other_variables_does_not_take_it(ahead: Ahead, installed: Installed, ports: PortBlock) -> None:
    """What was imported under other variables is left for a config that it suits."""
    ahead.ready_for(config(HF_HOME="/a"), serve_command=None, gpus=())
    assert ahead.take(server_spec(installed, ports, config(HF_HOME="/b"))) is None
    spec = server_spec(installed, ports, config(HF_HOME="/a"))
    spec.log_path.parent.mkdir()
    child = ahead.take(spec)
    assert child is not None
    child.stop()


def test_nothing_is_started_for_a_list_that_is_over(ahead: Ahead) -> None:
    """While the last config is asked there is nothing to prepare."""
    ahead.follow([], more=False)
    ahead.asking(config(), serve_command=None, gpus=())
    assert not ahead.await_imports(0)
    assert ahead.facts() == {}


def test_without_memory_nothing_is_started_ahead(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits must not take what the server that is asked may need; the record says so once."""
    monkeypatch.setattr("harness.ahead.memory_for_cache", lambda: SPARE_BYTES // 2)
    ahead.follow([config()], more=True)
    for _ in range(2):
        ahead.asking(config(), serve_command=None, gpus=())
    assert not ahead.await_imports(0)
    assert ahead.facts() == {"notes": ["no server was started ahead: 1.0 GiB of memory may be used"]}


def test_stopping_ends_what_waits(ahead: Ahead, installed: Installed) -> None:
    """After -x or an interruption the process that nobody will take is gone."""
    ahead.ready_for(config(), serve_command=None, gpus=())
    assert ahead.await_imports(30)
    ahead.stop()
    assert is_gone(installed.imports()[0]["pid"])


def test_compiled_kernels_are_kept_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cache has a stable folder below ours, but for those that a variable names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "accuracy-gate/compile"
    assert compile_caches({"TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": ""}) == {
        "VLLM_CACHE_ROOT": str(root / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
    }
