"""Formats for the sample cache, measured: `python benchmarks/cache_format.py`, under a minute and 300 MB of disk.

Each format stores 1,319 answers one by one, each safe from SIGKILL once stored, then all are found again by a new
process's means. `parquet at the end` alone is not safe: it shows what safety costs. Times are ratios to plain JSON
lines. Parquet needs `pip install pyarrow`; without it its rows are left out.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.backends.base import Generation
from harness.sample_identity import Identity
from harness.sample_store import SampleStore

ANSWERS = 1319
LENGTHS = (100, 12_000)
CHARACTERS = 4
"""Of English a token, about."""
WORDS = Path(__file__).resolve().parents[1] / "harness/tasks/data/instructions.jsonl"
Texts = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to keep answers in a folder."""

    name: str
    write: Callable[[Path, Texts], None]
    read: Callable[[Path], dict[str, str]]
    safe: bool = True
    """Whether an answer that was stored outlives SIGKILL."""


def texts(tokens: int) -> dict[str, str]:
    """Make answers that repeat themselves about as much as worked solutions do."""
    draws = random.Random(tokens)
    sentences = [sentence for text in _sources() for sentence in text.replace("\n", " ").split(". ") if sentence]
    made = {}
    for number in range(ANSWERS):
        text = ""
        while len(text) < tokens * CHARACTERS:
            text += f"{draws.choice(sentences)}. {draws.randrange(1000)}\n"
        made[f"{number:064x}"] = text[: tokens * CHARACTERS]
    return made


def _sources() -> Iterator[str]:
    folder = os.environ.get("ACCURACY_GATE_DATA")
    path = Path(folder) / "train.jsonl" if folder else WORDS
    for line in path.read_text(encoding="utf-8").splitlines():
        yield from (value for value in json.loads(line).values() if isinstance(value, str))


IDENTITY = Identity(engine="vllm", version="1", model="m", revision="0" * 40)


def generation(text: str) -> Generation:
    return Generation(text=text, finish_reason="stop", generated_tokens=1, prompt_tokens=1, latency=1.5)


def write_store(folder: Path, answers: Texts) -> None:
    with SampleStore(folder, IDENTITY) as store:
        for key, text in answers.items():
            store.put(key, generation(text))


def read_store(folder: Path) -> dict[str, str]:
    with SampleStore(folder, IDENTITY) as store:
        found = ((f"{number:064x}", store.get(f"{number:064x}")) for number in range(ANSWERS))
        return {key: answer.text or "" for key, answer in found if isinstance(answer, Generation)}


def row(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "text": text, "finish_reason": "stop", "generated_tokens": 1, "latency": 1.5}


def write_compressed(folder: Path, answers: Texts) -> None:
    with (folder / "all.jsonl").open("xb", buffering=0) as file:
        for key, text in answers.items():
            packed = base64.b64encode(zlib.compress(json.dumps(row(key, text)).encode()))
            file.write(b'{"key":"' + key.encode() + b'","z":"' + packed + b'"}\n')


def read_compressed(folder: Path) -> dict[str, str]:
    found = {}
    with (folder / "all.jsonl").open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            unpacked = json.loads(zlib.decompress(base64.b64decode(json.loads(line)["z"])))
            found[unpacked["key"]] = unpacked["text"]
    return found


def write_parquet_files(folder: Path, answers: Texts) -> None:
    """A file for each answer: Parquet's index stands at a file's end, and without it nothing can be read."""
    import pyarrow as pa
    from pyarrow import parquet

    for number, (key, text) in enumerate(answers.items()):
        parquet.write_table(pa.Table.from_pylist([row(key, text)]), folder / f"{number}.parquet", compression="zstd")


def write_parquet_groups(folder: Path, answers: Texts) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    first = pa.Table.from_pylist([row("", "")])
    with parquet.ParquetWriter(folder / "all.parquet", first.schema, compression="zstd") as writer:
        for key, text in answers.items():
            writer.write_table(pa.Table.from_pylist([row(key, text)], schema=first.schema))


