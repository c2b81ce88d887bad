"""A server's process from start to stop: ready, ended or out of time, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import psutil

from harness.errors import PortTaken, ServerError, ServerExited, ServerNotReady
from harness.redaction import secret_values
from harness.servers.child import Child, StopSeconds
from harness.servers.diagnosis import likely_cause, port_in_use
from harness.servers.leftovers import Marker
from harness.servers.ports import PortBlock, PortOwner, is_free, port_owner
from harness.servers.readiness import Look, Probe, State
from harness.servers.server_log import ServerLog

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_SHARE = 0.02, 0.5, 0.02
"""Seconds between two polls, and their share of what was waited by then: a start is told late by a fiftieth at most."""
TAIL_LINES = 40
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What to start, and how to know that it is up."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The server's whole environment."""
    log_path: Path
    """Appended to."""
    base_url: str
    """http://127.0.0.1:PORT"""
    served_model: str
    """The name that `/v1/models` must list."""
    api_key: str | None
    startup_seconds: float
    """The deadline for being ready."""
    secrets: tuple[str, ...] = ()
    """Values to mask in the log, beside the key and the secrets in `env`."""
    run_id: str = "run"
    listens_itself: bool = True
    """False where what listens is no descendant of the process, as with a container."""

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if (url.scheme, url.hostname, url.path.strip("/")) != ("http", LOOPBACK, "") or url.port is None:
            raise ValueError(f"base_url must be http://{LOOPBACK}:PORT, not {self.base_url}")

    @property
    def port(self) -> int:
        return urlsplit(self.base_url).port or 80

    @property
    def all_secrets(self) -> tuple[str, ...]:
        """Every value to mask in what the server prints."""
        return (*self.secrets, *secret_values(self.env), *([self.api_key] if self.api_key else []))


Take = Callable[[ServerSpec], Child | None]
"""Makes a running process of somebody's this server's, or gives None."""


