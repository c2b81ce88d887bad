"""The user's cache folder: downloaded questions and converted models."""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import DataUnavailable


def cache_root() -> Path:
    """Name the cache folder, whether it exists or not: $XDG_CACHE_HOME or ~/.cache, then `accuracy-gate`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if Path(base).is_absolute():
        return Path(base) / "accuracy-gate"
    try:
        return Path.home() / ".cache" / "accuracy-gate"
    except RuntimeError as error:
        raise DataUnavailable("there is no home folder for the cache: set XDG_CACHE_HOME") from error
