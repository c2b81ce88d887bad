"""The suite that users run: one test per config of the lists named with --config-list-file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.config_lists import ListedConfig
from harness.pipeline import RunOptions, evaluate, raise_for_verdict
from harness.records import EvalResult, RunRecord
from harness.reports.terminal import LiveLine


def test_accuracy(
    listed: ListedConfig,
    run_record: RunRecord,
    run_options: RunOptions,
    live_line: LiveLine,
    record_result: Callable[[EvalResult], None],
) -> None:
    """The model answers at least as well as its config says."""
    if listed.skip is not None:
        pytest.skip(listed.skip)
    if listed.unmet is not None and not run_options.require_gpus:
        pytest.skip(listed.unmet)
    result = evaluate(listed, run_record.config(listed.id), run_options, live_line)
    record_result(result)
    raise_for_verdict(result)
