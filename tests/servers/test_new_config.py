"""`accuracy-gate new`: a config measured on a real server, and nothing written where nothing can be said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import load_config
from harness.config_lists import load_lists

STAND_IN = Path(__file__).resolve().parents[1] / "faults/faulty_vllm.py"


def new(folder: Path, fault: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder with a list of one config."""
    (folder / "old.yaml").write_text("model_name: old\naccuracy_threshold: 0.5\n")
    (folder / "list.txt").write_text("old.yaml")
    command = [sys.executable, "-m", "harness.cli", "new", "stand-in", "--task", "smoke", "--list", "list.txt"]
    serve = f"{sys.executable} {STAND_IN} {fault} {{model}} --port {{port}} {{args}}"
    return subprocess.run(
        [*command, "--serve-command", serve, *more], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_new_config_is_measured_explained_and_listed(tmp_path: Path) -> None:
    """Three runs on one server give threshold and tolerance, with the reason in a comment; the list gains a line."""
    done = new(tmp_path, "none", "--server-args", "--max-model-len 4096", "--env", "A=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy 1.0000 (20 of 20)") == 3
    text = (tmp_path / "stand-in.yaml").read_text()
    config = load_config(tmp_path / "stand-in.yaml")
    assert (config.accuracy_threshold, config.server_args, config.env) == (1.0, "--max-model-len 4096", {"A": "1"})
    assert 0 < config.tolerance < 0.5
    assert "1.0000, 1.0000, 1.0000 over 20 questions, 5 shots." in text
    assert "3.5 times the run-to-run deviation (0.0000; 0 questions" in text
    assert (tmp_path / "list.txt").read_text() == "old.yaml\nstand-in.yaml\n"
    assert [entry.id for entry in load_lists([tmp_path / "list.txt"])] == ["old", "stand-in"]
    assert len(list(tmp_path.rglob("server.json"))) == 1
    assert len(list(tmp_path.rglob("samples.jsonl"))) == 3


def test_the_written_config_passes_its_own_gate(tmp_path: Path) -> None:
    """What was measured is met when it is run as a gate."""
    assert new(tmp_path, "none").returncode == 0
    (tmp_path / "list.txt").write_text("stand-in.yaml\n")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--config-list-file={tmp_path / 'list.txt'}"]
    done = subprocess.run(
        [*command, f"--results-dir={tmp_path / 'r'}"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


REFUSED = {
    "failed requests": ("500-one-in-ten", 75, "requests got no answer"),
    "no server": ("exits-0", 75, "exited with code 0"),
}


@pytest.mark.parametrize(("fault", "code", "expected"), REFUSED.values(), ids=REFUSED)
def test_nothing_is_derived_from_an_outage(tmp_path: Path, fault: str, code: int, expected: str) -> None:
    """Runs with failed requests say nothing about the model, so no config is written and no list is touched."""
    done = new(tmp_path, fault)
    assert done.returncode == code
    assert expected in done.stderr
    assert not (tmp_path / "stand-in.yaml").exists()
    assert (tmp_path / "list.txt").read_text() == "old.yaml"


MISTAKES = {
    "the file exists": (["--name", "old"], "old.yaml exists: choose another --name"),
    "one run": (["--runs", "1"], "--runs 1: noise shows from two runs on"),
    "a variable without value": (["--env", "A"], "--env A: must be NAME=VALUE"),
    "no such list": (["--list", "zzz.txt"], "zzz.txt: no such file"),
}


@pytest.mark.parametrize(("more", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found_before_anything_starts(tmp_path: Path, more: list[str], expected: str) -> None:
    """Exit 4 and one line; no server, no record."""
    done = new(tmp_path, "none", *more)
    assert done.returncode == 4
    assert expected in done.stderr
    assert not (tmp_path / "results").exists()