def write_parquet_end(folder: Path, answers: Texts) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist([row(key, text) for key, text in answers.items()])
    parquet.write_table(table, folder / "all.parquet", compression="zstd")


def read_parquet(folder: Path) -> dict[str, str]:
    import pyarrow as pa
    from pyarrow import parquet

    found: dict[str, str] = {}
    for path in folder.glob("*.parquet"):
        try:
            table = parquet.read_table(path, columns=["key", "text"])
        except pa.ArrowInvalid:  # torn
            continue
        found.update(zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True))
    return found


FORMATS = [
    Format(name="JSON lines (the store)", write=write_store, read=read_store),
    Format(name="JSON lines, zlib each", write=write_compressed, read=read_compressed),
]
if importlib.util.find_spec("pyarrow"):
    FORMATS += [
        Format(name="parquet, file each", write=write_parquet_files, read=read_parquet),
        Format(name="parquet, group each", write=write_parquet_groups, read=read_parquet, safe=False),
        Format(name="parquet at the end", write=write_parquet_end, read=read_parquet, safe=False),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds, seconds and bytes."""

    write: float
    read: float
    size: int


def measured(way: Format, answers: Texts, repeats: int = 3) -> Cost:
    """Take the best of several, since other work on the machine only ever adds."""
    costs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            began = time.perf_counter()
            way.write(folder, answers)
            wrote = time.perf_counter()
            found = way.read(folder)
            ended = time.perf_counter()
            assert found == answers, way.name
            size = sum(path.stat().st_size for path in folder.iterdir())
            costs.append(Cost(write=wrote - began, read=ended - wrote, size=size))
    return Cost(write=min(c.write for c in costs), read=min(c.read for c in costs), size=costs[0].size)


def torn(way: Format, answers: Texts) -> int:
    """Count the answers that are left when the last file has lost its last 10 bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        way.write(folder, answers)
        last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        last.write_bytes(last.read_bytes()[:-10])
        return len(way.read(folder))


def import_seconds(module: str) -> float:
    """Import a module in processes of its own; the median of five, less an empty process."""
    return statistics.median(_run(f"import {module}") for _ in range(5)) - statistics.median(
        _run("pass") for _ in range(5)
    )


def _run(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def installed_bytes(distribution: str) -> int:
    files = metadata.files(distribution) or ()
    return sum(Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).is_file())


def main() -> None:
    for tokens in LENGTHS:
        answers = texts(tokens)
        total = sum(len(text.encode()) for text in answers.values())
        print(f"{ANSWERS} answers of {tokens} tokens, {total / 1e6:.1f} MB of text")
        print(f"{'':24}{'write':>8}{'find all':>10}{'size':>8}{'left of a torn tail':>22}")
        base = measured(FORMATS[0], answers)
        for way in FORMATS:
            cost = base if way is FORMATS[0] else measured(way, answers)
            ratios = f"{cost.write / base.write:>8.2f}{cost.read / base.read:>10.2f}{cost.size / base.size:>8.2f}"
            print(f"{way.name:24}{ratios}{torn(way, answers):>22}{'' if way.safe else '  not safe from SIGKILL'}")
        each = 1000 * base.write / ANSWERS
        print(f"of JSON lines: {each:.3f} ms to store one, {base.read:.3f} s to find all, {base.size / 1e6:.1f} MB\n")
    if importlib.util.find_spec("pyarrow"):
        ours, theirs = import_seconds("json"), import_seconds("pyarrow.parquet")
        print(f"import pyarrow.parquet: {theirs:.3f} s, json: {ours:.3f} s")
        print(f"pyarrow installed: {installed_bytes('pyarrow') / 1e6:.0f} MB; json and zlib come with Python")


if __name__ == "__main__":
    main()
