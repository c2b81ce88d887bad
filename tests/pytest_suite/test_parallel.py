"""Several configs at once with pytest-xdist: which worker runs which, and that nothing else changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "faults/faulty_vllm.py"
LIST = "--config-list-file=models-small.txt"
PATIENCE = 60.0
CONFIG = """\
model_name: stand-in
task: smoke
accuracy_threshold: 0.9
tolerance: 0.0
serve_command: {python} {wrapper} {behaviour} {name} {script} {fault} {{model}} --port {{port}} {{args}}
"""
TASKS = "tasks:\n" + "".join(
    f"  - {{name: {name}, task: smoke, num_questions: 4}}\n" for name in ("one", "two", "three")
)
WRAPPER = '''
"""Notes which worker starts a stand-in, behaves as told, and becomes the stand-in."""
import os, sys, time
from pathlib import Path
import psutil

behaviour, name, *command = sys.argv[1:]
notes = Path(os.environ["NOTES"])
(notes / f"{time.time_ns()}-{name}-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}").touch()
if behaviour == "kill-worker":
    # The parent is the supervisor, and its parent the process that runs the tests.
    psutil.Process().parent().parent().kill()
    time.sleep(60)
if behaviour == "meet":
    deadline = time.monotonic() + 40
    while len(list(notes.iterdir())) < 2:
        if time.monotonic() > deadline:
            sys.exit("nobody else was started meanwhile")
        time.sleep(0.05)
if behaviour == "outlast":
    deadline = time.monotonic() + 40
    while len(list(notes.iterdir())) < int(os.environ["OUTLAST"]):
        if time.monotonic() > deadline:
            sys.exit("the others waited for this one")
        time.sleep(0.05)
os.execv(sys.executable, [sys.executable, *command])
'''


class Parallel:
    """The mini suite on stand-ins that note who starts them."""

    def __init__(self, mini_suite: Any, notes: Path) -> None:
        self.suite = mini_suite
        self.notes = notes
        self.wrapper = mini_suite.path / "wrapper.py"
        self.wrapper.write_text(WRAPPER)

    def add(self, name: str, more: str = "", *, fault: str = "none", behaviour: str = "plain") -> None:
        text = CONFIG.format(
            python=sys.executable, wrapper=self.wrapper, behaviour=behaviour, name=name, script=STAND_IN, fault=fault
        )
        (self.suite.path / f"configs/{name}.yaml").write_text(text + more)

    def starts(self) -> list[tuple[str, str]]:
        """The servers in the order of their starts: name and worker."""
        parts = (path.name.split("-") for path in sorted(self.notes.iterdir(), key=lambda path: path.name))
        return [(name, worker) for _, name, worker in parts]

    def forget(self) -> None:
        for path in self.notes.iterdir():
            path.unlink()

    def remember(self, **seconds: float) -> None:
        """Write how long configs took on this machine before."""
        rows = [
            {
                **dict(config_id=name, task="smoke", backend="vllm", gpu="cpu"),
                "runs": [{"startup": 0.0, "asking": took, "questions": 20}],
            }
            for name, took in seconds.items()
        ]
        path = self.suite.path / ".accuracy-gate/durations.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"schema": 1, "durations": rows}))

    def durations(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        stored = json.loads((self.suite.path / ".accuracy-gate/durations.json").read_text())
        return {(row["config_id"], row["task"]): row["runs"] for row in stored["durations"]}


@pytest.fixture
def parallel(mini_suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parallel:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("ACCURACY_GATE_LEASES", str(tmp_path / "leases"))
    return Parallel(mini_suite, notes)


def six(parallel: Parallel) -> None:
    """Six configs of all kinds: one passes, one has tasks, one got worse, one cannot start, two are skipped."""
    parallel.add("good")
    parallel.add("tasks", TASKS)
    parallel.add("worse", fault="wrong-answers")
    parallel.add("broken", fault="exits-0")
    parallel.add("skipped", "skip: [{when: cpu, reason: not here}]\n")
    parallel.add("elsewhere", "platforms: tpu\n")
    parallel.suite.list("good", "tasks", "worse", "broken", "skipped", "elsewhere")


def verdicts(suite: Any) -> list[tuple[Any, ...]]:
    rows = suite.run_json()["configs"]
    return [(row["config_id"], row["verdict"], row["accuracy"], row["graded"], row["errors"]) for row in rows]


def files(suite: Any) -> set[str]:
    folder = suite.records()[-1]
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_workers_change_neither_records_nor_verdicts(parallel: Parallel) -> None:
    """Six configs give the same files, rows, outcomes and exit code with two workers and without."""
    six(parallel)
    seen = []
    for arguments in ([], ["-n2"]):
        result = parallel.suite.run(LIST, *arguments)
        seen.append((verdicts(parallel.suite), files(parallel.suite), result.parseoutcomes(), result.ret))
    outcomes = [{key: n for key, n in one[2].items() if key in ("passed", "failed", "skipped")} for one in seen]
    assert seen[0][0] == seen[1][0]
    assert [row[:2] for row in seen[0][0]] == [
        ("broken", "infrastructure"),
        ("good", "pass"),
        *((f"tasks:{name}", "pass") for name in ("one", "three", "two")),
        ("worse", "regression"),
    ]
    assert seen[0][1] == seen[1][1]
    assert outcomes == [{"passed": 4, "failed": 2, "skipped": 2}] * 2
    assert seen[0][3] == seen[1][3] == 1


@pytest.mark.parametrize("arguments", [["-n2"], ["-n2", "--dist=loadgroup"], ["-n2", "--dist=worksteal"]], ids=" ".join)
def test_the_tasks_of_a_config_stay_together(parallel: Parallel, arguments: list[str]) -> None:
    """All tasks of a server run on one worker, which starts it once, whatever --dist says."""
    names = ["A", "B", "C"]
    for name in names:
        parallel.add(name, TASKS)
    parallel.suite.list(*names)
    result = parallel.suite.run(LIST, *arguments)
    result.assert_outcomes(passed=9)
    assert sorted(name for name, _ in parallel.starts()) == names
    assert len({worker for _, worker in parallel.starts()}) == 2


def test_two_run_at_once_where_there_are_no_gpus(parallel: Parallel) -> None:
    """On a CPU each of two workers starts a server and neither waits for the other to end."""
    for name in ("A", "B"):
        parallel.add(name, behaviour="meet")
    parallel.suite.list("A", "B")
    result = parallel.suite.run(LIST, "-n2")
    result.assert_outcomes(passed=2)
    assert "lease" not in parallel.suite.result("A")["server"]


def test_the_longest_are_started_first(parallel: Parallel) -> None:
    """By what earlier runs measured, not by the list; without workers the list's order stays."""
    names = ["A", "B", "C", "D"]
    for name in names:
        parallel.add(name)
    parallel.suite.list(*names)
    for arguments, order in ((["-n1"], "CADB"), ([], "ABCD")):
        parallel.remember(A=30.0, B=10.0, C=40.0, D=20.0)
        parallel.forget()
        parallel.suite.run(LIST, *arguments).assert_outcomes(passed=4)
        assert "".join(name for name, _ in parallel.starts()) == order


