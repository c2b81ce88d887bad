"""A copy of the suite in a folder of its own, run by a pytest of its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "model_name: m\ntask: smoke\naccuracy_threshold: {threshold}\ntolerance: 0.0\nnum_questions: {n}\n{more}"


@dataclass
class MiniSuite:
    """The suite's files in a temporary folder."""

    pytester: pytest.Pytester

    @property
    def path(self) -> Path:
        return self.pytester.path

    def add(self, name: str, *, threshold: float = 0.5, n: int = 4, more: str = "") -> None:
        path = self.path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIG.format(threshold=threshold, n=n, more=more))

    def list(self, *names: str, file: str = "models-small.txt") -> None:
        (self.path / "configs" / file).write_text("".join(f"{name}.yaml\n" for name in names))

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    def records(self) -> list[Path]:
        return sorted(path.parent for path in self.path.glob("results/*/run.json"))

    def result(self, config_id: str) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.records()[-1] / config_id / "result.json").read_text())
        return stored

    def run_json(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.records()[-1] / "run.json").read_text())
        return stored


@pytest.fixture
def mini_suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> MiniSuite:
    for name in (
        "PYTEST_XDIST_WORKER",
        "CI",
        "ACCURACY_GATE_API_KEY",
        "OPENAI_API_KEY",
        "VLLM_API_KEY",
        "PYTEST_ADDOPTS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCURACY_GATE_LEASES", str(pytester.mkdir("leases")))
    suite = MiniSuite(pytester)
    shutil.copy(ROOT / "conftest.py", suite.path)
    (suite.path / "tests").mkdir()
    shutil.copy(ROOT / "tests/test_accuracy.py", suite.path / "tests")
    (suite.path / "tests/test_own.py").write_text("def test_own():\n    pass\n")
    (suite.path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\ntestpaths = ["tests"]\nempty_parameter_set_mark = "fail_at_collect"\n'
        'filterwarnings = ["error"]\n'
    )
    suite.add("A")
    suite.list("A")
    return suite
