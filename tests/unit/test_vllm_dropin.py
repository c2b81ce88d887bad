"""A folder of vLLM's own GSM8K configs, unchanged: the same tests, servers, prompts and gates as there.

ACCURACY_GATE_VLLM_CONFIGS names such a folder, vLLM's tests/evals/gsm8k/configs say; every list and YAML in it is
swept. What each must become is worked out here from PyYAML and shlex alone, as vLLM's test does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.backends.base import Sampling
from harness.commands.check_command import add_options, run
from harness.config import ModelConfig, load_config, load_config_file
from harness.config_lists import load_lists
from harness.errors import ConfigError
from harness.jsonl import Row
from harness.platforms import Platform, PlatformKind
from harness.servers.vllm import command, environment
from harness.tasks.gsm8k import WordProblems

VARIABLE = "ACCURACY_GATE_VLLM_CONFIGS"
FOLDER = Path(os.environ[VARIABLE]).resolve() if os.environ.get(VARIABLE) else None
OWN_VARIABLES = {"VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_PORT", "VLLM_API_KEY"}
STANDARD_FLAGS = ["--trust-remote-code", "--disable-uvicorn-access-log"]
DEFAULTS: dict[str, Any] = {
    "tolerance": 0.08,
    "max_tokens": 256,
    "use_chat_completions": False,
    "temperature": 0.0,
    "seed": 42,
    "gen_prefix": "",
    "request_timeout_seconds": 600,
    "startup_max_wait_seconds": 1200,
    "min_acceptance_length": None,
    "startup_rpc_checks": [],
}
"""What vLLM's test takes where a YAML is silent; it demands the other keys that it reads."""
TRAIN = [
    Row(question=f"How many are {n} and 1?", answer=f"{n} + 1 = {n + 1}\n#### {n + 1}", line_index=n) for n in range(8)
]
TEST = [Row(question="What is 1,000 less 1?", answer="#### 999", line_index=0)]


