"""Pytest plugin: one server for all tasks of a config, while their tests follow each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.config_lists import ListedConfig
from harness.records import RunRecord
from harness.serving import RunOptions, Serving


class KeptServers:
    """Gives each test the server of its config, and stops it unless the next test asks the same one."""

    def __init__(self) -> None:
        self._serving: Serving | None = None
        self._id: str | None = None
        self._next_id: str | None = None
        self._kept: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> None:
        callspec = getattr(nextitem, "callspec", None)
        self._next_id = callspec.params["listed"].server_id if callspec and "listed" in callspec.params else None

    @pytest.fixture
    def serving(self, listed: ListedConfig, run_record: RunRecord, run_options: RunOptions) -> Iterator[Serving]:
        """The config's server, not yet started where its task is the first."""
        if self._serving is None or self._id != listed.server_id:
            self.stop()
            log_path = run_record.folder / listed.server_id / "server.log"
            self._serving, self._id = Serving(listed.config, log_path, run_options), listed.server_id
        yield self._serving
        if self._next_id != self._id:
            self.stop()

    def pytest_unconfigure(self) -> None:
        # After -x or an interruption the next test that was announced does not come.
        self.stop()

    def stop(self) -> None:
        """Stop whatever is kept."""
        serving, self._serving, self._id = self._serving, None, None
        if serving is None:
            return
        serving.stop()
        if serving.kept is not None:
            self._kept.append(serving.kept)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._kept:
            terminalreporter.write_line(f"kept: {line}")
