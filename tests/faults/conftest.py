"""The fault table: what each row did, printed at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROWS: list[tuple[str, str, str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    facts = dict(report.user_properties)
    if "fault" in facts and (report.when == "call" or report.failed):
        outcome = "as stated" if report.passed else "NOT AS STATED"
        ROWS.append((str(facts["fault"]), str(facts["stated"]), str(facts.get("measured", "-")), outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROWS:
        return
    terminalreporter.section("faults")
    widths = [max(len(row[column]) for row in ROWS) for column in range(3)]
    for number, row in enumerate(ROWS, start=1):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        terminalreporter.write_line(f"{number:2}  {cells}  {row[3]}")
    well = sum(row[3] == "as stated" for row in ROWS)
    terminalreporter.write_line(f"{well} of {len(ROWS)} rows as stated")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Note a row's fault and stated verdict, then what was measured, for the table."""

    def note(fault: str | None = None, stated: str | None = None, *, measured: str | None = None) -> None:
        facts = {"fault": fault, "stated": stated, "measured": measured}
        request.node.user_properties.extend((name, value) for name, value in facts.items() if value is not None)

    return note
