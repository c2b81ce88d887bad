"""Fetching pinned files into a folder: once, whole or not at all."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit, urlunsplit

from harness import __version__
from harness.errors import DataUnavailable
from harness.pins import SLACK, FileCheck, Pin, check_file, check_folder

if TYPE_CHECKING:
    from requests import Response, Session

CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where files are fetched from and how long to wait; times in seconds."""

    sources: tuple[str, ...]
    """Addresses of folders, tried in order."""
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    file_timeout: float = 300.0
    """For one whole file from one source."""
    lock_timeout: float = 900.0
    """For another process that is fetching into the same folder."""


def fetch_missing(folder: Path, pins: Sequence[Pin], network: Network, *, force: bool = False) -> tuple[FileCheck, ...]:
    """Fetch what the folder lacks or holds damaged; with `force`, everything.

    Processes that start together download each file once. A file that is right stays until its successor is.
    Raises DataUnavailable naming every address that was tried and why it failed.
    """
    checks = check_folder(folder, pins)
    if all(check.ok for check in checks) and not force:
        return checks
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, network.lock_timeout):
            for pin in pins:
                check = check_file(folder, pin)
                if force or not check.ok:
                    _download(pin, check, network)
    except OSError as error:
        raise DataUnavailable(
            f"{folder}: the cache cannot be written: {error.strerror or error}; "
            "point XDG_CACHE_HOME at a folder that can"
        ) from error
    return check_folder(folder, pins)


@contextmanager
def _locked(folder: Path, timeout: float) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    # The lock file itself cannot tell: filelock before 4.0 empties it while waiting.
    owner = folder / ".lock.owner"
    try:
        lock.acquire(timeout=timeout, poll_interval=0.1)
    except Timeout as error:
        raise DataUnavailable(
            f"{folder / '.lock'}: held for over {timeout:g} s by {_owner(owner)}; "
            "wait for it to finish fetching, or end it, and try again"
        ) from error
    except NotImplementedError as error:
        raise DataUnavailable(
            f"{folder}: this file system has no locks; point XDG_CACHE_HOME at one that has"
        ) from error
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"


def _download(pin: Pin, check: FileCheck, network: Network) -> None:
    # One name for all: the lock lets one writer in, and what a killed process left is written over.
    part = check.path.with_name(f"{pin.name}.part")
    failures = []
    try:
        for source in network.sources:
            url = _address(source, pin.name)
            try:
                _save(url, part, pin, network)
            except DataUnavailable as error:
                failures.append(f"  {redacted(url)}: {error}")
            else:
                part.replace(check.path)
                return
    finally:
        part.unlink(missing_ok=True)
    state, again = ("is right", " again") if check.ok else (check.difference, "")
    head = f"{check.path}: {state}; it could not be fetched{again} from"
    raise DataUnavailable("\n".join([head, *failures]))


def _save(url: str, part: Path, pin: Pin, network: Network) -> None:
    with part.open("wb") as file:
        _receive(url, file, pin, network)
        file.flush()
        os.fsync(file.fileno())
    difference = pin.difference(part.read_bytes())
    if difference is not None:
        raise DataUnavailable(difference)


def _receive(url: str, file: BinaryIO, pin: Pin, network: Network) -> None:
    import requests
    import urllib3
    from tqdm import tqdm

    deadline = time.monotonic() + network.file_timeout
    timeouts = (network.connect_timeout, network.read_timeout)
    quiet = not sys.stderr.isatty() or bool(os.environ.get("CI"))
    try:
        with (
            _session(url) as session,
            session.get(url, stream=True, timeout=timeouts) as response,
            tqdm(desc=pin.name, total=pin.size, unit="B", unit_scale=True, disable=quiet) as bar,
        ):
            _check_head(response, pin)
            # read1 returns what has come: a trickle cannot outlast the deadline. urllib3 1.26 lacks it.
            read = getattr(response.raw, "read1", response.raw.read)
            while chunk := read(CHUNK, decode_content=True):
                file.write(chunk)
                bar.update(len(chunk))
                _check_progress(file.tell(), deadline, pin, network)
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        cause = _innermost(error)
        came = f"{file.tell()} of {pin.size} bytes came"
        raise DataUnavailable(f"{type(cause).__name__}: {cause} ({came})") from error


def _check_head(response: Response, pin: Pin) -> None:
    if response.status_code != 200:
        raise DataUnavailable(f"HTTP {response.status_code} {response.reason}")
    length = response.headers.get("Content-Length", "")
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    if length.isdecimal() and int(length) != pin.size and not encoded:
        kind = response.headers.get("Content-Type", "unknown")
        raise DataUnavailable(f"{length} bytes offered instead of {pin.size}, Content-Type {kind}")


def _check_progress(received: int, deadline: float, pin: Pin, network: Network) -> None:
    if received > pin.size + SLACK:
        raise DataUnavailable(f"more than {received - 1} bytes instead of {pin.size}")
    if time.monotonic() > deadline:
        raise DataUnavailable(f"not finished in {network.file_timeout:g} s ({received} of {pin.size} bytes came)")


def _session(url: str) -> Session:
    import requests

    session = requests.Session()
    session.max_redirects = 5
    session.trust_env = not _is_loopback(urlsplit(url).hostname or "")
    session.headers.update({"User-Agent": f"accuracy-gate/{__version__}", "Accept-Encoding": "identity"})
    return session


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _innermost(error: Exception) -> Exception:
    # The outer texts quote the whole address, which may hold a token; the innermost says what happened.
    for argument in (getattr(error, "reason", None), *error.args):
        if isinstance(argument, Exception):
            return _innermost(argument)
    return error


def _address(source: str, name: str) -> str:
    parts = urlsplit(source)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def redacted(url: str) -> str:
    """Return the address less its user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
