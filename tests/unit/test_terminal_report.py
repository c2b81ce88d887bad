"""The terminal's table, what explains a failure, and the live line."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
import time
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import HOSTILE, OUTAGE, PASS, REGRESSION, finish, mixed_run, sample, write_config
from snapshots import assert_as_kept

from harness.errors import DataUnavailable
from harness.gates.threshold import Counts, Verdict
from harness.records import Row, RunRecord
from harness.reports.documents import read_run
from harness.reports.explain import explain, remarks, shortened
from harness.reports.live import LiveLine
from harness.reports.terminal import LABELS, notes, run_lines, shown_width, table
from harness.tasks.base import Status

ROW = Row(
    config_id="A",
    verdict=Verdict.PASS,
    reason="",
    accuracy=0.8125,
    low=0.790,
    high=0.833,
    floor=0.74,
    graded=1319,
    unanswered=0,
    truncated=0,
    errors=0,
    acceptance_length=None,
    tokens_per_second=5123.4,
    questions_per_second=148.0,
    startup=34.2,
    scorer="numeric",
    correct_by_scorer={"numeric": 1072, "last-number": 1072},
)
NOT_JUDGED: dict[str, Any] = {
    "accuracy": None,
    "low": 0.0,
    "high": 1.0,
    "graded": 0,
    "tokens_per_second": None,
    "startup": None,
}
ROWS = (
    replace(ROW, config_id="DeepSeek-Coder-V2-Lite-Instruct-FP8", change={"accuracy": -0.0031}),
    replace(ROW, config_id="Qwen3-0.6B-FP8", verdict=Verdict.REGRESSION, accuracy=0.2108, low=0.19, high=0.234),
    replace(ROW, config_id="Qwen3-0.6B-speculative", acceptance_length=2.333, truncated=12, unanswered=3),
    replace(ROW, config_id="gpu/unreachable", verdict=Verdict.INFRASTRUCTURE, **NOT_JUDGED, errors=8),
    replace(
        ROW,
        config_id="choice",
        scorer="per_byte",
        graded=40,
        floor=0.6,
        correct_by_scorer={"per_byte": 32, "sum": 30},
        measures={"margin_per_byte": 0.1234, "margin_low": 0.1, "margin_high": 0.1468},
    ),
    replace(
        ROW,
        config_id="perplexity",
        accuracy=None,
        floor=None,
        graded=30,
        measures={"bits_per_byte": 1.0123},
        change={"score": 0.002},
        correct_by_scorer={},
    ),
)
SKIPPED = {"cuda-only": "needs 2 GPUs, 0 here", "Meta-Llama-3-8B": "no FP8 \x1b[31m on this platform"}


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_reads_as_kept(columns: int) -> None:
    """At 80 and 120 columns and without colour everything is there, and no line is too wide."""
    lines = [*table(ROWS, columns=columns, skipped=SKIPPED), *notes(ROWS)]
    assert_as_kept(f"table-{columns}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("columns", range(60, 200, 7))
def test_no_figure_is_lost_and_no_line_too_wide(columns: int) -> None:
    """Whatever the width, every figure of every config is shown, on its line or the one below."""
    lines = table(ROWS, columns=columns, skipped=SKIPPED)
    assert max(map(shown_width, lines)) <= columns
    text = "\n".join(lines)
    for figure in ("0.2108", "0.190-0.234", "0.740", "-0.0031", "1319", "2.33", "12", "1.0123 b/B", "+0.0020", "34s"):
        assert figure in text
    assert "needs 2 GPUs, 0 here" in " ".join(text.split())


def test_a_column_that_no_config_has_is_left_out() -> None:
    """Acceptance length and change cost no room where there are none, and all fits on one line."""
    heading, *lines = table([ROW], columns=100)
    assert len(lines) == 1
    assert {"accept", "change"}.isdisjoint(heading.split())
    assert {"accuracy", "unans", "trunc", "err", "tok/s", "start", "verdict"} <= set(heading.split())


@pytest.mark.parametrize(
    "ids",
    [
        [f"a-model-whose-name-goes-on-and-on-{end}-and-on-until-it-is-too-wide" for end in ("fp8", "fp4", "int8")],
        [f"{start}-model-whose-name-goes-on-and-on-and-on-until-it-is-far-too-wide" for start in "abc"],
        [f"a-model-whose-name-goes-on-and-on-and-on-until-it-is-far-too-wide-{end}" for end in "abc"],
        ["模型" * 20 + end for end in "abc"],
    ],
    ids=["differ in the middle", "differ at the start", "differ at the end", "wide letters"],
)
def test_long_ids_are_shortened_and_stay_different(ids: list[str]) -> None:
    """Two configs never look the same, and figures stay in their columns."""
    heading, *lines = table([replace(ROW, config_id=name) for name in ids], columns=80)
    firsts = [line for line in lines if not line.startswith(" ")]
    assert len({line.split()[0] for line in firsts}) == len(ids)
    assert {shown_width(line) for line in firsts} == {shown_width(firsts[0])}
    accuracy = {shown_width(line[: line.index("0.8125")]) + len("0.8125") for line in firsts}
    assert accuracy == {heading.index("accuracy") + len("accuracy")}


def test_ids_that_fit_are_never_shortened() -> None:
    """Columns of less use go first."""
    name = "a-name-of-forty-letters-which-is-a-lot-0"
    line = next(line for line in table([replace(ROW, config_id=name)], columns=80) if name in line)
    assert line.endswith("pass")


def test_verdicts_alone_are_coloured() -> None:
    """Colour comes from the caller, for each verdict, and changes no column."""
    painted: list[object] = []

    def paint(text: str, outcome: object) -> str:
        painted.append(outcome)
        return f"<{text}>"

    lines = table(ROWS, columns=120, skipped=SKIPPED, paint=paint)
    assert [line.replace("<", "").replace(">", "") for line in lines] == table(ROWS, columns=120, skipped=SKIPPED)
    assert painted == [*(row.verdict for row in ROWS), "skipped", "skipped"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return mixed_run(tmp_path)


def test_a_whole_run_reads_as_kept(run: Path) -> None:
    """Table and explanations of a pass, a regression and an outage, at 80 columns."""
    text = "\n".join(run_lines(read_run(run, base=run.parent))) + "\n"
    assert_as_kept("run-80.txt", text.replace(run.name, "RUN"))


def test_a_regression_says_what_one_must_know(run: Path) -> None:
    """How much worse, whether by chance, where to look, what it answered before, what to run."""
    text = "\n".join(explain(run / REGRESSION, columns=240))
    assert "is 0.2115 below the floor 0.72: 30 of 59 right (95% interval 0.3844 to 0.6316)" in text
    assert "no: the whole interval is below the floor" in text
    assert "against the baseline (1 run) -0.0339, p = 0.31: 3 questions worse, 1 better" in text
    assert "the model, or how it is served: 1 of 60 requests failed" in text
    assert re.search(r"question 10: gold 1700, said 1,701, before The baseline.*: A crate holds 17 boxes", text)
    assert "1 truncated at max_tokens, 1 without an answer" in text
    assert "-k '[cpu/worse]'" in text


def test_a_failure_takes_about_ten_remarks(run: Path) -> None:
    """A person reads it within a minute: at 120 columns no failure takes more than 16 lines."""
    document = read_run(run)
    for config in document.failed:
        assert 5 <= len(remarks(config, document)) <= 10
        assert len(explain(run / config.row.config_id, columns=120)) <= 16


def test_a_drop_within_the_interval_is_called_perhaps_noise(tmp_path: Path) -> None:
    """Where the interval reaches the floor, that is said, with the drop that so many questions show."""
    record = RunRecord.create(tmp_path)
    write_config(record, "near", [sample(index, right=index < 40) for index in range(60)])
    finish(record, ["near"])
    text = " ".join(" ".join(explain(record.folder / "near")).split())
    assert "maybe: the interval reaches the floor" in text
    assert "60 questions show a drop of" in text


def test_truncation_that_may_explain_a_failure_is_said(tmp_path: Path) -> None:
    """Replies cut at max_tokens that would meet the floor, were they right, are named as what is missing."""
    record = RunRecord.create(tmp_path)
    cut = {"status": Status.TRUNCATED, "extracted": None, "found_by": None, "finish_reason": "length"}
    samples = [sample(index, right=index < 30, **({} if index < 35 else cut)) for index in range(60)]
    write_config(record, "cut", samples)
    finish(record, ["cut"])
    text = " ".join(" ".join(explain(record.folder / "cut")).split())
    assert "25 truncated at max_tokens: were all of them right, the floor would be met" in text


LOGS = {
    "out of memory": ("torch.OutOfMemoryError: CUDA out of memory.", "the device's memory is exhausted"),
    "unknown option": ("vllm: error: unrecognized arguments: --dytpe", "the server does not know an option"),
    "nothing known": ("fine so far", "no cause that is known"),
}


@pytest.mark.parametrize(("line", "cause"), LOGS.values(), ids=LOGS)
def test_an_outage_names_its_likely_cause_and_the_log(tmp_path: Path, line: str, cause: str) -> None:
    """Not the model: the cause as far as the log tells, and its last lines."""
    record = RunRecord.create(tmp_path)
    write_config(record, "down", [], fault="the server exited with code 1 while it started\nand more")
    (record.folder / "down/server.log").write_text(f"\x1b[36mINFO\x1b[0m starting\n\n{line}\n")
    finish(record, ["down"])
    lines = explain(record.folder / "down", columns=100)
    text = " ".join(" ".join(lines).split())
    assert "the machine, not the model" in text
    assert cause in text
    assert lines[lines.index(next(shown for shown in lines if "server.log ends" in shown)) + 1 :][:2] == [
        "    INFO starting",
        f"    {line}",
    ]


def test_what_changed_since_the_last_green_run_is_said(tmp_path: Path) -> None:
    """Without a baseline the last green run of the same folder tells settings and right answers apart."""
    good, bad = [sample(i) for i in range(60)], [sample(i, right=i > 30) for i in range(60)]
    folders = []
    for number, (name, samples) in enumerate((("1", good), ("2", good), ("3", bad))):
        record = RunRecord(tmp_path / name)
        record.folder.mkdir()
        write_config(record, "A", samples)
        result = record.folder / "A/result.json"
        result.write_text(result.read_text().replace('"version": "0.32.0"', f'"version": "0.3{number}.0"'))
        finish(record, ["A"])
        folders.append(record.folder)
    (tmp_path / "2b").mkdir()
    (tmp_path / "2b/run.json").write_text('{"configs": [{"config_id": "A", "verdict": "pa')
    text = "\n".join(explain(folders[2] / "A", columns=200))
    assert "since the last green run, 2: server version: 0.31.0 -> 0.32.0" in text
    assert re.search(r"question 0: gold 700, said 701, before 700: A crate", text)


def test_damaged_samples_do_not_hide_the_verdict(run: Path) -> None:
    """Where examples cannot be read, the rest is explained."""
    (run / REGRESSION / "samples.jsonl").write_text("{torn\n")
    text = "\n".join(explain(run / REGRESSION))
    assert "below the floor" in text
    assert "question 10" not in text


def test_a_pass_needs_no_explanation_and_no_record_has_none(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing is said of what passed; a folder that is no record is an error that names it."""
    assert explain(run / PASS) == []
    with pytest.raises(DataUnavailable, match=r"no run\.json here"):
        explain(tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_reaches_no_terminal(tmp_path: Path, name: str) -> None:
    """Replies, log lines and reasons steer neither the terminal nor the direction of writing."""
    record = RunRecord.create(tmp_path)
    text = HOSTILE[name]
    samples = [sample(index, right=False, reply=text, extracted=text, gold=text, question=text) for index in range(9)]
    write_config(record, "worse", samples)
    write_config(record, OUTAGE, [], fault=text)
    (record.folder / OUTAGE / "server.log").write_bytes(text.encode(errors="surrogatepass"))
    finish(record, ["worse", OUTAGE])
    lines = run_lines(read_run(record.folder, base=tmp_path))
    unsafe = {c for line in lines for c in line if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn"}}
    assert unsafe == set()
    assert max(shown_width(line) for line in lines if "pytest --" not in line) <= 80


@pytest.mark.parametrize(
    ("text", "length", "shown"),
    [
        ("short", 10, "short"),
        ("two\n  lines\there", 40, "two lines here"),
        ("abcdefghijklmnopqrstuvwxyz", 10, "abcdef…xyz"),
    ],
    ids=["short", "white space", "long"],
)
def test_texts_are_shortened_in_their_middle(text: str, length: int, shown: str) -> None:
    """One line, its beginning and its end kept."""
    assert shortened(text, length) == shown


def test_a_huge_text_is_shortened_without_being_read_whole() -> None:
    """A reply of megabytes costs no time: its ends are enough."""
    assert shortened("x " * 5_000_000 + "end", 20).endswith("end")


def asked(right: int, of: int, errors: int = 0) -> Counts:
    return Counts(asked=of, correct=right, errors=errors)


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def lines_of(log: io.StringIO) -> list[str]:
    """The lines; the first is empty, for pytest waits on one of its own with this test's name."""
    empty, *lines = log.getvalue().splitlines()
    assert empty == ""
    return lines


def test_a_log_hears_of_stages_alone() -> None:
    """A quick config leaves a line for each change of stage, however many answers come."""
    log = io.StringIO()
    line = LiveLine("cpu/A", log)
    line.stage("starting")
    line.stage("asking")
    for number in range(1, 1320):
        line.answered(asked(number * 4 // 5, number), 1319)
    line.close()
    line.close()
    first, second, third = lines_of(log)
    assert (first, second) == ("cpu/A: starting", "cpu/A: ready after 0 s")
    figures = r"cpu/A: 1319/1319, \S+ questions/s, accuracy 0\.800 \(95% 0\.777-0\.821\), errors 0, over after 0 s"
    assert re.fullmatch(figures, third)


def test_a_log_hears_of_a_long_stage_now_and_then() -> None:
    """Between changes of stage there is one line a period, while starting and while asking."""
    log = io.StringIO()
    line = LiveLine("A", log, every=0.3)
    begun = time.monotonic()
    line.stage("starting")
    wait_for(lambda: "starting 1 s" in log.getvalue() or log.getvalue().count("starting ") >= 2)
    line.stage("asking")
    line.answered(asked(1, 2, errors=1), 20)
    wait_for(lambda: log.getvalue().count("2/20") >= 2)
    line.close()
    periods = (time.monotonic() - begun) / 0.3
    assert len(lines_of(log)) <= periods + 3
    assert re.search(r"^A: 2/20, .* questions/s, accuracy 1\.000 \(95% .*\), errors 1$", log.getvalue(), re.MULTILINE)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_log_that_was_closed_ends_nothing() -> None:
    """Progress is never a reason to fail."""
    log = io.StringIO()
    line = LiveLine("A", log)
    line.stage("starting")
    log.close()
    line.stage("asking")
    line.answered(asked(1, 1), 1)
    line.close()


def read_all(descriptor: int) -> str:
    """What was written to a terminal; a read returns a part."""
    parts = []
    while select.select([descriptor], [], [], 0.2)[0]:
        parts.append(os.read(descriptor, 65536))
    return b"".join(parts).decode()


@pytest.mark.parametrize(("ci", "moves"), [("", True), ("true", False)], ids=["a person", "CI"])
def test_a_terminal_gets_a_line_that_moves(monkeypatch: pytest.MonkeyPatch, ci: str, moves: bool) -> None:
    """On a terminal the line is written over, with seconds while starting, then figures; in CI lines are plain."""
    monkeypatch.setenv("CI", ci)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with open(theirs, "w") as terminal:  # noqa: PTH123 - a descriptor has no path
        line = LiveLine("A", terminal)
        line.stage("starting")
        line.stage("asking")
        line.answered(asked(8, 10), 20)
        time.sleep(0.15)  # tqdm draws ten times a second at most
        line.answered(asked(9, 11), 20)
        line.close()
        shown = read_all(ours)
    os.close(ours)
    assert ("A: starting 0 s" in shown) is moves
    assert ("11/20" in shown and "questions/s" in shown and "accuracy 0.818 (0.523-0.949), errors 0" in shown) is moves
    assert ("A: ready after 0 s\r\n" in shown) is not moves


def test_every_verdict_has_a_word() -> None:
    """No verdict is shown as nothing."""
    assert set(LABELS) == set(Verdict)
