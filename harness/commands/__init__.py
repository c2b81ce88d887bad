"""One module for each command of `accuracy-gate` that is more than a call."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Where the suite lies: `conftest.py`, `configs/`, `.accuracy-gate/`."""
