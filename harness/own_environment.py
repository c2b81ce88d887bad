"""This process's environment, which an engine in this process changes, and which servers are started with unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

_as_before: list[dict[str, str]] = []
"""The environment at the start of each block that is open."""


@contextmanager
def changed_environment(variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Set variables until the block is left, and take back whatever else is set meanwhile.

    What is imported sets variables for good: torch sets TORCHINDUCTOR_CACHE_DIR, so that every server started later
    took its compile cache for the user's choice and compiled anew; what vLLM sets would change the next engine.
    """
    before = dict(os.environ)
    _as_before.append(before)
    try:
        os.environ.update(variables)
        yield
    finally:
        _as_before.remove(before)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def users_environment() -> dict[str, str]:
    """Copy the environment as it was given to this process, whatever an engine in it has set for itself."""
    return dict(_as_before[0] if _as_before else os.environ)
