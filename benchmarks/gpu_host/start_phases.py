"""Where a start's time went, read from vLLM's log: `start_phases.py FOLDER` prints JSON for every server below it.

The log's clock ticks in whole seconds; what vLLM says it measured itself (compile, graphs, engine) is finer.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

STAMP = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
ENGINE = re.compile(r"Initializing a V1 LLM engine")
LOADED = re.compile(r"Model loading took|Loading weights took")
COMPILE = re.compile(r"torch\.compile (?:took|takes) ([\d.]+) s")
CACHED = re.compile(r"Directly load")
GRAPHS = re.compile(r"Graph capturing finished in ([\d.]+) sec")
INIT = re.compile(r"init engine \(.*?\) took ([\d.]+) s")
READY = re.compile(r"Starting vLLM (?:API )?server")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhases:
    """Seconds; None for what the log does not tell."""

    total: float | None
    """From the process's start until it answered, as the harness measured it."""
    imports: float | None = None
    """Until the engine begins: Python's imports, twice, and the config."""
    weights: float | None = None
    compile: float | None = None
    graphs: float | None = None
    engine: float | None = None
    """The engine's initialization, compile and graphs included."""
    server: float | None = None
    """From the engine until the server answers."""
    compiled_before: bool = False
    """Whether it found what an earlier start had compiled."""


def phases(log: str, total: float | None) -> StartPhases:
    """Read one server's log; `total` places the process's start, which is before the first line."""
    engine, loaded, init, ready = (_when(log, pattern) for pattern in (ENGINE, LOADED, INIT, READY))
    began = ready - total if ready is not None and total is not None else None
    return StartPhases(
        total=total,
        imports=_between(began, engine),
        weights=_between(engine, loaded),
        compile=_number(log, COMPILE),
        graphs=_number(log, GRAPHS),
        engine=_number(log, INIT),
        server=_between(init, ready),
        compiled_before=CACHED.search(log) is not None,
    )


def starts_below(folder: Path) -> Iterator[tuple[str, StartPhases]]:
    """Give every server's log below a folder, by its path there."""
    for path in sorted(folder.rglob("server.log")):
        told = path.with_name("server.json")
        total = json.loads(told.read_text(encoding="utf-8"))["startup_seconds"] if told.is_file() else None
        log = path.read_text(encoding="utf-8", errors="replace")
        yield str(path.parent.relative_to(folder)), phases(log, total)


def _when(log: str, pattern: re.Pattern[str]) -> float | None:
    """Tell when the last line that matches was written, in seconds of its year."""
    found = None
    for line in log.splitlines():
        if pattern.search(line) and (stamp := STAMP.search(line)) is not None:
            found = datetime.strptime(f"2000-{stamp[1]}", "%Y-%m-%d %H:%M:%S").timestamp()
    return found


def _number(log: str, pattern: re.Pattern[str]) -> float | None:
    found = pattern.findall(log)
    return float(found[-1]) if found else None


def _between(first: float | None, then: float | None) -> float | None:
    return None if first is None or then is None else max(0.0, round(then - first, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    starts = [{"server": name, **asdict(start)} for name, start in starts_below(parser.parse_args().folder)]
    print(json.dumps(starts, indent=2))


if __name__ == "__main__":
    main()