def test_a_config_without_measurements_is_ranked_by_its_size(parallel: Parallel) -> None:
    """A large model that nobody ran yet goes before a small one."""
    for name, model in (("small", "stand-in-1b"), ("large", "stand-in-70b"), ("middle", "stand-in-8b")):
        parallel.add(name)
        path = parallel.suite.path / f"configs/{name}.yaml"
        path.write_text(path.read_text().replace("model_name: stand-in\n", f"model_name: {model}\n"))
    parallel.suite.list("small", "large", "middle")
    parallel.suite.run(LIST, "-n1").assert_outcomes(passed=3)
    assert [name for name, _ in parallel.starts()] == ["large", "middle", "small"]


def test_no_config_waits_behind_a_long_one(parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one worker is busy with a long config, the other runs all that is left."""
    monkeypatch.setenv("OUTLAST", "5")
    parallel.add("long", behaviour="outlast")
    names = ["A", "B", "C", "D"]
    for name in names:
        parallel.add(name)
    parallel.remember(long=100.0, A=1.0, B=1.0, C=1.0, D=1.0)
    parallel.suite.list(*names, "long")
    parallel.suite.run(LIST, "-n2").assert_outcomes(passed=5)
    worker_of = dict(parallel.starts())
    (other,) = {worker_of[name] for name in names}
    assert worker_of["long"] != other


def test_skipped_configs_start_nothing(parallel: Parallel) -> None:
    """What is skipped neither takes a server nor stands in the way of one that runs."""
    for number in range(6):
        parallel.add(f"skip{number}", "platforms: tpu\n")
    parallel.add("A")
    parallel.suite.list(*(f"skip{number}" for number in range(6)), "A")
    parallel.suite.run(LIST, "-n2").assert_outcomes(passed=1, skipped=6)
    assert [name for name, _ in parallel.starts()] == ["A"]


@pytest.mark.parametrize("arguments", [[], ["-n2"]], ids=["alone", "workers"])
def test_every_run_notes_how_long_configs_took(parallel: Parallel, arguments: list[str]) -> None:
    """What was measured is kept beside the suite: the start once for each server, nothing of what could not start."""
    six(parallel)
    parallel.suite.run(LIST, *arguments)
    kept = parallel.durations()
    assert set(kept) == {("good", "smoke"), ("worse", "smoke"), *(("tasks", n) for n in ("one", "two", "three"))}
    (run,) = kept["good", "smoke"]
    assert run["questions"] == 20
    assert run["startup"] > 0
    assert sum(kept["tasks", name][0]["startup"] is not None for name in ("one", "two", "three")) == 1
    parallel.suite.run(LIST, *arguments)
    assert len(parallel.durations()["good", "smoke"]) == 2


def test_a_worker_that_dies_loses_no_config(parallel: Parallel) -> None:
    """The config that it was busy with is an outage with a row; what comes after it is run elsewhere."""
    parallel.add("deadly", TASKS, behaviour="kill-worker")
    for name in ("A", "B"):
        parallel.add(name)
    parallel.remember(deadly=100.0)
    parallel.suite.list("A", "deadly", "B")
    result = parallel.suite.run(LIST, "-n2")
    assert result.ret == 75
    outcomes = {row[0]: row[1] for row in verdicts(parallel.suite)}
    lost = {f"deadly:{name}": "infrastructure" for name in ("one", "two", "three")}
    assert outcomes == {"A": "pass", "B": "pass", **lost}
    assert "crashed" in parallel.suite.result("deadly/one")["reason"]


def start_two_slow(parallel: Parallel) -> subprocess.Popen[bytes]:
    """Start pytest with two workers and return while both ask their slow servers."""
    for name in ("A", "B"):
        parallel.add(name, fault="slow", behaviour="meet", more="max_concurrency: 1\n")
    parallel.suite.list("A", "B")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", LIST, "-n2"]
    process = subprocess.Popen(command, cwd=parallel.suite.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    samples = {name: f"results/*/{name}/samples.jsonl" for name in ("A", "B")}
    assert eventually(lambda: all(any(parallel.suite.path.glob(pattern)) for pattern in samples.values()))
    return process


def test_a_cancelled_run_of_workers_stops_all_servers(parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends both workers, their servers are gone, and each config that was under way has its record."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    monkeypatch.setenv("ACCURACY_GATE_TEST", mark)
    process = start_two_slow(parallel)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert [row[:2] for row in verdicts(parallel.suite)] == [("A", "infrastructure"), ("B", "infrastructure")]
    assert parallel.suite.result("A")["reason"].startswith("interrupted")
    assert eventually(lambda: not servers(mark))


def test_workers_whose_pytest_was_killed_end_as_if_cancelled(
    parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of pytest alone leaves no server, and each worker writes what it knows before it goes."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    monkeypatch.setenv("ACCURACY_GATE_TEST", mark)
    process = start_two_slow(parallel)
    process.kill()
    process.wait()
    assert eventually(lambda: not servers(mark))
    assert [parallel.suite.result(name)["verdict"] for name in ("A", "B")] == ["infrastructure"] * 2
    assert parallel.suite.result("A")["reason"].startswith("interrupted")
    process.communicate(timeout=PATIENCE)


def test_a_process_ends_with_the_one_it_is_bound_to() -> None:
    """As soon as the other process is gone, SIGTERM comes; a process that is gone already binds nobody."""
    code = (
        "import subprocess, sys, time\n"
        "from harness.pytest_servers import end_with\n"
        "gone = subprocess.Popen(['true']); gone.wait(); end_with(gone.pid)\n"
        "end_with(int(sys.argv[1])); print('bound', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen(["sleep", "60"])
    with subprocess.Popen([sys.executable, "-c", code, str(other.pid)], stdout=subprocess.PIPE) as bound:
        assert bound.stdout is not None
        assert bound.stdout.readline() == b"bound\n"
        assert bound.poll() is None
        other.kill()
        other.wait()
        assert bound.wait(PATIENCE) == -signal.SIGTERM


def servers(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("ACCURACY_GATE_TEST") == mark and "ACCURACY_GATE_SERVER" in environment:
            found.append(process)
    return found


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
