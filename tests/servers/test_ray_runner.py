"""`accuracy-gate run --on ray` against a real Ray cluster of pretended nodes, with stand-in servers on each."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config_lists import load_lists
from harness.errors import ConfigError
from harness.on_ray.node import Shipping, scratch_folder
from harness.on_ray.orders import Order, Piece, check_version, order_for
from harness.on_ray.results import ArrivingRecord
from harness.records import RunRecord
from harness.serving import RunOptions

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = Path(__file__).with_name("fake_ray_cluster.py")
COMMAND = """\
import argparse, sys
from harness.commands import run_command
from harness.errors import ConfigError
parser = argparse.ArgumentParser()
run_command.add_options(parser)
try:
    sys.exit(run_command.run(parser.parse_args()))
except ConfigError as error:
    print(f"ERROR: {error}")
    sys.exit(4)
"""
CONFIG = f"""\
model_name: stand-in
task: smoke
accuracy_threshold: 0.9
tolerance: 0.0
max_concurrency: 4
serve_command: {sys.executable} {ROOT / "tests/faults/faulty_vllm.py"} FAULT {{model}} --port {{port}} {{args}}
"""
PATIENCE = 90.0
MARK = "ACCURACY_GATE_TEST"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'accuracy-gate[ray]'"
)


def config(fault: str = "none", more: str = "") -> str:
    return CONFIG.replace("FAULT", fault) + more


def wait_until(true: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.05)


@dataclass
class RayCluster:
    """The cluster's process, and what its nodes run."""

    process: subprocess.Popen[str]
    address: str
    mark: str

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) != "done\n":
            assert line, "the cluster is gone"

    def servers(self) -> list[psutil.Process]:
        """Every living process of a server, or of an evaluation, on any node."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.environ().get(MARK) != self.mark or process.status() == psutil.STATUS_ZOMBIE:
                return False
            return "ACCURACY_GATE_SERVER" in process.environ() or "harness.on_ray.evaluation" in process.cmdline()
        except psutil.Error:
            return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes with two GPUs each."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(CLUSTER), "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, MARK: mark},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        words: list[str] = []
        while words[:1] != ["address"]:
            line = process.stdout.readline()
            assert line, "the cluster did not start"
            words = line.split()
        yield RayCluster(process=process, address=words[1], mark=mark)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@dataclass
class Driver:
    """`accuracy-gate run` in a process of its own; its lines are read as they come."""

    process: subprocess.Popen[str]
    results: Path
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(line.rstrip("\n") for line in lines)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def await_line(self, beginning: str) -> str:
        """Wait for a line, and return what follows in it."""

        def found() -> list[str]:
            assert self.process.poll() is None or any(line.startswith(beginning) for line in self.lines), self.output
            return [line.removeprefix(beginning) for line in list(self.lines) if line.startswith(beginning)]

        wait_until(found, beginning)
        return found()[-1]

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    @property
    def record(self) -> Path:
        return next(self.results.glob("*/run.json")).parent

    def run_json(self) -> dict[str, Any]:
        run: dict[str, Any] = json.loads((self.record / "run.json").read_text())
        return run

    def result(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.record / name / "result.json").read_text())
        return result

    def rows(self) -> list[dict[str, Any]]:
        """What the report says of each config, less how fast it was."""
        kept = ("config_id", "verdict", "accuracy", "low", "high", "floor", "graded", "unanswered", "truncated")
        return [
            {name: row[name] for name in (*kept, "errors", "correct_by_scorer")} for row in self.run_json()["configs"]
        ]


def start(folder: Path, configs: dict[str, str], *options: str) -> Driver:
    for name, text in configs.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "list.txt").write_text("".join(f"{name}.yaml\n" for name in configs))
    results = folder / f"results-{uuid.uuid4().hex[:4]}"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder / "list.txt"), f"--results-dir={results}", *options],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Driver(process=process, results=results)


def on(cluster: RayCluster) -> tuple[str, ...]:
    return "--on=ray", f"--address={cluster.address}"


TWO_TASKS = "tasks:\n  - {task: smoke}\n  - {name: short, task: smoke, num_questions: 5}\n"
SHARED = "gpu_share: 0.5\nserver_args: --kv-cache-memory-bytes 1000000000 --gpu-memory-utilization 0.4\n"
TWELVE = {
    "slow": config("slow"),
    "worse": config("wrong-answers"),
    "out": config("exits-0"),
    "cut": config("cut-off"),
    "shared": config(more=SHARED),
    "wide": config(more="server_args: --tensor-parallel-size 2\n"),
    "tasks": config(more=TWO_TASKS),
    **{f"good{n}": config() for n in range(5)},
}


@needs_ray
def test_a_cluster_that_loses_a_node_reports_what_one_machine_reports(cluster: RayCluster, tmp_path: Path) -> None:
    """Twelve configs on three nodes, one of which goes half-way, come to the verdicts and counts of a plain run."""
    spread = start(tmp_path, TWELVE, *on(cluster))
    node = spread.await_line("slow: on node ").split()[0]
    wait_until(lambda: list(spread.results.glob("*/slow/samples.jsonl")), "samples arrive while questions are asked")
    cluster.tell(f"remove {node}")
    assert spread.end() == 1, spread.output
    wait_until(lambda: not cluster.servers(), "no server is left, on the lost node either")

    plain = start(tmp_path, TWELVE, "--on=local")
    assert plain.end() == 1, plain.output
    assert len(plain.rows()) == 13
    assert spread.rows() == plain.rows()
    assert spread.run_json()["skipped"] == plain.run_json()["skipped"]
    ray = spread.result("slow")["server"]["ray"]
    assert (ray["attempt"], ray["attempts"]) == (2, 2)
    assert f"attempt 1: node {node}" in ray["lost"][0]
    assert not ray["node"].startswith(node)
    first = (spread.record / "slow" / "attempt-1.samples.jsonl").read_bytes()
    assert 0 < first.count(b"\n") < 20
    cluster.tell("add 2")


@needs_ray
def test_a_server_gets_the_gpus_that_ray_gave(cluster: RayCluster, tmp_path: Path) -> None:
    """Its lease holds exactly the GPUs of its Ray task, on the node that the record names."""
    configs = {"one": config(), "two": config(more="num_gpus: 2\n")}
    driver = start(tmp_path, configs, *on(cluster))
    assert driver.end() == 0, driver.output
    for name, count in (("one", 1), ("two", 2)):
        server = driver.result(name)["server"]
        assert len(server["ray"]["gpus"]) == count
        assert [uuid[-1] for uuid in server["lease"]["gpus"]] == server["ray"]["gpus"]
        assert server["gpus"] == ["NVIDIA H100"] * count
    assert driver.run_json()["platform"] == "cuda 9.0"


@needs_ray
def test_a_large_log_comes_back_whole(cluster: RayCluster, tmp_path: Path) -> None:
    """100 MiB, more than a node's object store holds, arrive in pieces."""
    driver = start(tmp_path, {"flood": config("log-flood")}, *on(cluster))
    assert driver.end() == 0, driver.output
    assert (driver.record / "flood" / "server.log").stat().st_size >= 100 * 1024**2


