"""What an engine's processes inherit from this one, and their certain end: a mark, an environment, a log, a guard."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

from harness.errors import ServerError
from harness.own_environment import changed_environment
from harness.servers.leftovers import VARIABLE, Marker, kill_marked

KILL_SECONDS = 20.0
"""What the kernel may need to take back the memory of a large process."""


@contextmanager
def environment(variables: Mapping[str, str], marker: Marker) -> Iterator[None]:
    """Set variables, and what PYTHONPATH says for this process too, until the block is left."""
    # The resource tracker serves this process for good, and must not be taken for the engine's.
    resource_tracker.ensure_running()
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    added = [folder for folder in folders if folder and folder not in sys.path]
    sys.path[:0] = added
    try:
        # setproctitle, by which vLLM names its processes, would overwrite the mark.
        with changed_environment({**variables, VARIABLE: str(marker), "SPT_NOENV": "1"}):
            yield
    finally:
        for folder in added:
            sys.path.remove(folder)


@contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Send what this process prints to a file, and for good what processes print that it starts meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with path.open("ab") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        yield
    finally:
        _flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


@contextmanager
def deadline(seconds: float, marker: Marker, expired: threading.Event) -> Iterator[None]:
    """Kill the engine's processes when the block takes too long, which ends the wait for them."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(min(seconds, threading.TIMEOUT_MAX)):
            expired.set()
            while not done.is_set():
                kill_marked(marker, seconds=1.0)
                done.wait(0.5)

    thread = threading.Thread(target=watch, name="accuracy-gate-deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_GUARD = """
import sys
sys.path.insert(0, sys.argv[1])
from harness.servers.leftovers import Marker, kill_marked
sys.stdin.read()
kill_marked(Marker.parse(sys.argv[2]), seconds=20)
"""


@contextmanager
def killed_with_us(marker: Marker) -> Iterator[None]:
    """Keep a process that kills the engine when this one is killed: vLLM's own processes would live on."""
    root = str(Path(__file__).resolve().parents[2])
    guard = subprocess.Popen(
        [sys.executable, "-c", _GUARD, root, str(marker)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        if guard.stdin is not None:
            guard.stdin.close()


@contextmanager
def ended(marker: Marker) -> Iterator[None]:
    """Kill what is left of the engine when the block is left, and collect the dead.

    Raises ServerError when something is left that even SIGKILL did not end.
    """
    others = set(multiprocessing.active_children())
    try:
        yield
    finally:
        left = kill_marked(marker, seconds=KILL_SECONDS).survivors
        for child in set(multiprocessing.active_children()) - others:
            child.join(KILL_SECONDS)
    if left:
        raise ServerError(
            f"processes of the engine {marker} are still there after SIGKILL: {', '.join(map(str, left))}; they wait "
            "for a device or a file system that does not answer: see `dmesg`"
        )
