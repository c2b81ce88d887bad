"""When a server's process is started ahead of the first test, and for which config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.ahead import Ahead
from harness.config import ModelConfig
from harness.config_lists import load_lists
from harness.gpus.inventory import Gpu
from harness.pytest_servers import KeptServers
from harness.serving import RunOptions
from harness.suite import Suite

CONFIG = "model_name: {name}\ntask: smoke\naccuracy_threshold: 0.9\ntolerance: 0.0\n"


class Noted(Ahead):
    """Notes for whom a process would be made ready."""

    def __init__(self) -> None:
        super().__init__(prestart=True)
        self.models: list[str] = []

    def ready_for(self, config: ModelConfig, *, serve_command: str | None, gpus: Sequence[Gpu]) -> None:
        self.models.append(config.model_name)


def suite_of(folder: Path, ahead: Ahead | None, base_url: str | None = None) -> Suite:
    """A list of three configs, the first of them skipped."""
    for name in ("skipped", "a", "b"):
        (folder / f"{name}.yaml").write_text(CONFIG.format(name=name))
    listed = folder / "list.txt"
    listed.write_text("skipped.yaml\na.yaml\nb.yaml\n")
    entries = [replace(entry, skip="no" if entry.id == "skipped" else None) for entry in load_lists([listed])]
    return Suite(lists=(listed,), listed=tuple(entries), options=RunOptions(ahead=ahead, base_url=base_url))


@pytest.mark.parametrize(
    ("worker", "dist", "base_url", "models"),
    [
        pytest.param(None, "no", None, ["a"], id="without workers the first"),
        pytest.param("gw1", "no", None, ["b"], id="each worker another"),
        pytest.param("gw5", "no", None, ["b"], id="more workers than configs"),
        pytest.param("big-gpu", "no", None, ["a"], id="a worker with a name of its own"),
        pytest.param(None, "load", None, [], id="who deals tests out starts none"),
        pytest.param(None, "no", "http://127.0.0.1:1", [], id="a server that already runs"),
    ],
)
def test_imports_begin_before_tests_are_collected(
    worker: str | None,
    dist: str,
    base_url: str | None,
    models: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever runs tests starts a process as its session begins, for a config that is not skipped; nobody else does."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    ahead = Noted()
    session: Any = SimpleNamespace(config=SimpleNamespace(getoption=lambda name, default: dist))
    KeptServers(suite_of(tmp_path, ahead, base_url)).pytest_sessionstart(session)
    assert ahead.models == models
