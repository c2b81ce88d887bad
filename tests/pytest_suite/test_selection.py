"""What runs: the suite only when asked for, and a wrong list before anything starts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_a_list_and_no_path_runs_the_suite_alone(mini_suite) -> None:
    """With --config-list-file only the accuracy suite is collected."""
    mini_suite.add("sub/B")
    mini_suite.list("A", "sub/B")
    result = mini_suite.run("--collect-only", "-q", "--config-list-file=models-small.txt")
    assert ids(result) == [f"tests/test_accuracy.py::test_accuracy[{name}]" for name in ("A", "sub/B")]
    assert not mini_suite.records()


def test_plain_pytest_runs_the_projects_own_tests(mini_suite) -> None:
    """Without a list no server is started for somebody's model, and no record is made."""
    for arguments in ((), ("tests",), ("tests/test_own.py",)):
        assert ids(mini_suite.run("--collect-only", "-q", *arguments)) == ["tests/test_own.py::test_own"]
    mini_suite.run().assert_outcomes(passed=1)
    assert not (mini_suite.path / "results").exists()


def test_the_suites_file_alone_takes_the_default_list(mini_suite) -> None:
    """`pytest tests/test_accuracy.py` reads configs/models-small.txt."""
    result = mini_suite.run("--collect-only", "-q", "tests/test_accuracy.py")
    assert ids(result) == ["tests/test_accuracy.py::test_accuracy[A]"]


def test_a_keyword_chooses_among_configs(mini_suite) -> None:
    """`-k` matches ids."""
    mini_suite.add("Qwen3-0.6B-FP8")
    mini_suite.list("A", "Qwen3-0.6B-FP8")
    result = mini_suite.run("--collect-only", "-q", "tests/test_accuracy.py", "-k", "Qwen3")
    assert ids(result) == ["tests/test_accuracy.py::test_accuracy[Qwen3-0.6B-FP8]"]


def test_several_lists_are_one_run(mini_suite) -> None:
    """--config-list-file may be given more than once."""
    mini_suite.add("B")
    mini_suite.list("B", file="more.txt")
    lists = ("--config-list-file=models-small.txt", "--config-list-file=more.txt")
    result = mini_suite.run("--collect-only", "-q", *lists)
    assert len(ids(result)) == 2


WRONG = {
    "no such list": (["--config-list-file=zzz.txt"], "zzz.txt: no such file; tried "),
    "a list named twice": (["--config-list-file=models-small.txt"] * 2, "this list is named twice"),
    "a config that is wrong": (["--config-list-file=bad.txt"], "bad.yaml:6:1: unknown key tolerence; did you mean"),
    "a config that is missing": (["--config-list-file=missing.txt"], "missing.txt:1:1: gone.yaml: no such file"),
    "an empty list": (["--config-list-file=empty.txt"], "empty.txt: this list names no config"),
    "a part of the list that is none": (["--config-list-file=models-small.txt", "--configs=Z"], "Z"),
    "both ways to choose": (
        ["--config-list-file=models-small.txt", "--configs=A", "--shard=1/2"],
        "--configs and --shard both choose configs: give one",
    ),
    "a shard beyond the last": (["--config-list-file=models-small.txt", "--shard=3/2"], "--shard"),
    "a count below 0": (["--config-list-file=models-small.txt", "--prefetch=-1"], "--prefetch -1"),
    "a base url that is none": (["--config-list-file=models-small.txt", "--base-url=ftp://x"], "--base-url: 'ftp://x'"),
    "a server command without a port": (
        ["--config-list-file=models-small.txt", "--serve-command=vllm serve {model} {args}"],
        "--serve-command: must hold {port}",
    ),
    "a results folder that is a file": (
        ["--config-list-file=models-small.txt", "--base-url=http://127.0.0.1:9", "--results-dir=pyproject.toml"],
        "pyproject.toml: cannot be written: Not a directory",
    ),
    "own questions that are wrong": (["--config-list-file=own.txt"], "q.jsonl:2"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_exits_4_before_anything_starts(mini_suite, arguments: list[str], message: str) -> None:
    """One line says what is wrong; no test runs and no record is left."""
    mini_suite.add("bad", more="tolerence: 0.1\n")
    mini_suite.list("bad", file="bad.txt")
    mini_suite.list("gone", file="missing.txt")
    mini_suite.list(file="empty.txt")
    (mini_suite.path / "configs/own.yaml").write_text("model_name: m\naccuracy_threshold: 0.5\ndataset: q.jsonl\n")
    (mini_suite.path / "configs/q.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "x"}\n')
    mini_suite.list("own", file="own.txt")
    result = mini_suite.run(*arguments)
    assert result.ret == 4
    errors = [line for line in result.errlines if line]
    assert errors[0].startswith("ERROR: ")
    assert any(message in line for line in errors)
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    assert not mini_suite.records()


def test_no_vllm_is_a_mistake_named_before_the_first_test(mini_suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no `vllm` command the error says how to get one; collecting works without."""
    python = mini_suite.path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of the Python that the link leads to
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--config-list-file=models-small.txt"]
    for more, code in ((["--collect-only", "-q"], 0), ([], 4)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
    assert "there is no `vllm` command here" in done.stderr


def test_collecting_is_quick_and_imports_nothing_heavy() -> None:
    """Collecting the real default list loads none of vllm, torch and transformers."""
    program = (
        "import sys, pytest\n"
        "arguments = ['--collect-only', '-q', '--config-list-file=models-small.txt', '-p', 'no:cacheprovider']\n"
        "code = pytest.main(arguments)\n"
        "heavy = {'vllm', 'torch', 'transformers', 'numpy', 'openai'} & set(sys.modules)\n"
        "sys.exit(f'heavy: {heavy}' if heavy else code)\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 tests collected" in done.stdout
    assert time.monotonic() - started < 15, "an import of torch or vllm alone takes longer than this on a busy machine"


def test_every_config_of_the_shipped_lists_is_listed() -> None:
    """No shipped YAML is an orphan, and every shipped list loads."""
    from harness.config_lists import load_lists

    lists = sorted((ROOT / "configs").glob("*.txt"))
    listed = {entry.path.resolve() for path in lists for entry in load_lists([path])}
    assert listed == set((ROOT / "configs").rglob("*.yaml"))
    assert all(load_config(path) for path in listed)
