"""What a cluster's node is told and what it answers: one server's configs with their files, and the news of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import __version__
from harness.config_lists import ListedConfig
from harness.datasets import verify
from harness.errors import ConfigError, DataUnavailable
from harness.serving import RunOptions

DATA_KEYS = ("dataset", "fewshot_dataset", "baseline")
"""The keys of a config that name files beside it."""
GSM8K_FOLDER = "gsm8k"
LIST_NAME = "accuracy-gate-order.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One server's configs, complete enough for a node that shares no file system with the driver."""

    ids: tuple[str, ...]
    """The tasks that are asked."""
    list_name: str
    """The list that names the config, among the files."""
    files: Mapping[str, bytes]
    """By their paths below a folder that they have in common."""
    options: Mapping[str, Any]
    harness_version: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A node has begun."""

    node: str
    host: str
    gpus: tuple[str, ...]
    """As Ray counts them on that node."""
    record: str
    """The folder there whose files come as pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Lines that the evaluation wrote about itself: stages, skips, faults, the node's platform."""

    lines: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a file of the run record."""

    path: str
    """Below the run's folder."""
    data: bytes
    at: int
    """Where in the file it begins."""
    whole: bool
    """Whether the file counts only once its last piece is there; others grow by every piece."""
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The evaluation's process is over."""

    code: int
    output: str = ""
    """The end of what it printed."""


Event = Placed | Told | Piece | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one attempt ran, as results keep it."""

    node: str
    host: str
    gpus: Sequence[str]
    attempt: int
    """0 where none was begun."""
    attempts: int
    """How many there may be."""
    lost: Sequence[str]
    """Why the earlier ones came to nothing."""

    def facts(self) -> dict[str, Any]:
        """Flatten for `result.json`."""
        return asdict(self)


def order_for(entries: Sequence[ListedConfig], options: RunOptions) -> Order:
    """Pack the tasks of one server; data named by an absolute path must be on the nodes."""
    first = entries[0]
    list_folder = first.listed_at.path.parent
    named = [first.path, *_named_files(first.file.raw, first.path.parent)]
    paths = {Path(os.path.normpath(path)) for path in named}
    base = Path(os.path.commonpath([list_folder, *(path.parent for path in paths)]))
    list_name = (list_folder / LIST_NAME).relative_to(base).as_posix()
    files = {path.relative_to(base).as_posix(): path.read_bytes() for path in sorted(paths)}
    config_name = first.path.relative_to(list_folder).as_posix()
    return Order(
        ids=tuple(entry.id for entry in entries),
        list_name=list_name,
        files={**files, list_name: f"{config_name}\n".encode()},
        options={
            "backend": options.backend,
            "serve_command": options.serve_command,
            "require_gpus": options.require_gpus,
        },
    )


def _named_files(raw: Any, folder: Path) -> Iterator[Path]:
    """Find what the keys of a config, its tasks and its overrides name and the driver has."""
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            if key in DATA_KEYS and isinstance(value, str):
                if not Path(value).is_absolute() and (folder / value).is_file():
                    yield folder / value
            else:
                yield from _named_files(value, folder)
    elif isinstance(raw, list):
        for one in raw:
            yield from _named_files(one, folder)


def gsm8k_files(entries: Sequence[ListedConfig], data_dir: Path | None) -> dict[str, bytes] | None:
    """Read GSM8K for the nodes; None where nobody asks it or they must fetch it themselves.

    Raises DataUnavailable where the named folder does not hold it.
    """
    if not any(entry.config.task == "gsm8k" and entry.config.dataset is None for entry in entries):
        return None
    checks = verify(data_dir)
    if all(check.ok for check in checks):
        return {check.path.name: check.path.read_bytes() for check in checks}
    if data_dir is not None:
        raise DataUnavailable("\n".join(f"{check.path}: {check.difference}" for check in checks if not check.ok))
    return None


def check_version(order: Order) -> None:
    """Raise ConfigError where a node has another accuracy-gate than the driver."""
    if order.harness_version != __version__:
        raise ConfigError(
            f"this node runs accuracy-gate {__version__}, the driver {order.harness_version}: install the same version "
            "on both, or remove it from the node: the driver brings its own"
        )
