"""How far a config has come: one line that moves on a terminal, a few plain lines in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Protocol

from tqdm import tqdm

from harness.gates.threshold import Counts
from harness.reports.untrusted import escaped

LOG_SECONDS = 30.0
"""How often a log hears of a config whose stage has not changed."""
BAR_SECONDS = 1.0
STARTING, ASKING = "starting", "asking"


@dataclass(kw_only=True)
class _State:
    """What is known of the evaluation."""

    name: str
    stage: str = ""
    since: float = field(default_factory=time.monotonic)
    counts: Counts = field(default_factory=Counts)
    total: int | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def figures(self) -> str:
        counts, interval = self.counts, self.counts.interval
        text = f"{counts.asked}/{self.total}, {counts.asked / max(self.seconds, 1e-3):.1f} questions/s"
        if counts.accuracy is not None:
            text += f", accuracy {counts.accuracy:.3f} (95% {interval.low:.3f}-{interval.high:.3f})"
        return f"{text}, errors {counts.errors}"


class _Shown(Protocol):
    """Shows the state somewhere."""

    every: float

    def entered(self, state: _State, before: str, seconds: float) -> None: ...

    def tick(self, state: _State) -> None: ...

    def answered(self, state: _State) -> None: ...

    def close(self, state: _State) -> None: ...


class _Log:
    """Plain lines for a log: at each change of stage, and now and then between."""

    def __init__(self, stream: IO[str], every: float) -> None:
        self.every = every
        self._stream = stream
        self._begin = _own_line()

    def entered(self, state: _State, before: str, seconds: float) -> None:
        ready = before == STARTING and state.stage == ASKING
        self._write(state, f"ready after {seconds:.0f} s" if ready else state.stage)

    def tick(self, state: _State) -> None:
        seconds = f"{state.stage} {state.seconds:.0f} s"
        self._write(state, state.figures if state.total else seconds)

    def answered(self, state: _State) -> None: ...

    def close(self, state: _State) -> None:
        if state.total:
            self._write(state, f"{state.figures}, over after {state.seconds:.0f} s")
        elif state.stage:
            self._write(state, f"over after {state.seconds:.0f} s of {state.stage}")

    def _write(self, state: _State, text: str) -> None:
        # One write, so that lines of several workers do not run into each other.
        self._stream.write(f"{self._begin}{state.name}: {text}\n")
        self._stream.flush()
        self._begin = ""


class _Bar:
    """A tqdm line for a person who watches."""

    def __init__(self, stream: IO[str]) -> None:
        self.every = BAR_SECONDS
        stream.write(_own_line())
        # miniters: else the bar learns from a burst of answers to wait for as many again.
        self._bar = tqdm(
            unit=" questions", file=stream, leave=False, dynamic_ncols=True, bar_format="{desc}", miniters=1, delay=0
        )

    def entered(self, state: _State, before: str, seconds: float) -> None:
        self._bar.bar_format = "{desc}"
        self._bar.reset()
        self.tick(state)

    def tick(self, state: _State) -> None:
        waiting = "" if state.total else f": {state.stage} {state.seconds:.0f} s"
        self._bar.set_description_str(f"{state.name}{waiting}")

    def answered(self, state: _State) -> None:
        counts, interval = state.counts, state.counts.interval
        if self._bar.bar_format is not None:
            self._bar.bar_format = None
            self._bar.set_description_str(state.name, refresh=False)
        self._bar.total = state.total
        if counts.accuracy is not None:
            text = f"accuracy {counts.accuracy:.3f} ({interval.low:.3f}-{interval.high:.3f}), errors {counts.errors}"
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(counts.asked - self._bar.n)

    def close(self, state: _State) -> None:
        self._bar.close()


class LiveLine:
    """One config's progress, on a terminal or in a log.

    It moves where somebody watches: on a terminal, outside CI and outside workers of pytest-xdist, whose bars would
    overwrite each other. Elsewhere a plain line is written at each change of stage and every 30 seconds (`every`)
    between. A stream that cannot be written to is left alone: progress never ends a run.
    """

    def __init__(self, name: str, stream: IO[str] | None = None, *, every: float = LOG_SECONDS) -> None:
        stream = stream or sys.stderr
        watched = _has_width(stream) and not os.environ.get("CI") and not _in_worker()
        self._state = _State(name=escaped(name))
        self._shown: _Shown = _Bar(stream) if watched else _Log(stream, every)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None
        self._due = float("inf")

    def stage(self, text: str) -> None:
        """Enter a stage; from the first one on the line says how long it has lasted."""
        with self._writing():
            before, seconds = self._state.stage, self._state.seconds
            self._state = _State(name=self._state.name, stage=text)
            self._due = time.monotonic() + self._shown.every
            self._shown.entered(self._state, before, seconds)
        if self._ticker is None and not self._closed.is_set():
            self._ticker = threading.Thread(target=self._tick, name="live line", daemon=True)
            self._ticker.start()

    def answered(self, counts: Counts, total: int) -> None:
        """Take the counts so far; called for each answer."""
        with self._writing():
            self._state.counts, self._state.total = counts, total
            self._shown.answered(self._state)

    def close(self) -> None:
        """End the line; closing again does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._ticker is not None:
            self._ticker.join()
        with self._writing():
            self._shown.close(self._state)

    def _tick(self) -> None:
        while not self._closed.wait(max(0.0, self._due - time.monotonic())):
            with self._writing():
                if time.monotonic() >= self._due:
                    self._due = time.monotonic() + self._shown.every
                    self._shown.tick(self._state)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        # ValueError: the stream was closed.
        with self._lock, contextlib.suppress(OSError, ValueError):
            yield


def _in_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _own_line() -> str:
    """End the line on which pytest has written a test's name and waits; a worker of xdist has written none."""
    return "\n" if "PYTEST_CURRENT_TEST" in os.environ and not _in_worker() else ""


def _has_width(stream: IO[str]) -> bool:
    """Tell a terminal that lines can be fitted into; some that are made for logs are 0 columns wide."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False
