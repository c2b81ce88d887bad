"""The sample cache on disk: JSON lines in one folder, a file for each writer, named for the identity that answered."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from harness.backends.base import (
    ContinuationScore,
    Failure,
    Generation,
    Loglikelihoods,
    Response,
    RollingLoglikelihood,
)
from harness.cache import cache_root
from harness.records import now
from harness.sample_identity import Identity

STORED = 0
"""What `attempts` says of a response that was not asked for: it took none."""
_LINE = re.compile(rb'\{"key":"([0-9a-f]{64})","at":(\d{13}),"response":')
"""The beginning of an entry, which is all that an index reads of it."""
_NAME = re.compile(r"([0-9a-f]{64})\.\d{13}-[0-9a-f]{8}\.jsonl")
_TYPES = {kind.__name__: kind for kind in (Generation, Loglikelihoods, RollingLoglikelihood)}


def samples_folder() -> Path:
    """Name the folder of the sample cache, whether it exists or not."""
    return cache_root() / "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where an entry lies, and when it was stored, in milliseconds since 1970."""

    segment: int
    offset: int
    length: int
    at: int


class SampleStore:
    """The answers of one identity; a context manager.

    What is stored while it is open, by itself or by others, is found by the next one. Each writer has a file of its
    own, so that nobody waits and a torn line can only be a file's last. Of two answers to one key the later counts.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.identity = identity
        self.digest = identity.digest()
        self._folder = folder
        self._stack = ExitStack()
        self._index: dict[str, _Place] | None = None
        self._segments: list[tuple[Path, IO[bytes]]] = []
        self._used: set[int] = set()
        self._out: IO[bytes] | None = None
        self._full = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._index, self._out = None, None
        self._segments.clear()

    def get(self, key: str) -> Response | None:
        """Find an answer, with `attempts` 0; None where there is none, or one that cannot be read."""
        if self._index is None:
            self._index = self._load()
        place = self._index.get(key)
        if place is None:
            return None
        path, file = self._segments[place.segment]
        try:
            response = decoded(json.loads(os.pread(file.fileno(), place.length, place.offset))["response"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        if place.segment not in self._used:
            self._used.add(place.segment)
            with suppress(OSError):  # a folder that others fill may be read-only here
                os.utime(path)  # `prune` goes by when a file was last of use
        return response

    def put(self, key: str, response: Response) -> bool:
        """Store an answer and hand it to the system at once; False where it was not stored.

        A failure never is, nor a score that JSON cannot hold. Where the disk is full or not writable, a warning says so
        once: the answers are then no longer kept, and the evaluation goes on.
        """
        if self._full or isinstance(response, Failure):
            return False
        try:
            body = json.dumps(encoded(response), separators=(",", ":"), allow_nan=False)
        except ValueError:
            return False
        line = f'{{"key":"{key}","at":{_milliseconds()},"response":{body}}}\n'
        try:
            self._out = self._out or self._new_segment()
            _write_whole(self._out, line.encode())
        except OSError as error:
            self._full = True
            why = error.strerror or error
            warnings.warn(f"{self._folder}: the sample cache cannot be written: {why}", stacklevel=2)
            return False
        return True

    def _load(self) -> dict[str, _Place]:
        index: dict[str, _Place] = {}
        for path in sorted(self._folder.glob(f"{self.digest}.*.jsonl")):
            try:
                file = self._stack.enter_context(path.open("rb"))
            except OSError:  # pruned just now, or not ours to read
                continue
            if _header(file).get("digest") != self.digest:
                continue
            number = len(self._segments)
            self._segments.append((path, file))
            for key, place in _entries(file, number):
                if key not in index or place.at >= index[key].at:
                    index[key] = place
        return index

    def _new_segment(self) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.digest}.{_milliseconds()}-{secrets.token_hex(4)}.jsonl"
        file = self._stack.enter_context(path.open("xb", buffering=0))
        with suppress(OSError):  # Some network file systems have no locks: then `prune` may take it from under us.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        header = {"digest": self.digest, "created": now(), "identity": self.identity.facts()}
        _write_whole(file, json.dumps(header, separators=(",", ":")).encode() + b"\n")
        return file


def encoded(response: Response) -> dict[str, Any]:
    """Make of a response what JSON can hold."""
    return {"kind": type(response).__name__, **asdict(response)}


def decoded(fields: Mapping[str, Any]) -> Response:
    """Read what `encoded` made, marked as not asked for by `attempts` 0; its latency is the one it had.

    Raises KeyError or TypeError for what is no response of this version.
    """
    values = {**fields, "attempts": STORED}
    kind = _TYPES[values.pop("kind")]
    if kind is Loglikelihoods:
        values["scores"] = tuple(ContinuationScore(**score) for score in values["scores"])
        values["fallbacks"] = tuple(values["fallbacks"])
    response: Response = kind(**values)
    return response


def is_stored(response: Response) -> bool:
    """Tell whether a response came out of the cache, so that its latency says nothing of this run."""
    return response.attempts == STORED


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIdentity:
    """One identity's files, as `cache list` shows them."""

    digest: str
    segments: tuple[Path, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Empty where no header can be read."""
    created: str = "unknown"
    entries: int
    bytes: int
    last_used: float
    """Seconds since 1970."""


def stored_identities(folder: Path) -> tuple[StoredIdentity, ...]:
    """List what a folder holds, the least recently used first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if (name := _NAME.fullmatch(path.name)) is not None:
            found.setdefault(name[1], []).append(path)
    stored = (_stored(digest, paths) for digest, paths in found.items())
    return tuple(sorted((one for one in stored if one.segments), key=lambda one: (one.last_used, one.digest)))


def _stored(digest: str, paths: list[Path]) -> StoredIdentity:
    keys: set[str] = set()
    header: Mapping[str, Any] = {}
    there: dict[Path, os.stat_result] = {}
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            told = os.fstat(file.fileno())
            header = _header(file) or header
            keys.update(key for key, _ in _entries(file, 0))
            there[path] = told
    return StoredIdentity(
        digest=digest,
        segments=tuple(there),
        facts=header.get("identity", {}),
        created=header.get("created", "unknown"),
        entries=len(keys),
        bytes=sum(told.st_size for told in there.values()),
        last_used=max((told.st_mtime for told in there.values()), default=0.0),
    )


def remove(stored: StoredIdentity) -> int:
    """Delete an identity's files but those that are being written; return the bytes freed."""
    freed = 0
    for path in stored.segments:
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            size = os.fstat(file.fileno()).st_size
            path.unlink()
            freed += size
    return freed


def _header(file: IO[bytes]) -> dict[str, Any]:
    """Read a file's first line; empty where it is torn or none of ours."""
    try:
        header = json.loads(file.readline())
    except ValueError:
        return {}
    return header if isinstance(header, dict) and isinstance(header.get("identity"), dict) else {}


def _entries(file: IO[bytes], segment: int) -> Iterator[tuple[str, _Place]]:
    """Find the entries after the header; a torn last line and whatever else is none are left out."""
    offset = file.tell()
    for line in file:
        found = _LINE.match(line)
        if found is not None and line.endswith(b"}\n"):
            yield found[1].decode(), _Place(segment=segment, offset=offset, length=len(line), at=int(found[2]))
        offset += len(line)


def _write_whole(file: IO[bytes], line: bytes) -> None:
    """Write in one call, so that a line is torn only where the system stops half-way."""
    if file.write(line) != len(line):
        raise OSError("no space is left")


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000
