"""The suite that users run: one test per config of the lists named with --config-list-file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.config_lists import ListedConfig
from harness.pipeline import evaluate, raise_for_verdict
from harness.records import EvalResult, RunRecord
from harness.reports.terminal import LiveLine
from harness.serving import RunOptions, Serving


def test_accuracy(
    listed: ListedConfig,
    run_record: RunRecord,
    run_options: RunOptions,
    serving: Serving,
    live_line: LiveLine,
    record_result: Callable[[EvalResult], None],
) -> None:
    """The model answers at least as well as its config says."""
    if listed.skip is not None:
        pytest.skip(listed.skip)
    if listed.unmet is not None and not run_options.require_gpus:
        pytest.skip(listed.unmet)
    result = evaluate(listed, run_record.config(listed.folder), run_options, live_line, serving)
    record_result(result)
    raise_for_verdict(result)
