"""What the project's own tests share: where GSM8K lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def gsm8k_folder() -> Path | None:
    """Find the folder holding GSM8K's train.jsonl and test.jsonl, or None."""
    candidates = [Path(value) for value in [os.environ.get("ACCURACY_GATE_DATA")] if value]
    candidates += [ROOT.parent / "shared" / "gsm8k"]
    return next((c for c in candidates if (c / "test.jsonl").is_file() and (c / "train.jsonl").is_file()), None)


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with the real GSM8K files; a test that asks for it is skipped where they are absent."""
    folder = gsm8k_folder()
    if folder is None:
        pytest.skip("GSM8K is not here: put train.jsonl and test.jsonl in a folder and name it in ACCURACY_GATE_DATA")
    return folder
