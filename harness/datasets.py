"""The questions' data: GSM8K, pinned to the byte, from the user's folder, the cache or the network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from harness.cache import cache_root
from harness.downloads import Network, fetch_missing
from harness.errors import ConfigError, DataUnavailable
from harness.jsonl import Row, parse_rows, read_jsonl
from harness.pins import FileCheck, Pin, check_folder

__all__ = [
    "DATA_VARIABLE",
    "PINS",
    "SOURCES_VARIABLE",
    "FileCheck",
    "Gsm8k",
    "Network",
    "Pin",
    "Pins",
    "Row",
    "cache_folder",
    "fetch",
    "load_gsm8k",
    "read_jsonl",
    "verify",
]

DATA_VARIABLE = "ACCURACY_GATE_DATA"
SOURCES_VARIABLE = "ACCURACY_GATE_DATA_URLS"

# openai/grade-school-math, MIT. The commit comes first, the branch in case the commit's address is blocked or
# gone, then the copy that vLLM's CI keeps; the pins decide, whichever answers.
_UPSTREAM = "https://raw.githubusercontent.com/openai/grade-school-math"
_COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
DEFAULT_SOURCES = (
    f"{_UPSTREAM}/{_COMMIT}/grade_school_math/data",
    f"{_UPSTREAM}/master/grade_school_math/data",
    "https://vllm-public-assets.s3.us-west-2.amazonaws.com/ci-datasets/gsm8k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The two files a question set is made of."""

    train: Pin
    test: Pin

    @property
    def files(self) -> tuple[Pin, Pin]:
        return self.train, self.test


PINS = Pins(
    train=Pin(
        name="train.jsonl",
        sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        size=4166206,
        rows=7473,
    ),
    test=Pin(
        name="test.jsonl",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        size=749738,
        rows=1319,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8k:
    """GSM8K's rows in file order: examples come from `train`, questions from `test`."""

    train: tuple[Row, ...]
    test: tuple[Row, ...]


def load_gsm8k(data_dir: Path | None = None, *, pins: Pins = PINS, network: Network | None = None) -> Gsm8k:
    """Load GSM8K from `data_dir`, else $ACCURACY_GATE_DATA, else the cache, which is filled at need.

    A damaged file in a folder the user named is refused; one in the cache is fetched again.
    """
    folder = _named_folder(data_dir)
    if folder is None:
        checks = _fetch(pins, network, force=False)
    else:
        checks = check_folder(folder, pins.files)
        _refuse_damaged(
            checks,
            "copy the files from the cache that `accuracy-gate data fetch` fills, "
            f"or leave --data-dir and {DATA_VARIABLE} out to use the cache itself",
        )
    train, test = (parse_rows(check.content) for check in checks)
    return Gsm8k(train=train, test=test)


def verify(data_dir: Path | None = None, *, pins: Pins = PINS) -> list[FileCheck]:
    """Hold the files that `load_gsm8k` would use against their pins, without touching the network."""
    return list(check_folder(_named_folder(data_dir) or cache_folder(), pins.files))


def fetch(*, force: bool = False, pins: Pins = PINS, network: Network | None = None) -> tuple[Path, ...]:
    """Fill the cache ahead of time and return its files; `force` downloads what is already right too."""
    return tuple(check.path for check in _fetch(pins, network, force=force))


def cache_folder() -> Path:
    """Name the folder that downloads go to, whether it exists or not."""
    try:
        return cache_root() / "gsm8k"
    except DataUnavailable as error:
        raise DataUnavailable(f"{error}, or {_name_a_folder(PINS.files)}") from error


def _named_folder(data_dir: Path | None) -> Path | None:
    named = data_dir or os.environ.get(DATA_VARIABLE)
    return Path(named).expanduser() if named else None


def _fetch(pins: Pins, network: Network | None, *, force: bool) -> tuple[FileCheck, ...]:
    network = network or Network(sources=_sources())
    try:
        checks = fetch_missing(cache_folder(), pins.files, network, force=force)
    except DataUnavailable as error:
        raise DataUnavailable(
            f"{error}\nor do without the download: run `accuracy-gate data fetch` beforehand, or "
            f"{_name_a_folder(pins.files)}"
        ) from error
    _refuse_damaged(checks, "something else writes to the cache: stop it and try again")
    return checks


def _refuse_damaged(checks: Sequence[FileCheck], remedy: str) -> None:
    faults = [f"{check.path}: {check.difference}" for check in checks if not check.ok]
    if faults:
        raise DataUnavailable("\n".join([*faults, remedy]))


def _name_a_folder(files: Sequence[Pin]) -> str:
    names = " and ".join(pin.name for pin in files)
    return f"name a folder holding {names} with --data-dir or {DATA_VARIABLE}"


def _sources() -> tuple[str, ...]:
    """Return the addresses named in $ACCURACY_GATE_DATA_URLS, separated by blanks, or the public ones."""
    named = tuple(os.environ.get(SOURCES_VARIABLE, "").split())
    for number, source in enumerate(named, start=1):
        if not _is_http(source):
            raise ConfigError(
                f"{SOURCES_VARIABLE}: entry {number} is not the address of a folder; "
                "write it as https://host/folder and separate entries by blanks"
            )
    return named or DEFAULT_SOURCES


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        return False
