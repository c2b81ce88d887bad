"""Fetches the next config's weights and reads them into the page cache, in a process of lowest priority.

It never fails a run: what it could not do is a note. The process ends with its stdin, and so with the harness.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from harness.own_environment import users_environment
from harness.servers.embedded_model import is_embedded, model_folder

GIB = 1024**3
MEMORY_MARGIN = 4 * GIB
"""Left free beside a tenth of the memory: for the server that is being asked, and whatever else runs here."""
DISK_MARGIN = 10 * GIB
CHUNK_BYTES = 8 * 1024**2
CHECK_BYTES = 256 * 1024**2
"""How much is read between two looks at the free memory."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""vLLM loads the first kind that there is."""
BESIDE = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from harness.prefetch import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a config's server will load."""

    model: str
    """A hub name or a folder."""
    revision: str | None = None
    download_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What was done about one model."""

    model: str
    read_bytes: int = 0
    note: str | None = None
    """What was left out and why; None where all is in the page cache."""


class Prefetch:
    """The process that fetches, from its start until it is stopped."""

    def __init__(self, weights: Sequence[Weights], *, env: Mapping[str, str] | None = None) -> None:
        """`env` is added to this process's own.

        Raises OSError.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(ROOT), json.dumps([asdict(each) for each in weights])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**users_environment(), **(env or {})},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False when it did not come in time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def stop(self) -> tuple[Fetched, ...]:
        """End it, and tell what it did by now; again gives nothing."""
        process = self._process
        if process.stdout is None or process.stdout.closed:
            return ()
        process.kill()
        printed, _ = process.communicate()
        lines = [line for line in printed.splitlines(keepends=True) if line.endswith(b"\n")]
        return tuple(Fetched(**json.loads(line)) for line in lines)


def memory_for_cache(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the page cache may hold without pushing out what is in use; what it holds now counts."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    with suppress(OSError, ValueError, KeyError):  # no limit of its own, or an older kernel's files
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        counted = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((cgroup / "memory.current").read_text(encoding="ascii")) - int(counted["inactive_file"])
        total, free = min(total, limit), min(free, limit - used)
    return max(0, free - MEMORY_MARGIN - total // 10)


def read_in(
    files: Sequence[Path], *, held: int = 0, memory: Callable[[], int] = memory_for_cache
) -> tuple[int, str | None]:
    """Read files into the page cache as far as there is memory; return the bytes read, and why not all were.

    `held` is what was read in before and is still wanted.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    done = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while True:
                if done % CHECK_BYTES < CHUNK_BYTES and (free := memory()) < held + done + CHECK_BYTES:
                    return done, f"{path.name} was not read to its end: {free / GIB:.1f} GiB may be used"
                count = file.readinto(buffer)
                if not count:
                    break
                done += count
    return done, None


def fetch(weights: Weights, *, held: int = 0) -> Fetched:
    """Bring one model here and into the page cache; whatever goes wrong is the note."""
    try:
        read, note = read_in(_first_kind(sorted(_folder(weights).rglob("*"))), held=held)
    except Exception as error:  # noqa: BLE001 - nothing that happens here may matter to the run
        return Fetched(model=weights.model, note=f"{type(error).__name__}: {error}".split("\n", 1)[0])
    return Fetched(model=weights.model, read_bytes=read, note=note)


def _folder(weights: Weights) -> Path:
    if is_embedded(weights.model):
        return model_folder(weights.model)
    folder = Path(weights.model)
    return folder if folder.is_dir() else _snapshot(weights)


def _first_kind(files: Sequence[Path]) -> list[Path]:
    kinds = ([path for path in files if fnmatch(path.name, kind) and path.is_file()] for kind in WEIGHTS)
    return next((found for found in kinds if found), [])


def _snapshot(weights: Weights) -> Path:
    """Download what vLLM would, where there is room for it; what is here already is not asked for again."""
    from huggingface_hub import HfApi, constants, snapshot_download

    place: dict[str, Any] = {"revision": weights.revision, "cache_dir": weights.download_dir}
    if constants.HF_HUB_OFFLINE:
        return Path(snapshot_download(weights.model, local_files_only=True, **place))
    files = HfApi().model_info(weights.model, revision=weights.revision, files_metadata=True).siblings or []
    names = [file.rfilename for file in files]
    kind = next((kind for kind in WEIGHTS if any(fnmatch(name, kind) for name in names)), WEIGHTS[0])
    wanted = [kind, *BESIDE]
    size = sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, pattern) for pattern in wanted))
    cache = Path(weights.download_dir or constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    here = sum(blob.stat().st_size for blob in cache.glob(f"models--{weights.model.replace('/', '--')}/blobs/*"))
    free = shutil.disk_usage(cache).free
    if free - max(0, size - here) < DISK_MARGIN:
        raise OSError(f"{cache}: {size / GIB:.1f} GiB do not fit into {free / GIB:.1f} GiB with 10 to spare")
    return Path(snapshot_download(weights.model, allow_patterns=wanted, max_workers=2, **place))


def _step_back() -> None:
    """Give every other process precedence, on the CPU and on the disk."""
    os.nice(19)
    with suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def main() -> None:
    """Be the process: fetch what the argument names, and print a line of JSON for each model."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _step_back()
    held = 0
    for each in json.loads(sys.argv[2]):
        fetched = fetch(Weights(**each), held=held)
        held += fetched.read_bytes
        sys.stdout.write(json.dumps(asdict(fetched)) + "\n")
        sys.stdout.flush()
    # The thread that reads stdin would hold up an ordinary end.
    os._exit(0)
