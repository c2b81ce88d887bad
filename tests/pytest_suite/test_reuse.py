"""--cache and --resume as a user types them, with a stand-in server of the suite's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "faults/faulty_vllm.py"
LIST = "--config-list-file=models-small.txt"
PINNED = "0123456789abcdef0123456789abcdef01234567"


def served(fault: str, *, more: str = "") -> str:
    command = f"{sys.executable} {STAND_IN} {fault} {{model}} --port {{port}} {{args}}"
    return f'serve_command: "{command}"\n{more}'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_second_run_with_the_cache_asks_nothing(mini_suite) -> None:
    """With --cache readwrite the second run finds every answer, reaches the same verdict and says so."""
    mini_suite.add("A", more=served("none", more=f'server_args: "--revision {PINNED}"\n'))
    assert mini_suite.run(LIST, "--cache=readwrite").ret == 0
    first = mini_suite.result("A")
    assert first["reused"]["cache"]["misses"] == first["reused"]["cache"]["stored"] == 4
    assert mini_suite.run(LIST, "--cache=readwrite").ret == 0
    second = json.loads((mini_suite.records()[-1] / "A/result.json").read_text())
    if second["started"] == first["started"]:
        second = json.loads((mini_suite.records()[0] / "A/result.json").read_text())
    assert (second["reused"]["cache"]["hits"], second["reused"]["cache"]["misses"]) == (4, 0)
    assert (second["accuracy"], second["verdict"]) == (first["accuracy"], "pass")
    assert second["counts"]["reused"] == 4
    assert second["tokens_per_second"] in (0.0, None)


def test_other_arguments_ask_again(mini_suite) -> None:
    """An argument that may change answers makes it another server."""
    mini_suite.add("A", more=served("none", more=f'server_args: "--revision {PINNED}"\n'))
    assert mini_suite.run(LIST, "--cache=readwrite").ret == 0
    mini_suite.add("A", more=served("none", more=f'server_args: "--revision {PINNED} --quantization fp8"\n'))
    assert mini_suite.run(LIST, "--cache=readwrite").ret == 0
    misses = [
        json.loads((record / "A/result.json").read_text())["reused"]["cache"]["misses"]
        for record in mini_suite.records()
    ]
    assert misses == [4, 4]


def test_nothing_is_cached_unless_asked_for(mini_suite, own_cache: Path) -> None:
    """A gate asks the system under test: without --cache nothing is stored and nothing is found."""
    mini_suite.add("A", more=served("none", more=f'server_args: "--revision {PINNED}"\n'))
    assert mini_suite.run(LIST).ret == 0
    assert mini_suite.result("A")["reused"] == {}
    assert not (own_cache / "accuracy-gate" / "samples").exists()


def test_weights_that_are_not_pinned_are_not_cached(mini_suite) -> None:
    """A cache that might answer for other weights is refused, with the remedy."""
    mini_suite.add("A", more=served("none"))
    result = mini_suite.run(LIST, "--cache=readwrite")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--revision*"])


def test_a_run_that_died_is_finished_from_its_own_samples(mini_suite) -> None:
    """--resume takes over what was answered, asks the rest, and reaches the verdict of a whole run."""
    mini_suite.add("A", n=12, more=served("dies-half-way", more="max_concurrency: 1\n"))
    assert mini_suite.run(LIST).ret == 75
    died = mini_suite.records()[0]
    answered = len((died / "A/samples.jsonl").read_text().splitlines())
    assert 0 < answered < 12
    mini_suite.add("A", n=12, more=served("dies-half-way", more="max_concurrency: 1\n"))
    result = mini_suite.run(LIST, f"--resume={died.name}")
    finished = next(record for record in mini_suite.records() if record != died)
    stored = json.loads((finished / "A/result.json").read_text())
    assert stored["reused"]["resumed"]["samples"] == answered
    taken = [json.loads(line)["index"] for line in (finished / "A/samples.jsonl").read_text().splitlines()]
    assert len(taken) == len(set(taken)) >= answered
    assert result.ret in {0, 75}


def test_a_run_that_is_not_there_cannot_be_resumed(mini_suite) -> None:
    """A run id that nobody knows is a mistake, named before anything starts."""
    result = mini_suite.run(LIST, "--resume=20200101T000000Z-dead")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--resume 20200101T000000Z-dead*"])