def swept(pattern: str) -> list[Any]:
    """Find what to sweep, or one skipped case that says what is wanted."""
    found = sorted(FOLDER.rglob(pattern)) if FOLDER else []
    if not found:
        return [pytest.param(None, marks=pytest.mark.skip(f"{VARIABLE} names no folder of vLLM's configs"), id="none")]
    return [pytest.param(path, id=str(path.relative_to(FOLDER or ""))) for path in found]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def lines_of(path: Path) -> list[str]:
    stripped = (line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A `vllm` command on PATH, and none beside this Python."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    return str(program)


@pytest.mark.parametrize("path", swept("*.txt"))
def test_every_list_loads_with_vllms_ids(path: Path) -> None:
    """The files in their order; an id is the stem, or the path less its suffix where a line names a sub-folder."""
    lines = lines_of(path)
    entries = load_lists([path])
    assert [entry.path for entry in entries] == [path.parent / line for line in lines]
    assert [entry.id for entry in entries] == [line.removesuffix(".yaml").removesuffix(".yml") for line in lines]
    flat = [(entry.id, entry.path.stem) for entry, line in zip(entries, lines, strict=True) if "/" not in line]
    assert all(config_id == stem for config_id, stem in flat)


@pytest.mark.parametrize("path", swept("*.y*ml"))
def test_every_config_means_what_it_means_to_vllm(path: Path, vllm: str, tmp_path: Path) -> None:
    """Command line, environment, gates, requests and defaults; a file of comments alone is an error that says so."""
    expected = read(path)
    if expected is None:
        with pytest.raises(ConfigError, match="the file is empty"):
            load_config(path)
        return
    same_meaning(path, expected, vllm, tmp_path)


def same_meaning(path: Path, expected: dict[str, Any], vllm: str, scratch: Path) -> None:
    """Compare one config with what vLLM's test would do."""
    file = load_config_file(path)
    config = file.config
    same_server(config, expected, vllm)
    for key in ("model_name", "accuracy_threshold", "num_questions", "num_fewshot"):
        assert getattr(config, key) == expected[key], key
    for key, default in DEFAULTS.items():
        assert getattr(config, key) == expected.get(key, default), key
    assert float(config.floor) == pytest.approx(config.accuracy_threshold - config.tolerance, abs=1e-12)
    timeout = expected.get("request_timeout_seconds", 600)
    on_rocm = file.on(Platform(kind=PlatformKind.ROCM, archs=("gfx942",)))
    assert on_rocm.request_timeout_seconds == expected.get("rocm_request_timeout_seconds", timeout)
    assert file.on(Platform(kind=PlatformKind.CUDA, archs=("9.0",))).request_timeout_seconds == timeout
    same_request(path, expected, scratch)


def same_server(config: ModelConfig, expected: dict[str, Any], vllm: str) -> None:
    words = [*shlex.split(expected.get("server_args") or ""), *STANDARD_FLAGS]
    ours = ["--host", "127.0.0.1", "--port", "8001"]
    assert list(command(config, config.model_name, 8001)) == [vllm, "serve", expected["model_name"], *words, *ours]
    variables = environment(config, {}, "key", 9000)
    wanted = {name: str(value) for name, value in (expected.get("env") or {}).items()}
    assert variables.keys() == OWN_VARIABLES | wanted.keys()
    assert {name: variables[name] for name in wanted} == wanted


def same_request(path: Path, expected: dict[str, Any], scratch: Path) -> None:
    """Compare a question as it is asked once the YAML says `scorer: last-number`: prompt, stop strings, sampling."""
    copy = scratch / path.name
    copy.write_bytes(path.read_bytes().rstrip() + b"\nscorer: last-number\n")
    config = load_config(copy)
    shots = TRAIN[: expected["num_fewshot"]]
    request = WordProblems(name="gsm8k", config=config, problems=TEST, exemplars=shots).requests[0]
    prefix = expected.get("gen_prefix", "")
    blocks = [f"Question: {row.question}\nAnswer:{prefix} {row.answer}\n\n" for row in shots]
    text = "".join(blocks) + f"Question: {TEST[0].question}\nAnswer:{prefix}"
    prompt = request.prompt if isinstance(request.prompt, str) else [(m.role, m.content) for m in request.prompt]
    assert prompt == ([("user", text)] if expected.get("use_chat_completions") else text)
    assert request.sampling == Sampling(
        max_tokens=expected.get("max_tokens", 256),
        temperature=expected.get("temperature", 0.0),
        seed=expected.get("seed", 42),
        stop=("Question", "Assistant:", "<|separator|>"),
    )


@pytest.mark.skipif(FOLDER is None, reason=f"{VARIABLE} names no folder of vLLM's configs")
def test_check_finds_the_orphans_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """`accuracy-gate check` names each YAML that stands in no list, and nothing real is called a mistake."""
    assert FOLDER is not None
    named = {path.parent / line for path in FOLDER.rglob("*.txt") for line in lines_of(path)}
    expected = {path for path in FOLDER.rglob("*.y*ml") if path not in named}
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert run(parser.parse_args([str(FOLDER)])) == 0
    printed = capsys.readouterr().out.splitlines()
    orphans = [line.partition(":1:1: warning: no list names")[0] for line in printed if "no list names" in line]
    assert orphans == sorted(map(str, expected), key=Path)
    empty = [str(path) for path in sorted(expected) if read(path) is None]
    assert [line.partition(":1: ")[0] for line in printed if "the file is empty" in line] == empty


HEAD = "model_name: org/M\naccuracy_threshold: 0.92\nnum_questions: 1319\nnum_fewshot: 5\n"
JSON = """--speculative-config '{"method":"mtp",\n  "model":"org/D",\n  "num_speculative_tokens":3}'"""
WRITTEN = {
    "JSON over folded lines": f"{HEAD}server_args: >-\n  --max-model-len 4096\n  {JSON}\n",
    "JSON over literal lines": f"{HEAD}server_args: |\n  --max-model-len 4096\n  {JSON}\n",
    "JSON over quoted lines": f"{HEAD}server_args: '--max-model-len 4096\n  {JSON.replace(chr(39), chr(39) * 2)}'\n",
    "words over plain lines": f"{HEAD}server_args: --enforce-eager\n  --max-model-len 4096\n  --block-size=256\n",
    "a backslash and quotes": HEAD + r"""server_args: "--a 'b c' --d \"e f\" --g h\\ i" """ + "\n",
    "dots and underscores": f"{HEAD}server_args: --attention_config.indexer_kv_dtype=mxfp4 --max_model_len 1\n",
    "comments all over": f"# a\n\n{HEAD}# b\nserver_args: --max-model-len 4096 # not -tp 2\n# c\n  # d\n",
    "trailing spaces": f"{HEAD}use_chat_completions: true  \nserver_args: >-  \n  --a 1  \n  --b 2 \n\nenv: \n  A: B\n",
    "no server_args": f"{HEAD}env: {{VLLM_USE_DEEP_GEMM: '1', A: DEBUG}}\n",
    "every key": (
        f"{HEAD}tolerance: 0.03\nmax_tokens: 512\ntemperature: 0.6\nseed: 7\ngen_prefix: ' Let us see.'\n"
        "request_timeout_seconds: 1200\nrocm_request_timeout_seconds: 1800\nstartup_max_wait_seconds: 2400\n"
        "min_acceptance_length: 1.2\nstartup_rpc_checks: [check_slots]\nuse_chat_completions: true\n"
        "server_args: --spec-method ngram\n"
    ),
}
EDITORS = {
    "as it is": lambda text: text,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "byte order mark": lambda text: "\ufeff" + text,
    "no final newline": lambda text: text.rstrip(),
    "all at once": lambda text: "\ufeff" + text.rstrip().replace("\n", "\r\n"),
}


@pytest.mark.parametrize("edit", EDITORS.values(), ids=EDITORS)
@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_a_config_means_the_same_however_it_is_written(
    tmp_path: Path, vllm: str, text: str, edit: Callable[[str], str]
) -> None:
    """The same words and values as PyYAML and shlex make of it, whatever the editor."""
    path = tmp_path / "c.yaml"
    path.write_bytes(edit(text).encode())
    (tmp_path / "scratch").mkdir()
    same_meaning(path, yaml.safe_load(text), vllm, tmp_path / "scratch")


LISTS = {
    "tabs and leading blanks": ("\tA.yaml\t\n \n  B.yaml\n", ["A", "B"]),
    "CRLF with comments": ("\ufeff# GFX950\r\n  # more\r\nA.yaml \r\nB.yaml", ["A", "B"]),
    "a list above its files": ("moe/A.yaml\nmoe/deep/B.yaml  \n", ["moe/A", "moe/deep/B"]),
}


@pytest.mark.parametrize(("text", "ids"), LISTS.values(), ids=LISTS)
def test_a_list_is_read_line_by_line(tmp_path: Path, text: str, ids: Sequence[str]) -> None:
    """Blank space at either end, empty lines and comments say nothing."""
    for config_id in ids:
        path = tmp_path / f"{config_id}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD)
    (tmp_path / "l.txt").write_bytes(text.encode())
    assert [entry.id for entry in load_lists([tmp_path / "l.txt"])] == ids


def test_a_listed_file_of_comments_is_an_error(tmp_path: Path) -> None:
    """A config that was commented out and is still listed is named; vLLM's test would fail in its middle."""
    (tmp_path / "A.yaml").write_text("# " + HEAD.replace("\n", "\n# "))
    (tmp_path / "l.txt").write_text("A.yaml\n")
    with pytest.raises(ConfigError, match=r"A\.yaml:1: the file is empty"):
        load_lists([tmp_path / "l.txt"])
