"""A server's process started before its turn: past vLLM's imports, without a GPU, waiting to be told what to serve."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.config import ModelConfig
from harness.gpus.inventory import Gpu
from harness.servers.child import Child, StopSeconds
from harness.servers.launcher import LATE
from harness.servers.process import ServerSpec

LAUNCHER = Path(__file__).with_name("launcher.py")
CALL_SECONDS = 10.0
"""How long the launcher, which calls back first of all, may take for it."""
CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid, as SO_PEERCRED gives them."""


class Prestarted:
    """One process that imports vLLM and becomes a server when it is taken, or is gone when it is discarded."""

    def __init__(
        self, command: str, env: Mapping[str, str], *, run_id: str, stop_seconds: StopSeconds | None = None
    ) -> None:
        """Start it; `command` is the `vllm` beside this Python, `env` the server's environment as far as it is known.

        Raises OSError.
        """
        name = f"accuracy-gate-{uuid.uuid4().hex}"
        # Both have no file: whatever becomes of this process, nothing of them is left.
        self._log = os.memfd_create("accuracy-gate-prestart")
        self._calls = socket.socket(socket.AF_UNIX)
        self._calls.bind(f"\0{name}")
        self._calls.listen(1)
        self._channel: socket.socket | None = None
        self._child = Child(
            [sys.executable, str(LAUNCHER), name, command],
            # CUDA must find no GPU before there is a lease.
            env={**env, "CUDA_VISIBLE_DEVICES": ""},
            log_path=Path(f"/proc/self/fd/{self._log}"),
            run_id=run_id,
            seconds=stop_seconds or StopSeconds(),
        )
        self._env = env
        self._taken = False
        self.note: str | None = None
        """Why it could not be taken; None otherwise."""
        try:
            self._child.start()
        except BaseException:
            self.discard()
            raise

    @property
    def pid(self) -> int | None:
        """The launcher's process; None until its supervisor has told."""
        self._child.is_alive()
        return self._child.pid

    def suits(self, env: Mapping[str, str]) -> bool:
        """Tell whether a server of this environment can be made of it: what its imports may have read is the same."""
        names = {*self._env, *env} - LATE
        return all(self._env.get(name) == env.get(name) for name in names)

    def take(self, spec: ServerSpec) -> Child | None:
        """Let it become the server, whether or not its imports are over; None, with a note, where it cannot.

        Afterwards the server is the caller's to stop.
        """
        try:
            order = {"argv": spec.argv, "env": dict(spec.env), "log": str(spec.log_path.absolute())}
            self._answered().sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            self.note = f"the process that was started ahead could not be used: {error}{self._last_words()}"
            self.discard()
            return None
        except BaseException:
            self.discard()
            raise
        self._taken = True
        self._close()
        return self._child

    def wait(self, seconds: float) -> bool:
        """Wait until its imports are over; False when they are not by then, or it is dead."""
        try:
            channel = self._answered()
            channel.settimeout(seconds)
            return bool(channel.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def discard(self) -> None:
        """End it, unless it was taken; again costs nothing.

        Raises ServerError where not even SIGKILL ended it.
        """
        if self._taken:
            return
        try:
            self._child.stop()
        finally:
            self._taken = True
            self._close()

    def _answered(self) -> socket.socket:
        """Answer the launcher's call, once.

        Raises OSError where none comes.
        """
        if self._channel is None:
            self._channel = self._call()
        self._channel.settimeout(CALL_SECONDS)
        return self._channel

    def _call(self) -> socket.socket:
        """Wait for the launcher's call.

        Raises OSError where none comes.
        """
        deadline = time.monotonic() + CALL_SECONDS
        self._calls.settimeout(0.05)
        while self._child.is_alive():
            if time.monotonic() >= deadline:
                raise OSError(f"it did not call within {CALL_SECONDS:g} s")
            if self._child.pid is None:
                self._child.wait(0.05)
                continue
            with suppress(TimeoutError):
                channel, _ = self._calls.accept()
                # Sockets of this kind have no permissions, and the order holds a key.
                if _peer(channel) == self._child.pid:
                    return channel
                channel.close()
        raise OSError(f"it {self._child.exit}")

    def _last_words(self) -> str:
        size = os.fstat(self._log).st_size
        lines = os.pread(self._log, 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return f"; it last printed: {said[-1]}" if said else ""

    def _close(self) -> None:
        self._calls.close()
        if self._channel is not None:
            self._channel.close()
        if self._log >= 0:
            os.close(self._log)
        self._log = -1


def _peer(channel: socket.socket) -> int:
    pid, _, _ = CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(pid)


def own_vllm() -> str | None:
    """Find the `vllm` command that this Python runs; None where it is not installed here."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.is_file() else None


def why_not(config: ModelConfig, *, serve_command: str | None, gpus: Sequence[Gpu]) -> str | None:
    """Say why a config's server cannot be started ahead; None where it can."""
    if config.backend != "vllm":
        return f"backend {config.backend} is not started by `vllm serve`"
    if config.serve_command or serve_command:
        return "a serve_command starts it"
    if own_vllm() is None:
        return "vllm is not installed beside this Python"
    if any(gpu.kind != "cuda" for gpu in gpus):
        return "only NVIDIA GPUs can be hidden until there is a lease"
    if len({(gpu.name, gpu.arch) for gpu in gpus}) > 1:
        return "the GPUs are of several kinds, and what vLLM reads of one at its import need not hold for another"
    return None
