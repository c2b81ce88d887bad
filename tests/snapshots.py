"""Renderings kept as files: a change of what people read shows as a change of a file."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "unit" / "snapshots"
REWRITE = "ACCURACY_GATE_WRITE_SNAPSHOTS"


def assert_as_kept(name: str, text: str) -> None:
    """Compare with the kept file; with ACCURACY_GATE_WRITE_SNAPSHOTS=1 it is written anew, to be read in the diff."""
    path = FOLDER / name
    if os.environ.get(REWRITE) == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; if that is meant: {REWRITE}=1 pytest {__name__}"