@needs_ray
def test_cancelling_stops_every_server_and_keeps_what_came(cluster: RayCluster, tmp_path: Path) -> None:
    """SIGTERM to the driver ends the servers on the nodes; samples stay, and each config says that it was cut short."""
    configs = {"first": config("slow"), "second": config("ignores-sigterm"), "third": config("slow")}
    driver = start(tmp_path, configs, *on(cluster))
    wait_until(lambda: list(driver.results.glob("*/first/samples.jsonl")), "samples arrive while questions are asked")
    assert cluster.servers()
    driver.process.send_signal(signal.SIGTERM)
    assert driver.end() == 2, driver.output
    wait_until(lambda: not cluster.servers(), "no server is left")
    result = driver.result("first")
    assert (result["verdict"], result["reason"]) == ("infrastructure", "interrupted: SIGTERM")
    samples = (driver.record / "first" / "samples.jsonl").read_bytes()
    assert result["counts"]["asked"] == samples.count(b"\n") > 0
    assert driver.run_json()["exit_code"] == 2
    assert driver.run_json()["finished"]


@needs_ray
def test_a_killed_driver_leaves_no_server(cluster: RayCluster, tmp_path: Path) -> None:
    """Where the driver has no time for anything, Ray ends its workers and they their servers."""
    driver = start(tmp_path, {"slow": config("slow")}, *on(cluster))
    driver.await_line("slow: asking")
    assert cluster.servers()
    driver.process.kill()
    driver.end()
    wait_until(lambda: not cluster.servers(), "no server is left")


@needs_ray
def test_a_preempted_config_is_tried_again(cluster: RayCluster, tmp_path: Path) -> None:
    """SIGTERM on a node that nobody here asked for is the node's end: the config runs again, and says so."""
    driver = start(tmp_path, {"slow": config("slow")}, *on(cluster))
    driver.await_line("slow: asking")
    (evaluation,) = (process for process in cluster.servers() if "harness.on_ray.evaluation" in process.cmdline())
    evaluation.terminate()
    assert driver.end() == 0, driver.output
    ray = driver.result("slow")["server"]["ray"]
    assert ray["attempt"] == 2
    assert "was preempted (interrupted: SIGTERM)" in ray["lost"][0]


