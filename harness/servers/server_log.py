"""What a server printed: its end for people, and secrets out of the file once it is closed."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.redaction import redact

TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 1024 * 1024
_TERMINAL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class ServerLog:
    """The part of a log file that one server wrote; an earlier attempt's may stand before it."""

    def __init__(self, path: Path, secrets: Iterable[str]) -> None:
        self.path = path
        self._secrets = tuple(secrets)
        self._start = path.stat().st_size if path.exists() else 0

    def text(self) -> str:
        """Return the last 64 KiB, redacted and without terminal colours; of a larger log only whole lines."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                begin = file.seek(max(min(self._start, end), end - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        if begin > self._start:
            # A secret cut in half is known to nobody.
            text = text.partition("\n")[2] or text[TAIL_BYTES // 2 :]
        return redact(_TERMINAL_CODES.sub("", text), self._secrets)

    def lines(self, count: int) -> list[str]:
        """Return the last lines that say something."""
        return [line.rstrip() for line in self.text().splitlines() if line.strip()][-count:]

    def quiet_seconds(self) -> float | None:
        """Return how long ago the server last printed; None when it has not."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return max(0.0, time.time() - status.st_mtime) if status.st_size > self._start else None

    def redact(self) -> bool:
        """Take the secrets out of the file; True when there were any."""
        return redact_file(self.path, self._secrets)


def redact_file(path: Path, secrets: Iterable[str]) -> bool:
    """Replace a finished file by its redacted copy, atomically and only if they differ; True when they did."""
    known = tuple(secrets)
    if not path.is_file() or all(_redacted(chunk, known) == chunk for chunk in _chunks(path)):
        return False
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as copy:
            for chunk in _chunks(path):
                copy.write(_redacted(chunk, known))
        scratch.chmod(path.stat().st_mode & 0o777)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _redacted(chunk: bytes, secrets: tuple[str, ...]) -> bytes:
    return redact(chunk.decode(errors="surrogateescape"), secrets).encode(errors="surrogateescape")


def _chunks(path: Path) -> Iterator[bytes]:
    """Read whole lines, about a mebibyte at a time; only a line longer than that is cut, between words."""
    with path.open("rb") as file:
        rest = b""
        while data := file.read(CHUNK_BYTES):
            rest += data
            cut = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1 or rest.rfind(b" ") + 1 or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
        yield rest
