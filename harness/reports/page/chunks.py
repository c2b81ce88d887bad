"""Long texts packed for the page: compressed a few at a time, so that neither side ever holds all of them."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 512 * 1024
"""Characters of JSON from which on a chunk is closed: small enough to unpack at a key press."""


def pack(document: object) -> str:
    """Compress a document into letters, digits, `+`, `/` and `=`: no text in it can end the element that holds it.

    Half a surrogate pair is kept, for JSON can escape it.
    """
    return _packed(json.dumps(document, separators=(",", ":"), allow_nan=False))


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)).decode("ascii")


class Chunks:
    """Documents spooled to a file, each found again by its chunk and its place in it."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._open: list[str] = []
        self._size = 0
        self._count = 0

    def add(self, document: dict[str, Any]) -> tuple[int, int]:
        """Put a document away and say where."""
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        place = (self._count, len(self._open))
        self._open.append(text)
        self._size += len(text)
        if self._size >= CHUNK:
            self._close()
        return place

    def _close(self) -> None:
        with self._spool.open("a", encoding="ascii") as spool:
            spool.write(_packed(f"[{','.join(self._open)}]") + "\n")
        self._open.clear()
        self._size = 0
        self._count += 1

    def read(self) -> Iterator[str]:
        """Read all chunks back, in order; nothing can be added afterwards."""
        if self._open:
            self._close()
        if self._count:
            with self._spool.open(encoding="ascii") as spool:
                yield from (line.rstrip("\n") for line in spool)