@needs_ray
def test_the_loss_of_the_only_fitting_node_is_not_waited_out(cluster: RayCluster, tmp_path: Path) -> None:
    """A second attempt that no node left can take ends as an outage that tells both."""
    cluster.tell("add 3")
    driver = start(tmp_path, {"slow": config("slow", "num_gpus: 3\n")}, *on(cluster))
    node = driver.await_line("slow: on node ").split()[0]
    driver.await_line("slow: asking")
    cluster.tell(f"remove {node}")
    assert driver.end() == 75, driver.output
    reason = driver.result("slow")["reason"]
    assert "needs 3 GPUs" in reason
    assert f"node {node}" in reason


@needs_ray
def test_what_no_node_can_run_is_not_waited_for(cluster: RayCluster, tmp_path: Path) -> None:
    """A config for more GPUs than any node has is skipped with both numbers; --require-gpus makes it an outage."""
    configs = {"big": config(more="num_gpus: 4\n")}
    driver = start(tmp_path, configs, *on(cluster))
    assert driver.end() == 0, driver.output
    assert re.fullmatch(r"needs 4 GPUs, the largest of \d nodes has 2", driver.run_json()["skipped"]["big"])
    required = start(tmp_path, configs, "--require-gpus", *on(cluster))
    assert required.end() == 75, required.output
    assert "needs 4 GPUs" in required.result("big")["reason"]


@needs_ray
def test_a_server_over_several_nodes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The reason is told without a cluster being asked, as a mistake in the config."""
    several = config(more="server_args: --tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2\n")
    driver = start(tmp_path, {"several": several}, "--on=ray", "--address=127.0.0.1:1")
    assert driver.end() == 4
    assert "several.yaml: needs 8 GPUs of other machines" in driver.output
    assert not driver.results.exists()


def test_another_version_on_a_node_is_an_error_that_says_so() -> None:
    """A node must ask and grade as the driver would."""
    order = Order(ids=(), list_name="list.txt", files={}, options={})
    check_version(order)
    with pytest.raises(ConfigError, match=r"this node runs accuracy-gate .*, the driver 0\.0\.7"):
        check_version(replace(order, harness_version="0.0.7"))


def test_an_order_holds_every_file_that_a_config_names(tmp_path: Path) -> None:
    """A node that shares no file system reads the same config, under the same id, with its own questions."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/own.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (tmp_path / "lists/deep").mkdir(parents=True)
    named = "dataset: ../../data/own.jsonl\nnum_fewshot: 0\n"
    (tmp_path / "lists/deep/own.yaml").write_text(config().replace("task: smoke\n", named))
    (tmp_path / "lists/list.txt").write_text("deep/own.yaml\n")
    listed = load_lists([tmp_path / "lists/list.txt"])
    order = order_for(listed, RunOptions())
    for name, content in order.files.items():
        (tmp_path / "node" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "node" / name).write_bytes(content)
    (there,) = load_lists([tmp_path / "node" / order.list_name])
    assert there.id == listed[0].id == "deep/own"
    assert there.config.dataset is not None
    assert (there.path.parent / there.config.dataset).read_text() == (tmp_path / "data/own.jsonl").read_text()


def test_a_killed_workers_folder_is_removed_by_the_next_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that serves for months does not fill up; folders of orders under way stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = tmp_path / "accuracy-gate-node-dead"
    (dead / "record").mkdir(parents=True)
    (dead / "lock").touch()
    with scratch_folder() as mine, scratch_folder() as another:
        assert not dead.exists()
        assert mine.is_dir()
        assert another.is_dir()
    assert not list(tmp_path.iterdir())


def test_files_arrive_as_they_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples come in pieces of bounded size while they are written; a result is there whole or not at all."""
    monkeypatch.setattr("harness.on_ray.node.CHUNK_BYTES", 5)
    written, shipping = tmp_path / "record" / "a", Shipping(tmp_path)
    written.mkdir(parents=True)
    arriving = ArrivingRecord(RunRecord(tmp_path / "driver"))
    arrived = tmp_path / "driver" / "a"
    for line in (b"first line\n", b"second\n"):
        with (written / "samples.jsonl").open("ab") as samples:
            samples.write(line)
        pieces = [event for event in shipping.news() if isinstance(event, Piece)]
        assert max(len(piece.data) for piece in pieces) == 5
        for piece in pieces:
            arriving.take(piece)
        assert (arrived / "samples.jsonl").read_bytes() == (written / "samples.jsonl").read_bytes()
    (written / "result.json").write_text('{"verdict": "pass"}')
    for event in shipping.news():
        assert isinstance(event, Piece)
        assert not (arrived / "result.json").exists()
        arriving.take(event)
    assert (arrived / "result.json").read_text() == '{"verdict": "pass"}'
    assert not list(shipping.news())
