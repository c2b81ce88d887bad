"""`accuracy-gate cache`: what the sample cache holds, and less of it."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ConfigError
from harness.reports.untrusted import escaped
from harness.sample_identity import differing
from harness.sample_store import StoredIdentity, remove, samples_folder, stored_identities

SECONDS = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
BYTES = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
SHORTEST_PREFIX = 6
SHOWN_DIGITS = 12
DIFFERENCES_SHOWN = 6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate cache` takes."""
    parser.add_argument("--folder", type=Path, help="instead of the user's own cache")
    commands = parser.add_subparsers(required=True, dest="action", metavar="COMMAND")
    commands.add_parser("list", help="every identity with its entries, size and last use")
    prune = commands.add_parser("prune", help="delete what is old, or the least recently used of too much")
    prune.add_argument("--older-than", type=_duration, metavar="30d", help="not used for so long (h, d or w)")
    prune.add_argument("--max-size", type=_size, metavar="10GB", help="keep no more than this (KB, MB, GB, TB, GiB …)")
    clear = commands.add_parser("clear", help="delete some identities, or with --yes all")
    clear.add_argument("names", nargs="*", metavar="NAME", help="a model, or the beginning of an identity's digest")
    clear.add_argument("--yes", action="store_true", help="delete all")


def run(arguments: argparse.Namespace) -> int:
    """List or delete, as the command says; always 0.

    Raises ConfigError where it is not said what to delete, or the cache cannot be read or written.
    """
    folder: Path = arguments.folder or samples_folder()
    try:
        stored = stored_identities(folder)
        if arguments.action == "list":
            _list(folder, stored)
        elif arguments.action == "prune":
            _delete(prunable(stored, older_than=arguments.older_than, max_size=arguments.max_size, now=time.time()))
        else:
            _delete(_chosen(stored, arguments.names, everything=arguments.yes))
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error
    return 0


def prunable(
    stored: Sequence[StoredIdentity], *, older_than: float | None, max_size: int | None, now: float
) -> tuple[StoredIdentity, ...]:
    """Choose what to delete of identities in order of their last use; `older_than` in seconds, `max_size` in bytes.

    Raises ConfigError where neither is given.
    """
    if older_than is None and max_size is None:
        raise ConfigError("cache prune: say what may go: --older-than 30d or --max-size 10GB")
    old = [one for one in stored if older_than is not None and now - one.last_used > older_than]
    left = [one for one in stored if one not in old]
    size = sum(one.bytes for one in left)
    for one in left:
        if max_size is None or size <= max_size:
            break
        old.append(one)
        size -= one.bytes
    return tuple(old)


def _chosen(stored: Sequence[StoredIdentity], names: Sequence[str], *, everything: bool) -> tuple[StoredIdentity, ...]:
    if everything == bool(names):
        raise ConfigError("cache clear: name models or digests, or give --yes alone for everything")
    chosen = [(name, [one for one in stored if _is_named(one, name)]) for name in names]
    for name, found in chosen:
        if not found:
            raise ConfigError(f"cache clear: {name}: neither a model here nor {SHORTEST_PREFIX} digits of a digest")
    named = {one.digest for _, found in chosen for one in found}
    return tuple(one for one in stored if everything or one.digest in named)


def _is_named(stored: StoredIdentity, name: str) -> bool:
    by_digest = len(name) >= SHORTEST_PREFIX and stored.digest.startswith(name)
    return by_digest or stored.facts.get("model") == name


def _list(folder: Path, stored: Sequence[StoredIdentity]) -> None:
    print(f"{folder}: {len(stored)} identities, {_shown_size(sum(one.bytes for one in stored))}")
    latest: dict[object, StoredIdentity] = {}
    for one in reversed(stored):
        facts = one.facts
        used = datetime.fromtimestamp(one.last_used, UTC).strftime("%Y-%m-%d %H:%M")
        name = " ".join(escaped(str(facts.get(key, "unknown"))) for key in ("model", "engine", "version"))
        print(
            f"{one.digest[:SHOWN_DIGITS]}  {one.entries:>7} entries  {_shown_size(one.bytes):>8}  used {used}  {name}"
        )
        newer = latest.setdefault(facts.get("model"), one)
        if newer is not one:
            _print_differences(newer, one)


def _print_differences(newer: StoredIdentity, older: StoredIdentity) -> None:
    found = differing(older.facts, newer.facts) or ("a value that is kept secret",)
    for line in found[:DIFFERENCES_SHOWN]:
        print(f"    differs from {newer.digest[:SHOWN_DIGITS]} in {escaped(line)}")
    if len(found) > DIFFERENCES_SHOWN:
        print(f"    and {len(found) - DIFFERENCES_SHOWN} more")


def _delete(chosen: Sequence[StoredIdentity]) -> None:
    freed = 0
    for one in chosen:
        bytes_freed = remove(one)
        freed += bytes_freed
        kept = " but what is being written" if bytes_freed < one.bytes else ""
        print(f"{one.digest[:SHOWN_DIGITS]}  {escaped(str(one.facts.get('model', 'unknown')))}: deleted{kept}")
    print(f"{_shown_size(freed)} freed")


def _shown_size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 12h, 30d or 4w")
    return float(found[1]) * SECONDS[found[2]]


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if found is None or found[2] not in BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 500MB, 10GB or 2GiB")
    return int(float(found[1]) * BYTES[found[2]])