class ServerProcess:
    """A server that is started once, and stopped with everything that came from it."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        stop_seconds: StopSeconds | None = None,
        ports: PortBlock | None = None,
        started_ahead: Take | None = None,
    ) -> None:
        """`ports`, if given, are released by `stop`; `started_ahead` may give a process to use for a new one."""
        self.spec = spec
        self.ready_at: float | None = None
        """Seconds since the epoch; None until ready."""
        self.startup_seconds: float | None = None
        """Measured, from start to ready; None until ready."""
        self._stop_seconds = stop_seconds or StopSeconds()
        self._ports = ports
        self._started_ahead = started_ahead
        self._child: Child | None = None
        self._log = ServerLog(spec.log_path, spec.all_secrets)
        self._stopped = False

    def __enter__(self) -> Self:
        if self._child is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process, process group and session; None before there is one."""
        return self._child.pid if self._child else None

    @property
    def marker(self) -> Marker | None:
        """The mark by which all its processes can be found; None before it is started."""
        return self._child.marker if self._child else None

    def start(self) -> None:
        """Start and wait until ready; whatever is raised, also by a signal, nothing is left running.

        Raises ServerExited, ServerNotReady, PortTaken, or ServerError when it serves another model or refuses its key.
        """
        if self._child is not None:
            raise RuntimeError(f"{self.spec.served_model}: a ServerProcess is started once")
        try:
            self._await_ready(self._launch())
        except BaseException as error:
            try:
                self.stop()
            except ServerError as left:
                error.add_note(str(left))
            raise

    def stop(self) -> None:
        """End the server and all that came from it, and take the secrets out of its log; again costs nothing.

        Raises ServerError when a process is left that even SIGKILL did not end, or the log could not be cleaned.
        """
        if self._stopped:
            return
        try:
            if self._child is not None:
                self._child.stop()
        finally:
            if self._ports is not None:
                self._ports.release()
            self._clean_log()
        self._stopped = True

    def keep(self) -> str:
        """Leave the server running when this process ends, and say how to stop it; `stop` does nothing any more."""
        if self._child is None or not self._child.is_alive():
            raise ServerError(self._report("the server cannot be kept: it does not run"))
        self._child.keep()
        self._stopped = True
        return f"kill {self._child.supervisor_pid}"

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    def exit_description(self) -> str:
        """Say in a few words how the server ended: "exited with code 1", "killed by SIGSEGV (signal 11)"."""
        if self._child is None:
            return "not started"
        return "running" if self._child.is_alive() else str(self._child.exit)

    def death(self) -> str | None:
        """Say how the server ended, with the likely cause and the log's tail; None while it lives."""
        return None if self.is_alive() else self._report(f"the server {self.exit_description()}")

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines that the server printed, redacted."""
        return "\n".join(self._log.lines(lines))

    def lost_its_port(self) -> bool:
        """Tell whether the log shows that another process had the port first."""
        return port_in_use(self._log.text())

    def _launch(self) -> Child:
        spec = self.spec
        try:
            spec.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._child = self._started_ahead(spec) if self._started_ahead is not None else None
            if self._child is None:
                self._child = Child(
                    spec.argv, env=spec.env, log_path=spec.log_path, run_id=spec.run_id, seconds=self._stop_seconds
                )
                self._child.start()
        except OSError as error:
            raise ServerError(f"{spec.served_model}: no process or log {spec.log_path}: {error}") from error
        return self._child

    def _await_ready(self, child: Child) -> None:
        began = time.monotonic()
        deadline = began + self.spec.startup_seconds
        with Probe(self.spec.base_url, model=self.spec.served_model, api_key=self.spec.api_key) as probe:
            while True:
                look = self._look(probe, child, deadline)
                waited = time.monotonic() - began
                if not child.is_alive():
                    raise ServerExited(
                        self._report(f"the server {child.exit} after {waited:.1f} s, before it was ready")
                    )
                if look.state is State.READY:
                    self.startup_seconds, self.ready_at = waited, time.time()
                    return
                if time.monotonic() >= deadline:
                    raise ServerNotReady(self._report(self._last_doing(look, waited)))
                pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, waited * PAUSE_SHARE))
                child.wait(min(pause, deadline - time.monotonic()))

    def _look(self, probe: Probe, child: Child, deadline: float) -> Look:
        """Poll once, and refuse an answer that is not our server's."""
        owner = self._port_owner(child)
        if owner is PortOwner.NOBODY:
            return Look(state=State.STARTING, ground=f"nothing listens on port {self.spec.port}")
        if owner is PortOwner.FOREIGN and child.is_alive():
            raise PortTaken(self._on_port("another process listens on it"))
        look = probe.look(deadline - time.monotonic())
        if look.state in (State.REFUSED, State.OTHER_MODEL):
            if owner is PortOwner.UNKNOWN:
                raise PortTaken(self._on_port(f"what answers {look.ground}"))
            raise ServerError(self._report(f"the server {look.ground}"))
        return look

    def _port_owner(self, child: Child) -> PortOwner:
        if not self.spec.listens_itself:
            return PortOwner.NOBODY if is_free(self.spec.port) else PortOwner.UNKNOWN
        return port_owner(self.spec.port, _family(child))

    def _on_port(self, found: str) -> str:
        port = self.spec.port
        return f"port {port}, given to {self.spec.served_model}: {found}; see `ss -ltnp sport = :{port}`"

    def _last_doing(self, look: Look, waited: float) -> str:
        quiet = self._log.quiet_seconds()
        last = self._log.lines(1)
        doing = f"last printed {quiet:.0f} s ago: {last[0]}" if quiet is not None and last else "printed nothing"
        return f"the server was not ready after {waited:.1f} s: {look.ground}; it {doing}"

    def _report(self, headline: str) -> str:
        tail = self.log_tail()
        ended = "" if self.is_alive() else self.exit_description()
        cause = likely_cause(f"{self._log.text()}\n{ended}")
        return "\n".join(
            [
                f"{self.spec.served_model}: {headline}",
                *([f"likely cause: {cause}"] if cause else []),
                f"the end of {self.spec.log_path}:" if tail else f"{self.spec.log_path} is empty",
                *([tail] if tail else []),
            ]
        )

    def _clean_log(self) -> None:
        try:
            self._log.redact()
        except OSError as error:
            raise ServerError(
                f"{self.spec.log_path}: secrets in it could not be masked ({error}): delete it before it is uploaded"
            ) from error


def _family(child: Child) -> Iterator[int]:
    """Give the pids of a server; a look at every process of the machine, taken only once a pid is asked for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from (process.pid for process in psutil.Process(child.supervisor_pid).children(recursive=True))


def start_with_retry(
    make_spec: Callable[[PortBlock], ServerSpec],
    *,
    attempts: int = 3,
    stop_seconds: StopSeconds | None = None,
    started_ahead: Take | None = None,
) -> ServerProcess:
    """Start a server, again on other ports when another process was there first; its ports are kept until `stop`.

    `started_ahead` may give a process for the first attempt.
    """
    for attempt in range(1, attempts + 1):
        ports = PortBlock.reserve()
        try:
            server = ServerProcess(
                make_spec(ports),
                stop_seconds=stop_seconds,
                ports=ports,
                started_ahead=started_ahead if attempt == 1 else None,
            )
            server.start()
        except BaseException as error:
            ports.release()
            taken = isinstance(error, PortTaken) or (isinstance(error, ServerExited) and server.lost_its_port())
            if not taken or attempt == attempts:
                raise
            _note_attempt(server.spec.log_path, f"its port was lost: attempt {attempt + 1} of {attempts} on others")
        else:
            return server
    raise ValueError(f"attempts must be at least 1, not {attempts}")


def _note_attempt(log_path: Path, text: str) -> None:
    """Say in the log, which holds all attempts, why it begins again; a log that cannot be written stops nothing."""
    with contextlib.suppress(OSError), log_path.open("a", encoding="utf-8") as log:
        log.write(f"accuracy-gate: started again: {text}\n")
