"""Pinned files: what each must be, to the byte, and how one that is not differs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

SLACK = 64 * 1024
"""Bytes beyond the pinned size that are still read, so that what is there can be described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What a file must be, to the byte."""

    name: str
    sha256: str
    size: int
    rows: int

    def difference(self, content: bytes) -> str | None:
        """Say how `content` differs from the pinned file and why it may; None when it does not."""
        rows = sum(1 for line in content.split(b"\n") if line.strip())
        digest = sha256(content).hexdigest()
        found = [
            f"{is_} {unit} instead of {must}"
            for is_, must, unit in [(len(content), self.size, "bytes"), (rows, self.rows, "rows")]
            if is_ != must
        ]
        if digest != self.sha256:
            found.append(f"sha256 {digest} instead of {self.sha256}")
        return ", ".join(found) + self._likely_cause(content) if found else None

    def _likely_cause(self, content: bytes) -> str:
        if content.lstrip().startswith(b"<"):
            return "; likely cause: it is a web page"
        signs = [
            name
            for name, there in [
                ("a byte order mark", content.startswith(codecs.BOM_UTF8)),
                ("CRLF line ends", b"\r\n" in content),
                ("UTF-16", content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))),
            ]
            if there
        ]
        if signs:
            return f"; likely cause: an editor or git's autocrlf saved it again with {' and '.join(signs)}"
        body = content.rstrip(b"\n")
        if any(sha256(whole).hexdigest() == self.sha256 for whole in (body, body + b"\n")):
            return "; likely cause: an editor added or dropped a newline at its end"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """One file held against its pin."""

    path: Path
    difference: str | None
    """How it differs, None when it is right."""
    content: bytes = field(default=b"", repr=False)
    """The file's bytes when it is right, so that what is used is what was checked."""

    @property
    def ok(self) -> bool:
        return self.difference is None


def check_file(folder: Path, pin: Pin) -> FileCheck:
    """Hold a file against its pin."""
    path = folder / pin.name
    try:
        size = path.stat().st_size
        # Something far larger is not worth reading to be refused; UTF-16 doubles a file.
        if size > 3 * pin.size + SLACK:
            return FileCheck(path=path, difference=f"{size} bytes instead of {pin.size}")
        content = path.read_bytes()
    except FileNotFoundError:
        return FileCheck(path=path, difference="is missing")
    except OSError as error:
        return FileCheck(path=path, difference=f"cannot be read: {error.strerror}")
    difference = pin.difference(content)
    return FileCheck(path=path, difference=difference, content=b"" if difference else content)


def check_folder(folder: Path, pins: Sequence[Pin]) -> tuple[FileCheck, ...]:
    """Hold each file of a folder against its pin, in the order of `pins`."""
    return tuple(check_file(folder, pin) for pin in pins)
