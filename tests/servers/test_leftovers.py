"""Finding and killing what bears a server's mark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from trials import PATIENCE, eventually, is_gone

from harness.servers.leftovers import VARIABLE, Marker, find_marked, kill_marked, start_ticks, sweep_dead_runs


@contextmanager
def marked_process(marker: Marker | str, **options: bool) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"],
        env={**os.environ, VARIABLE: str(marker)},
        stdout=subprocess.PIPE,
        **options,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def dead() -> Marker:
    """The mark of a harness that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as harness:
        start = start_ticks(harness.pid)
        assert start is not None
        return replace(Marker.new("an old run"), harness_pid=harness.pid, harness_start=start)


@pytest.mark.parametrize("run_id", ["run", "2026-11-30T12:00:00", ""])
def test_mark_is_read_back(run_id: str) -> None:
    """What is written in an environment is read back, also from a run id with colons."""
    marker = Marker.new(run_id)
    assert Marker.parse(str(marker)) == marker
    assert marker.harness_lives()


@pytest.mark.parametrize("text", ["", "a:b:c:d", "b:1:2", "a:b:1:", "a:b:-1:2", "a:b:1:2.5"])
def test_what_is_no_mark(text: str) -> None:
    """A text that is no mark is not taken for one."""
    assert Marker.parse(text) is None


def test_marks_differ() -> None:
    """Two servers of one harness are told apart."""
    assert Marker.new("run") != Marker.new("run")


def test_only_the_marked_are_killed() -> None:
    """Killing one server's processes ends them in whatever session, and no other server's."""
    mine, other = Marker.new("run"), Marker.new("run")
    with (
        marked_process(mine) as one,
        marked_process(mine, start_new_session=True) as two,
        marked_process(other) as three,
    ):
        sweep = kill_marked(mine, seconds=PATIENCE)
        assert {left.pid for left in sweep.killed} == {one.pid, two.pid}
        assert sweep.survivors == ()
        assert is_gone(one.pid)
        assert is_gone(two.pid)
        assert three.poll() is None


def test_session_without_mark() -> None:
    """A process that lost its mark is still found by the server's session."""
    with marked_process("", start_new_session=True) as process:
        assert kill_marked(Marker.new("run"), seconds=PATIENCE).killed == ()
        assert process.poll() is None
        kill_marked(Marker.new("run"), seconds=PATIENCE, session=process.pid)
        assert is_gone(process.pid)


def test_sweep_kills_dead_runs_only(dead: Marker) -> None:
    """A sweep ends the servers of dead harnesses, and neither a live run's nor what bears no mark."""
    with (
        marked_process(dead) as orphan,
        marked_process(Marker.new("run")) as live,
        marked_process("something else") as unmarked,
    ):
        assert not dead.harness_lives()
        assert str(dead) in [left.marker for left in sweep_dead_runs(PATIENCE).killed] or is_gone(orphan.pid)
        assert is_gone(orphan.pid)
        assert live.poll() is None
        assert unmarked.poll() is None


def test_pid_that_is_used_again() -> None:
    """A live process that merely has the pid of a dead harness does not keep that harness' server alive."""
    mine = Marker.new("run")
    assert not replace(mine, harness_start=mine.harness_start - 1).harness_lives()


def test_harness_that_nobody_collected(dead: Marker) -> None:
    """A harness that has ended is dead even before its parent collects it."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as harness:
        assert eventually(lambda: psutil.Process(harness.pid).status() == psutil.STATUS_ZOMBIE)
        assert start_ticks(harness.pid) is None


def test_harness_inside_a_marked_process(dead: Marker) -> None:
    """A sweep spares the process that sweeps and its ancestors, whatever mark they inherited."""
    code = (
        "import os, subprocess, sys\n"
        "sweep = 'from harness.servers.leftovers import sweep_dead_runs; sweep_dead_runs()'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', sweep]).returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, VARIABLE: str(dead)}, check=False)
    assert done.returncode == 0


def test_finding_kills_nobody() -> None:
    """Listing the marked names pid and program, and leaves them running."""
    marker = Marker.new("run")
    with marked_process(marker) as process:
        [found] = find_marked(marker)
        assert found.pid == process.pid
        assert str(found).startswith(f"{process.pid} (python")
        assert process.poll() is None
