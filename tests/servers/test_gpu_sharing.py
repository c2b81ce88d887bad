"""Runs that compete for pretended GPUs, with real leases and stand-in servers that notice whoever is on their GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trials import eventually

from harness.config import ModelConfig
from harness.errors import ConfigError, ServerExited
from harness.gpus.inventory import Gpu
from harness.gpus.leases import GpuLeases
from harness.gpus.memory import GIB, GpuMemory
from harness.gpus.memory import Holder as MemoryHolder
from harness.gpus.tickets import VARIABLE
from harness.servers.ports import BLOCK
from harness.serving import RunOptions, Serving

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests/faults/faulty_vllm.py"
GPUS = tuple(
    Gpu(
        **dict(kind="cuda", index=n, uuid=f"GPU-{n}aaa", name="NVIDIA H200", memory_total=139 * GIB),
        **dict(arch="9.0", selector=str(n)),
    )
    for n in range(2)
)
CONFIG = """\
model_name: {model}
task: smoke
accuracy_threshold: 0.9
tolerance: 0.0
serve_command: {python} {wrapper} {name} {behaviour} {script} {fault} {{model}} --port {{port}} {{args}}
"""
WRAPPER = '''
"""Holds each GPU that it sees for as long as it lives, notes when another does, and becomes the stand-in."""
import fcntl, json, os, sys, time
from pathlib import Path

name, behaviour, *command = sys.argv[1:]
notes = Path(os.environ["NOTES"])
seen = os.environ.get("CUDA_VISIBLE_DEVICES")
for gpu in seen.split(",") if seen else []:
    file = os.open(notes / f"gpu-{gpu}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if behaviour.startswith("shared") else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        (notes / f"overlap-{gpu}-{name}").touch()
    os.set_inheritable(file, True)
(notes / f"start-{time.time_ns()}-{name}").write_text(
    json.dumps({"name": name, "gpus": seen, "port": os.environ["VLLM_PORT"], "words": command})
)
starts = len(list(notes.glob(f"start-*-{name}")))
if behaviour == "shared-meet":
    while len(list(notes.glob("start-*"))) < 2:
        time.sleep(0.05)
if behaviour in ("disturbed-once", "shared-disturbed-once") and starts == 1 or behaviour == "shared-disturbed":
    sys.exit("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
if behaviour == "slow-start":
    time.sleep(1)
os.execv(sys.executable, [sys.executable, *command])
'''


class Machine:
    """Two pretended GPUs, a folder of leases, and suites that run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.wrapper = folder / "wrapper.py"
        self.wrapper.write_text(WRAPPER)
        self.running: list[subprocess.Popen[str]] = []

    def config(
        self, name: str, *, more: str = "", behaviour: str = "plain", fault: str = "none", model: str = "stand-in-0.5b"
    ) -> str:
        return more + CONFIG.format(
            **dict(python=sys.executable, wrapper=self.wrapper, script=STAND_IN),
            **dict(name=name, behaviour=behaviour, fault=fault, model=model),
        )

    def suite(self, name: str, configs: Mapping[str, str]) -> Path:
        """Make a copy of the suite with its configs."""
        suite = self.folder / name
        (suite / "tests").mkdir(parents=True)
        (suite / "configs").mkdir()
        shutil.copy(ROOT / "conftest.py", suite)
        shutil.copy(ROOT / "tests/test_accuracy.py", suite / "tests")
        (suite / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
        for config_id, text in configs.items():
            (suite / f"configs/{config_id}.yaml").write_text(text)
        (suite / "configs/models-small.txt").write_text("".join(f"{config_id}.yaml\n" for config_id in configs))
        return suite

    def start(self, suite: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--config-list-file=models-small.txt"]
        process = subprocess.Popen(
            [*command, *arguments], cwd=suite, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.append(process)
        return process

    def starts(self) -> list[dict[str, Any]]:
        """Every start of a stand-in, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.notes.glob("start-*")) if path.stat().st_size]

    def overlaps(self) -> list[str]:
        return [path.name for path in self.notes.glob("overlap-*")]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    rows = "".join(f"{gpu.index}, {gpu.uuid}, {139 * 1024}, 9.0, Disabled, {gpu.name}\n" for gpu in GPUS)
    tool = tmp_path / "tools/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(machine.notes))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "leases"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CI", "VLLM_PORT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    yield machine
    for process in machine.running:
        process.kill()
        process.communicate()


def records(suite: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in suite.glob("results/*/*/result.json")]
    return {result["config_id"]: result for result in found}


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def test_runs_that_compete_never_share_a_gpu(machine: Machine) -> None:
    """Two runs with two workers each queue for two GPUs: each server has its own, and one that needs both gets them."""
    suites = [
        machine.suite(
            name,
            {
                "A": machine.config(f"{name}A"),
                "B": machine.config(f"{name}B"),
                "both": machine.config(f"{name}both", more="num_gpus: 2\n"),
                "C": machine.config(f"{name}C"),
                "D": machine.config(f"{name}D"),
            },
        )
        for name in ("first", "second")
    ]
    for process in [machine.start(suite, "-n2") for suite in suites]:
        finished(process)
    assert machine.overlaps() == []
    assert len(machine.starts()) == 10
    assert {len(start["gpus"].split(",")) for start in machine.starts() if start["name"].endswith("both")} == {2}
    assert {start["gpus"] for start in machine.starts() if "both" not in start["name"]} == {"0", "1"}
    for suite in suites:
        leases = {name: result["server"]["lease"] for name, result in records(suite).items()}
        assert sorted(leases["both"]["gpus"]) == [gpu.uuid for gpu in GPUS]
        assert all(lease["share"] is None and lease["neighbours"] == [] for lease in leases.values())
    assert any(lease["server"]["lease"]["seconds_waited"] > 0 for suite in suites for lease in records(suite).values())


def test_a_killed_run_leaves_its_gpus_to_the_other(machine: Machine) -> None:
    """SIGKILL in the middle of an evaluation: the waiting run gets the GPUs once the dead one's servers are gone."""
    slow = machine.config("slow", fault="slow", more="max_concurrency: 1\nnum_gpus: 2\n")
    doomed = machine.start(machine.suite("doomed", {"slow": slow}))
    assert eventually(lambda: any(machine.folder.glob("doomed/results/*/slow/samples.jsonl")))
    suite = machine.suite("waiting", {name: machine.config(name) for name in ("A", "B")})
    waiting = machine.start(suite, "-n2")
    log = re.compile(r"waiting for GPUs: 1 whole GPU among 0, 1: .*pid \d+ \(stand-in-0\.5b, .*slow\) holds GPU 0, 1")
    assert eventually(lambda: any(log.search(path.read_text()) for path in suite.glob("results/*/*/server.log")))
    doomed.kill()
    finished(waiting)
    assert machine.overlaps() == []
    assert {result["verdict"] for result in records(suite).values()} == {"pass"}
    assert all(result["server"]["lease"]["seconds_waited"] > 0 for result in records(suite).values())


def test_a_waiting_run_says_for_whom_it_waits(machine: Machine) -> None:
    """Neither a person at the terminal nor the log of a job leaves in doubt why nothing happens."""
    suite = machine.suite("suite", {"A": machine.config("A")})
    with GpuLeases().lease(GPUS, count=2, what="somebody else"):
        waiting = machine.start(suite, "-s")
        assert eventually(lambda: any("waiting" in log.read_text() for log in suite.glob("results/*/A/server.log")))
    line = rf"waiting for GPUs: 1 whole GPU among 0, 1: pid {os.getpid()} \(somebody else\) holds GPU 0, 1"
    output = finished(waiting)
    assert re.search(line, output), output


def test_shares_of_one_gpu_are_used_at_once(machine: Machine) -> None:
    """Two halves run beside each other on one GPU, with caches and ports of their own; the records tell of both."""
    suite = machine.suite(
        "suite",
        {name: machine.config(name, more="gpu_share: 0.5\n", behaviour="shared-meet") for name in ("A", "B")},
    )
    finished(machine.start(suite, "-n2"))
    starts = machine.starts()
    assert len(starts) == 2
    assert len({start["gpus"] for start in starts}) == 1
    ports = sorted(int(start["port"]) for start in starts)
    assert ports[1] - ports[0] >= BLOCK
    for start in starts:
        words = start["words"]
        assert 40 * GIB < int(words[words.index("--kv-cache-memory-bytes") + 1]) < 70 * GIB
        assert 0.4 < float(words[words.index("--gpu-memory-utilization") + 1]) < 0.5
    stored = [json.loads(path.read_text()) for path in suite.glob("results/*/*/server.json")]
    assert [one["lease"]["share"] for one in stored] == [0.5, 0.5]
    found = records(suite)
    assert {result["server"]["lease"]["share"] for result in found.values()} == {0.5}
    assert any(result["server"]["lease"]["neighbours"] for result in found.values())
    neighbours = [neighbour for one in stored for neighbour in one["lease"]["neighbours"]]
    assert {neighbour["share"] for neighbour in neighbours} == {0.5}
    assert any("stand-in-0.5b" in neighbour["what"] for neighbour in neighbours)


def test_a_share_that_is_too_small_starts_nothing(machine: Machine) -> None:
    """It is a mistake of the config, told before anything starts, with the file's name."""
    suite = machine.suite("suite", {"A": machine.config("A", more="gpu_share: 0.02\n"), "B": machine.config("B")})
    process = machine.start(suite)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 4
    assert re.search(r"A\.yaml: gpu_share: 0\.02 of GPU 0 .* is too small", output), output
    assert machine.starts() == []


# Below, one server in this process.


class FullGpu:
    """A reader of GPUs whose memory is taken, by neighbours."""

    def __init__(self) -> None:
        self.used_bytes = 0

    def used(self, gpu: Gpu) -> int | None:
        self.used_bytes += 20 * GIB
        return self.used_bytes

    def holders(self, gpu: Gpu) -> Sequence[MemoryHolder]:
        return []


def serving(
    machine: Machine, gpus: Sequence[Gpu] = GPUS[:1], *, memory: GpuMemory | None = None, **how: Any
) -> Serving:
    """A server as a run would start it."""
    import yaml

    config = ModelConfig.model_validate(yaml.safe_load(machine.config("one", **how)))
    options = RunOptions(gpus=tuple(gpus), memory=memory or GpuMemory(FullGpu(), wait=0.0))
    return Serving(config, machine.folder / "record/server.log", options)


def test_the_wait_counts_neither_as_start_nor_against_max_seconds(machine: Machine) -> None:
    """A config's time begins when it has its GPUs; the wait is told, with its reason, and recorded for itself."""
    said: list[str] = []
    with serving(machine, more="max_seconds: 30\n") as waits:
        waits.say = said.append
        with GpuLeases().lease(GPUS, count=2, what="somebody"):
            thread = threading.Thread(target=waits.engine)
            thread.start()
            assert eventually(lambda: said)
            time.sleep(1.5)
            released = time.monotonic()
        thread.join()
        engine = waits.engine()
        assert waits.seconds_left() >= 30 - (time.monotonic() - released)
        assert waits.gpu_facts["lease"]["seconds_waited"] >= 1.5
        assert engine.startup_seconds is not None
        assert engine.startup_seconds <= time.monotonic() - released
    assert "(somebody) holds GPU 0" in said[0]
    assert said[-1] == "starting"


def test_a_lease_outlives_the_server_and_ends_with_its_use(machine: Machine) -> None:
    """The GPU is held until the server is stopped, and free then."""
    with serving(machine, gpus=GPUS) as server:
        assert GpuLeases().table() == ()
        server.engine()
        assert [one.ticket.granted is not None for one in GpuLeases().table()] == [True]
        assert server.gpu_names == ["NVIDIA H200"]
    assert GpuLeases().table() == ()
    (start,) = machine.starts()
    assert start["gpus"] == "0"


def test_a_server_that_does_not_start_gives_its_gpus_back(machine: Machine) -> None:
    """Nobody waits for a config that has failed, although its other tasks are still to come."""
    with serving(machine, fault="exits-0") as server:
        for _ in range(2):
            with pytest.raises(ServerExited):
                server.engine()
            assert GpuLeases().table() == ()


def test_too_many_gpus_are_a_mistake(machine: Machine) -> None:
    """A server that wants more than there are is never started on fewer."""
    with serving(machine, more="num_gpus: 2\n") as server, pytest.raises(ConfigError, match="2 GPUs are needed"):
        server.engine()
    assert machine.starts() == []


def test_nothing_is_leased_where_no_gpu_is_known(machine: Machine) -> None:
    """A template may start its server anywhere: it sees whatever it sees, and no lease is recorded."""
    with serving(machine, gpus=(), more="gpu_share: 0.5\n") as server:
        engine = server.engine()
        assert "lease" not in engine.description
        assert GpuLeases().table() == ()
    (start,) = machine.starts()
    assert start["gpus"] is None
    assert "--kv-cache-memory-bytes" not in start["words"]


def test_neighbours_memory_is_not_taken_for_a_leftover(machine: Machine) -> None:
    """On a shared GPU the memory of others comes and goes; on one of its own the same is an outage."""
    memory = GpuMemory(FullGpu(), wait=0.0)
    for _ in range(2):
        with serving(machine, memory=memory, more="gpu_share: 0.5\n", behaviour="shared") as server:
            server.engine()
    told = json.loads((machine.folder / "record/server.json").read_text())
    assert set(told["gpu_memory_bytes"]) == {"before", "after"}


DISTURBED = {
    "a shared GPU": ("gpu_share: 0.5\n", "shared-disturbed-once", 2, None),
    "a shared GPU, again and again": ("gpu_share: 0.5\n", "shared-disturbed", 2, ServerExited),
    "a GPU of its own": ("", "disturbed-once", 1, ServerExited),
}


@pytest.mark.parametrize(("more", "behaviour", "starts", "error"), DISTURBED.values(), ids=DISTURBED)
def test_what_neighbours_do_is_tried_once_more(
    machine: Machine, more: str, behaviour: str, starts: int, error: type[Exception] | None
) -> None:
    """A start that measured its neighbours' memory is repeated once, on a shared GPU alone, and the record says so."""
    with serving(machine, more=more, behaviour=behaviour) as server:
        if error is None:
            assert server.engine().description["started_again"] == [
                "memory profiling counted its neighbours on the GPU"
            ]
        else:
            with pytest.raises(error):
                server.engine()
    assert len(machine.starts()) == starts
    log = (machine.folder / "record/server.log").read_text()
    assert log.count("accuracy-gate: started again: memory profiling counted its neighbours") == starts - 1


def test_a_lost_port_is_told_in_the_log(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a log with two starts learns why there are two."""
    monkeypatch.setenv("ACCURACY_GATE_FAULT_FOLDER", str(machine.folder))
    with serving(machine, fault="port-taken-once") as server:
        server.engine()
    log = (machine.folder / "record/server.log").read_text()
    assert "accuracy-gate: started again: its port was lost: attempt 2 of 3 on others" in log


def test_ports_of_many_servers_never_meet() -> None:
    """Processes that reserve at the same moment get ranges that do not touch, in which an engine may count up."""
    code = (
        "import sys\nfrom harness.servers.ports import PortBlock\nblocks = [PortBlock.reserve() for _ in range(4)]\n"
        "print(*(block.engine_port for block in blocks), flush=True)\nsys.stdin.readline()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    ports: list[int] = []
    for process in processes:
        assert process.stdout is not None
        ports += map(int, process.stdout.readline().split())
    for process in processes:
        process.communicate("\n", timeout=30)
    ports.sort()
    assert len(ports) == 16
    assert all(later - earlier >= BLOCK for earlier, later in pairwise(ports))
