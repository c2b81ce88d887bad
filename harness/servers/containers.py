"""Servers in containers: known by their name, and stopped by it, for their processes are a daemon's children."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Sequence
from pathlib import PurePath

from harness.errors import ServerError

PROGRAMS = frozenset({"docker", "podman", "nerdctl"})
REMOVE_SECONDS = 60


def is_container(words: Sequence[str]) -> bool:
    """Tell whether a command line starts a container."""
    return PurePath(words[0]).name in PROGRAMS and "run" in words[1:]


def new_name() -> str:
    """Make a name that no other container has."""
    return f"accuracy-gate-{secrets.token_hex(6)}"


def remove_container(program: str, name: str) -> None:
    """End a container and everything in it; one that is gone already is no fault.

    Raises ServerError where the program cannot say that it is gone.
    """
    command = [program, "rm", "--force", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REMOVE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{' '.join(command)}: {error}") from error
    gone = "no such container" in done.stderr.lower() or "no container with" in done.stderr.lower()
    if done.returncode != 0 and not gone:
        raise ServerError(f"{' '.join(command)}: exited with code {done.returncode}: {done.stderr.strip()}")
