"""Pays vLLM's imports before its turn, waits for its order and then becomes `vllm serve`; started by path.

Its arguments are the name of the harness' socket and the `vllm` command. Whatever keeps it from serving in this
process, it becomes that command by exec. Standard library only, and nothing at all where it is merely imported: vLLM
spawns its engine, and a spawned process runs its parent's main file again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES = ("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve")
"""Measured on a CPU build: 12.0 s, after which everything else that `vllm serve` imports takes 0.1 s."""

LATE = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "PYTEST_CURRENT_TEST",
        "VLLM_API_KEY",
        "VLLM_PORT",
    }
)
"""What may be set after the imports: vLLM reads it when it serves, and CUDA when it is first used.

Others are read by an import: VLLM_ENGINE_READY_TIMEOUT_S is, and so is what huggingface_hub and OpenMP go by.
"""
KEPT = frozenset({"ACCURACY_GATE_SERVER", "SPT_NOENV"})
"""The supervisor's, by which this process is found."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def main() -> None:
    name, command = sys.argv[1:]
    began_with = dict(os.environ)
    # An end before the order is nobody's loss, and a traceback about it would only be in the way.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # This file's folder holds modules named vllm and sglang.
    sys.path[0] = str(Path(command).parent)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(f"\0{name}")
        imported = _import_all()
        with contextlib.suppress(OSError):
            channel.sendall(b"imported\n")
        order = _receive(channel)
    if order is None:
        return
    _continue_log(order["log"])
    why_not = imported or _difference(began_with, order["env"]) or _device()
    if why_not is None:
        _serve(order)
    os.write(1, f"`vllm serve` is started anew, for {why_not}\n".encode())
    env = {**order["env"], **{key: value for key, value in began_with.items() if key in KEPT}}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.execve(order["argv"][0], order["argv"], env)


def _import_all() -> str | None:
    """Import what `vllm serve` does; say why that failed, or None."""
    try:
        for module in MODULES:
            importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - even a SystemExit in an import is to become a plain start
        return f"an import failed: {type(error).__name__}: {error}"
    return None


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """Wait for the order; None when the harness went away or has no use for this process."""
    heard = b""
    while not heard.endswith(b"\n"):
        data = b""
        with contextlib.suppress(ConnectionError):
            data = channel.recv(65536)
        if not data:
            return None
        heard += data
    order: dict[str, Any] = json.loads(heard)
    return order


def _continue_log(path: str) -> None:
    """Go on printing to the server's log, which gets what was printed up to now."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):
        os.write(log, Path("/proc/self/fd/1").read_bytes())
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def _difference(began_with: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    """Name a variable that the imports may have read and that is another now; None where there is none."""
    for name in sorted({*began_with, *env} - LATE - KEPT):
        if began_with.get(name) != env.get(name):
            return f"{name} is not what it was"
    return None


def _device() -> str | None:
    """Name a device that the imports opened and kept, which NVML and torch were not seen to do; None for none."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith(DEVICES):
                return f"an import opened {target}"
    return None


def _serve(order: dict[str, Any]) -> None:
    """Be `vllm serve`; does not return."""
    for name in LATE:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in order["env"].items() if name in LATE})
    sys.argv = order["argv"]
    # The engine's process runs its parent's main file: let it be the one that it would be without us.
    sys.modules["__main__"].__file__ = sys.argv[0]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(importlib.import_module(MODULES[0]).main())


if __name__ == "__main__":
    main()
