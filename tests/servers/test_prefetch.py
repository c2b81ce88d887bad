"""Weights are fetched ahead by a process that gives way to all others, within what is free, and never fails a run."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from trials import eventually, is_gone

from harness.ahead import weights_of
from harness.config import ModelConfig
from harness.prefetch import (
    GIB,
    MEMORY_MARGIN,
    ROOT,
    Fetched,
    Prefetch,
    Weights,
    fetch,
    memory_for_cache,
    read_in,
)

MIB = 1024**2


def config(**more: Any) -> ModelConfig:
    return ModelConfig(model_name="org/model", accuracy_threshold=0.5, **more)


def weights_file(path: Path, size: int) -> Path:
    """Write a file that is nowhere but on the disk."""
    path.write_bytes(os.urandom(size))
    forget(path)
    return path


def forget(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> float:
    """Tell which part of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb+") as file, mmap.mmap(file.fileno(), size) as mapped:
        seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), seen) == 0
        del start
    return sum(each & 1 for each in seen) / len(seen)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which the hub takes calls and never answers them."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        yield {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}


@contextmanager
def prefetching(*weights: Weights, **env: str) -> Iterator[Prefetch]:
    process = Prefetch(weights, env=env)
    try:
        yield process
    finally:
        process.stop()


def test_local_weights_end_in_the_page_cache(tmp_path: Path) -> None:
    """What the next server will read is in memory before it asks, and how much it was is told."""
    file = weights_file(tmp_path / "model-00001-of-00001.safetensors", 9 * MIB)
    (tmp_path / "config.json").write_text("{}")
    with prefetching(Weights(model=str(tmp_path))) as process:
        assert process.wait(60)
        assert process.stop() == (Fetched(model=str(tmp_path), read_bytes=9 * MIB),)
        assert process.stop() == ()
    assert cached_pages(file) == 1.0


def test_only_what_vllm_would_load_is_read(tmp_path: Path) -> None:
    """Where there are safetensors, the same weights in an older format are left on the disk."""
    new = weights_file(tmp_path / "model.safetensors", MIB)
    weights_file(tmp_path / "pytorch_model.bin", 2 * MIB)
    assert fetch(Weights(model=str(tmp_path))).read_bytes == new.stat().st_size


def test_it_gives_way_to_every_other_process(slow: dict[str, str]) -> None:
    """Fetching has the lowest priority on the CPU and on the disk."""
    with prefetching(Weights(model="org/model"), **slow) as process:
        fetching = psutil.Process(process.pid)
        assert eventually(lambda: fetching.nice() == 19)
        assert eventually(lambda: fetching.ionice().ioclass is psutil.IOPRIO_CLASS_IDLE)


def test_stopping_ends_it_at_once(slow: dict[str, str]) -> None:
    """One that waits for the hub when it is told to stop is gone, and tells of nothing that it did not do."""
    with prefetching(Weights(model="org/model"), **slow) as process:
        assert eventually(lambda: psutil.Process(process.pid).net_connections())
        assert not process.wait(0)
        assert process.stop() == ()
        assert is_gone(process.pid)


def test_it_does_not_outlive_the_harness(slow: dict[str, str]) -> None:
    """A harness that is killed cannot tell it to stop: it ends by itself."""
    program = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from harness.prefetch import Prefetch, Weights\n"
        "print(Prefetch([Weights(model='org/model')]).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **slow}) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        assert eventually(lambda: psutil.Process(pid).net_connections())
        harness.kill()
    assert eventually(lambda: is_gone(pid), seconds=5)


def test_it_reads_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    """The page cache is filled up to what is free, counting what was read before, and the rest is a note."""
    files = [tmp_path / f"model-{n}.safetensors" for n in range(2)]
    for path in files:
        path.touch()
        os.truncate(path, 300 * MIB)
    read, note = read_in(files, memory=lambda: 600 * MIB)
    assert 300 * MIB <= read < 600 * MIB
    assert note is not None
    assert "model-1.safetensors was not read to its end" in note
    assert read_in(files, held=400 * MIB, memory=lambda: 600 * MIB)[0] == 0
    assert read_in(files, memory=lambda: 2 * GIB) == (600 * MIB, None)


GROUPS = {
    "no limit": ("max", 100 * GIB, 0, 100 * GIB - 13 * GIB - MEMORY_MARGIN),
    "a limit that binds": (str(20 * GIB), 12 * GIB, 2 * GIB, 10 * GIB - 2 * GIB - MEMORY_MARGIN),
    "nothing left": (str(20 * GIB), 20 * GIB, 0, 0),
}


@pytest.mark.parametrize(("limit", "used", "reclaimable", "room"), GROUPS.values(), ids=GROUPS)
def test_a_container_counts_its_own_limit(tmp_path: Path, limit: str, used: int, reclaimable: int, room: int) -> None:
    """What the machine has free is not this container's to fill."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {130 * GIB // 1024} kB\nMemAvailable: {100 * GIB // 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")
    assert memory_for_cache(tmp_path / "meminfo", tmp_path) == room


@pytest.mark.parametrize("model", ["not a name", "embedded:none-such", "org/not-here"])
def test_what_cannot_be_fetched_is_a_note(tmp_path: Path, model: str) -> None:
    """A model that is not to be had, offline or at all, makes a line of text and no fault."""
    with prefetching(Weights(model=model), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)) as process:
        assert process.wait(60)
        (fetched,) = process.stop()
    assert (fetched.model, fetched.read_bytes) == (model, 0)
    assert fetched.note


def test_the_flags_say_where_weights_lie() -> None:
    """Revision and download folder are those that the server is given."""
    flags = "--revision abc --download-dir=/big/disk"
    assert weights_of(config(server_args=flags)) == Weights(model="org/model", revision="abc", download_dir="/big/disk")


NOTHING = {
    "a template": {"serve_command": "docker run --name {name} image {model} --port {port} {args}"},
    "a remote API": {"backend": "openai"},
}


@pytest.mark.parametrize("more", NOTHING.values(), ids=NOTHING)
def test_what_others_load_is_not_fetched(more: dict[str, Any]) -> None:
    """A server that runs elsewhere, or in a container, has weights of its own."""
    assert weights_of(config(**more)) is None
