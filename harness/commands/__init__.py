"""One module for each command of `accuracy-gate` that is more than a call."""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Where the suite lies: `conftest.py`, `configs/`, `.accuracy-gate/`."""


def positive(text: str) -> float:
    """Read an option's number, which must lie above 0 and be finite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number
