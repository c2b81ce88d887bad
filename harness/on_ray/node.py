"""The Ray task of one server: runs its evaluation in a process of its own and sends back what that writes."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import harness
from harness.on_ray.orders import GSM8K_FOLDER, Ended, Event, Order, Piece, Placed, Told, check_version

RECORD, FILES, SETTINGS, EVENTS, OUTPUT = "record", "files", "order.json", "events.jsonl", "output.log"
PREFIX, LOCK = "accuracy-gate-node-", "lock"
CHUNK_BYTES = 4 * 1024 * 1024
"""Below what an object store of the smallest size holds several of."""
POLL_SECONDS = 0.25
STOP_SECONDS = 10.0
"""The 6 s that a server is asked to end in, and what its supervisor and the record need."""
OUTPUT_BYTES = 8000


def run_order(order: Order, gsm8k: Mapping[str, bytes] | None) -> Iterator[Event]:
    """Evaluate on this node and yield what happens; a cancelled task stops its server before it ends.

    Raises ConfigError where this node's harness is not the driver's.
    """
    check_version(order)
    runtime = importlib.import_module("ray").get_runtime_context()
    gpus = tuple(map(str, runtime.get_accelerator_ids().get("GPU", ())))
    with scratch_folder() as scratch:
        _unpack(scratch, order, gsm8k)
        record = str(scratch / RECORD)
        yield Placed(node=runtime.get_node_id(), host=platform.node() or "unknown", gpus=gpus, record=record)
        shipping = Shipping(scratch)
        with _evaluation(scratch, gpus) as process:
            while process.poll() is None:
                yield from shipping.news()
                time.sleep(POLL_SECONDS)
        yield from shipping.news()
        yield Ended(code=process.returncode, output=_tail(scratch / OUTPUT))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for one order, and remove those of workers that were killed before they could."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        with (scratch / f"{LOCK}.new").open("wb") as mine:
            fcntl.flock(mine, fcntl.LOCK_EX)
            # Under its name only once it is held, or another order could take it for a dead one's.
            (scratch / f"{LOCK}.new").rename(scratch / LOCK)
            yield scratch


def _unpack(scratch: Path, order: Order, gsm8k: Mapping[str, bytes] | None) -> None:
    files = {f"{FILES}/{name}": content for name, content in order.files.items()}
    files |= {f"{GSM8K_FOLDER}/{name}": content for name, content in (gsm8k or {}).items()}
    for name, content in files.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (scratch / RECORD).mkdir()
    settings = {
        "ids": list(order.ids),
        "list": f"{FILES}/{order.list_name}",
        "options": dict(order.options),
        "data_dir": GSM8K_FOLDER if gsm8k else None,
    }
    (scratch / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")


@contextmanager
def _evaluation(scratch: Path, gpus: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the evaluation until it ends or the block is left, which stops its server.

    A process of its own, for an engine in process may crash and leaves a GPU's memory only by ending, while Ray uses
    its workers again.
    """
    ours = str(Path(harness.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ours, inherited] if inherited else [ours])}
    if gpus:
        # Ray sets it too, unless the node's owner forbade that; then the server would see every GPU.
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with (scratch / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.on_ray.evaluation", str(scratch), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its supervisor ends the server then
    process.wait()


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - OUTPUT_BYTES))
        return file.read().decode(errors="replace").strip()


class Shipping:
    """Reads what has been written since the last look, in pieces of bounded size."""

    def __init__(self, scratch: Path) -> None:
        self._record = scratch / RECORD
        self._events = scratch / EVENTS
        self._sent: dict[str, int] = {}
        self._versions: dict[str, tuple[int, int, int]] = {}

    def news(self) -> Iterator[Event]:
        """Yield pieces of files, then what the evaluation said of itself."""
        # What a result counts is written before it: list the results first, and send them after the samples.
        changed = list(self._changed())
        for path in sorted(self._files()):
            if _grows(path):
                yield from self._grown(path)
        for path in changed:
            yield from self._whole(path)
        if lines := self._lines():
            yield Told(lines=tuple(json.loads(line) for line in lines))

    def _files(self) -> Iterator[Path]:
        return (path for path in self._record.rglob("*") if path.is_file() and not path.name.startswith("."))

    def _changed(self) -> Iterator[Path]:
        for path in sorted(self._files(), key=lambda path: path.name == "result.json"):
            if _grows(path):
                continue
            stat = path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if self._versions.get(str(path)) != version:
                self._versions[str(path)] = version
                yield path

    def _grown(self, path: Path) -> Iterator[Piece]:
        name = path.relative_to(self._record).as_posix()
        with path.open("rb") as file:
            file.seek(self._sent.get(name, 0))
            while data := file.read(CHUNK_BYTES):
                at = self._sent.get(name, 0)
                self._sent[name] = at + len(data)
                yield Piece(path=name, data=data, at=at, whole=False, last=False)

    def _whole(self, path: Path) -> Iterator[Piece]:
        name = path.relative_to(self._record).as_posix()
        with path.open("rb") as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            while at < size or size == 0:
                data = file.read(CHUNK_BYTES)
                yield Piece(path=name, data=data, at=at, whole=True, last=at + len(data) >= size)
                at += len(data)
                if not data:
                    return

    def _lines(self) -> list[bytes]:
        """Take the whole lines that are new."""
        if not self._events.exists():
            return []
        with self._events.open("rb") as file:
            file.seek(self._sent.get(EVENTS, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._sent[EVENTS] = self._sent.get(EVENTS, 0) + len(whole)
        return whole.splitlines()


def _grows(path: Path) -> bool:
    """Tell files that are appended to from those that are written whole."""
    return path.name == "server.log" or (path.name.startswith("samples") and path.suffix == ".jsonl")
