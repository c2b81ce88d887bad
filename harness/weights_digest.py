"""Which weights a name stands for: a commit, a package, or a cheap digest of local files that says what it covers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.errors import ConfigError
from harness.servers.embedded_model import embedded_version, is_embedded

WHOLE = 64 * 1024 * 1024
"""Bytes up to which a file is read to its end."""
BLOCK = 4096
BLOCKS = 1024
"""Looked at in a large file of another format."""
LONGEST_HEADER = 100_000_000
"""Of a safetensors file, by its specification."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """Finds out which weights a name stands for."""

    environ: Mapping[str, str]
    hub_cache_is_theirs: bool
    """False where the server may keep its downloads elsewhere, as one in a container does."""

    def of(self, name: str, revision: str | None, flag: str) -> str:
        """Name the weights, beyond doubt.

        Raises ConfigError with the remedy where a name may stand for others tomorrow.
        """
        if is_embedded(name) and embedded_version(name) != "unknown":
            return f"package {embedded_version(name)}"
        path = Path(name).expanduser()
        if path.is_dir():
            return f"folder {folder_digest(path)}"
        if path.is_file():
            return f"file {file_digest(path)}"
        commit = revision if revision is not None and _COMMIT.fullmatch(revision) else self._downloaded(name, revision)
        if commit is None:
            said = f"{revision!r} may move" if revision else "no revision is given"
            raise ConfigError(
                f"--cache: which weights {name} stands for is not certain ({said}): pin {flag} to a commit of 40 hex "
                "digits in server_args, or serve a local folder"
            )
        return commit

    def _downloaded(self, name: str, revision: str | None) -> str | None:
        """Read which commit of a branch or tag the server, which just loaded it, left in the hub's cache."""
        if not self.hub_cache_is_theirs or self.environ.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}:
            return None
        home = self.environ.get("HF_HOME") or str(
            Path(self.environ.get("HOME", "~")).expanduser() / ".cache/huggingface"
        )
        hub = Path(self.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
        ref = hub / f"models--{name.replace('/', '--')}" / "refs" / (revision or "main")
        try:
            commit = ref.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None


def is_model_folder(path: Path) -> bool:
    """Tell whether a folder holds a model or an adapter; any other is not walked through."""
    return path.is_dir() and any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def folder_digest(folder: Path) -> str:
    """Digest a model's folder: every file's name and `file_digest`, hidden ones left out."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in place.parts):
            total.update(f"{place}\0{file_digest(path)}\n".encode())
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """Digest a file: all of it up to 64 MiB; of a larger one its size, time of change and samples.

    Samples are the header and the first, middle and last 4 KiB of every tensor of a safetensors file, and 1,024 blocks
    spread evenly of any other. What changed only between them is told by the time of change alone.
    """
    told = path.stat()
    total = hashlib.sha256(str(told.st_size).encode())
    with path.open("rb") as file:
        if told.st_size <= WHOLE:
            total.update(file.read())
            return total.hexdigest()
        total.update(str(told.st_mtime_ns).encode())
        for at in sorted({*_tensor_blocks(file), *_even_blocks(told.st_size)}):
            file.seek(at)
            total.update(file.read(BLOCK))
    return total.hexdigest()


def _even_blocks(size: int) -> Iterator[int]:
    return (size * number // BLOCKS for number in range(BLOCKS))


def _tensor_blocks(file: IO[bytes]) -> Iterator[int]:
    """Say where to look in a safetensors file; nowhere in any other."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= LONGEST_HEADER:
        return
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        header = json.loads(file.read(length))
        data = 8 + length
        yield from range(0, data, BLOCK)
        for name, tensor in header.items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield data + first
                yield data + (first + end) // 2
                yield data + max(first, end - BLOCK)


def named_files(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Digest the files and model folders that words name: alone, after an `=`, or as a string inside JSON."""
    for text in dict.fromkeys(piece for word in words for piece in _pieces(word)):
        path = Path(text).expanduser()
        try:
            if path.is_file():
                yield text, file_digest(path)
            elif is_model_folder(path):
                yield text, folder_digest(path)
        except (OSError, ValueError):  # too long for a path, or not to be read: then it is text
            continue


def _pieces(word: str) -> Iterator[str]:
    for text in (word, word.partition("=")[2]):
        if text.startswith(("{", "[")):
            try:
                yield from _strings(json.loads(text))
            except ValueError:
                continue
        elif text and not text.startswith("-"):
            yield text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
