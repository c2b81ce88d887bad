"""`report.html` without a browser: what it holds, what it can never hold, and records that are odd or damaged."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_records import (
    HOSTILE,
    LONG,
    OUTAGE,
    PASS,
    REGRESSION,
    TO_RIGHT,
    TO_WRONG,
    document,
    finish,
    long_run,
    mixed_run,
    regressed_samples,
    sample,
    write_config,
)

from harness.errors import DataUnavailable, RecordUnwritable
from harness.gates.threshold import Verdict
from harness.records import RunRecord, write_json
from harness.reports.page import PastRun, write_page
from harness.reports.page.marks import find_answer, find_gold, in_utf16


class Page(HTMLParser):
    """A page taken apart as a browser does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._raw: str | None = None
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._raw = {"script": dict(attrs).get("id") or "code", "style": "style"}.get(tag)

    def handle_endtag(self, tag: str) -> None:
        self._raw = None

    def handle_data(self, data: str) -> None:
        if self._raw is None:
            self.text += data
        else:
            self.scripts[self._raw] = self.scripts.get(self._raw, "") + data

    def unpacked(self, name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))

    def index(self, config_id: str) -> tuple[int, dict[str, Any]]:
        """A config's number and its packed figures, history and rows."""
        numbers = range(sum(name.startswith("index-") for name in self.scripts))
        return next((n, i) for n in numbers if (i := self.unpacked(f"index-{n}"))["id"] == config_id)

    def samples(self, config_id: str) -> list[dict[str, Any]]:
        """A config's rows, each with its texts."""
        number, index = self.index(config_id)
        rows = [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]
        return [{**row, "detail": self.unpacked(f"c{number}-{row['chunk']}")[row["place"]]} for row in rows]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(write_page(mixed_run(tmp_path_factory.mktemp("mixed"))))


def test_every_sample_is_there_with_its_texts_to_the_letter(mixed: Page) -> None:
    """All samples of the record are in the page in order of their questions, half a surrogate pair included."""
    shown = mixed.samples(REGRESSION)
    made = sorted(regressed_samples(), key=lambda one: one.index)
    assert [(one["index"], one["status"], one["correct"]) for one in shown] == [
        (one.index, one.status, one.correct) for one in made
    ]
    texts = [(one["detail"]["question"], one["detail"]["gold"], one["detail"]["text"]) for one in shown]
    assert texts == [(one.question, one.gold, one.text) for one in made]


def test_flipped_samples_hold_the_baselines_reply(mixed: Page) -> None:
    """A sample that flipped says which way, and leads to what the baseline had said."""
    number, _ = mixed.index(REGRESSION)
    flipped = {one["index"]: one for one in mixed.samples(REGRESSION) if one["changed"]}
    assert {index: one["changed"] for index, one in flipped.items()} == {
        **dict.fromkeys(TO_WRONG, "to wrong"),
        **dict.fromkeys(TO_RIGHT, "to right"),
    }
    for index, one in flipped.items():
        before = one["detail"]["baseline"]
        text = mixed.unpacked(f"c{number}-{before['chunk']}")[before["place"]]["baseline"]
        assert text == f"The baseline said <i>otherwise</i> about {index}."


def test_the_answer_is_marked_where_the_grader_read_it(mixed: Page) -> None:
    """The marked part of a reply is the extracted answer, and that of the gold text its final answer."""
    for one in mixed.samples(REGRESSION):
        detail = one["detail"]
        if one["status"] == "ok":
            wide = (detail["text"] or "").encode("utf-16-le", "surrogatepass")
            begin, end = detail["mark"]
            assert wide[2 * begin : 2 * end].decode("utf-16-le") == detail["extracted"]
        begin, end = detail["gold_mark"]
        assert detail["gold"][begin:end] == one["gold"] == str(100 * (one["index"] + 7))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_stands_nowhere_in_the_markup(mixed: Page, name: str) -> None:
    """What a model wrote is packed into letters that no parser takes for markup."""
    assert HOSTILE[name][:60] not in mixed.source


def test_no_element_but_the_pages_own_exists(mixed: Page) -> None:
    """A record full of markup adds no element that runs, loads or embeds anything, and no handler."""
    names = [name for name, _ in mixed.elements]
    assert not {"img", "svg", "iframe", "object", "embed", "link", "base", "i", "out"} & set(names)
    assert names.count("script") == len(mixed.scripts) - 1, "one of the page's raw texts is its style"
    for _, attributes in mixed.elements:
        assert not [name for name in attributes if name.startswith("on") or name in {"src", "srcset", "action"}]
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_allows_the_pages_own_script_and_style_alone(mixed: Page) -> None:
    """Everything is forbidden but the one script and the one style, by their hashes; no request can leave."""
    metas = [attributes for name, attributes in mixed.elements if name == "meta"]
    policy = next(meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    code, style = (
        base64.b64encode(hashlib.sha256(mixed.scripts[name].encode()).digest()).decode() for name in ("code", "style")
    )
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{code}'; style-src 'sha256-{style}'; base-uri 'none'; "
        "form-action 'none'"
    )
    own = mixed.scripts["code"] + mixed.scripts["style"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bfetch\(|url\(|@import", own)
    assert re.findall(r"https?://[^\"]+", own) == ["http://www.w3.org/2000/svg"]


def test_joined_modules_do_not_share_a_name(mixed: Page) -> None:
    """The modules become one script, in which each name is declared once and nothing is left to import or export."""
    code = mixed.scripts["code"]
    declared = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", code, re.MULTILINE)
    assert len(declared) > 40
    assert sorted(set(declared)) == sorted(declared)
    assert not re.search(r"^(?:import|export)\b", code, re.MULTILINE)


def test_the_table_and_the_reasons_are_readable_without_scripts(mixed: Page) -> None:
    """Verdicts, figures with their sample sizes and intervals, and an outage's log are plain text of the page."""
    words = " ".join(mixed.text.split())
    for said in (PASS, REGRESSION, OUTAGE, "0.5085", "30 of 59 right; 95% interval 0.3844 to 0.6316"):
        assert said in words
    assert "RuntimeError: <out> of memory" in words
    assert "(EngineCore pid=4711) INFO line 0" in words
    assert "3 answers became wrong, 1 became right" in words


def test_server_sent_text_shows_its_control_characters(tmp_path: Path) -> None:
    """A reason, which may quote a server's log, cannot turn the direction of the page's text."""
    record = RunRecord.create(tmp_path)
    write_config(record, OUTAGE, [], fault="died: \u202etxt.exe \x1b[31m</pre><script>x</script>")
    finish(record, [OUTAGE])
    page = Page(write_page(record.folder))
    assert "died: \\u202etxt.exe \\x1b[31m</pre><script>x</script>" in page.text
    assert "\u202e" not in page.source
    assert "\x1b" not in page.source


def test_history_is_the_configs_own_and_ends_with_this_run(tmp_path: Path) -> None:
    """Past runs come in order of time; those of other configs are left out, and this run is its own last point."""
    folder = mixed_run(tmp_path)
    past = [
        PastRun(
            run_id=run_id,
            started=started,
            commit="abc",
            config_id=config_id,
            accuracy=0.8,
            low=0.7,
            high=0.9,
            tokens_per_second=100.0,
            acceptance_length=None,
            startup=40.0,
            verdict=Verdict.PASS,
        )
        for run_id, started, config_id in (
            ("second", "2026-02-02T00:00:00+00:00", PASS),
            ("first", "2026-02-01T00:00:00+00:00", PASS),
            ("other", "2026-02-01T00:00:00+00:00", REGRESSION),
            (folder.name, "2026-03-02T10:00:00.000+00:00", PASS),
        )
    ]
    _, index = Page(write_page(folder, history=past)).index(PASS)
    assert [run["run_id"] for run in index["history"]] == ["first", "second", folder.name]
    assert index["history"][-1]["accuracy"] == index["accuracy"] == 50 / 60


def test_a_task_without_accuracy_shows_its_measures(tmp_path: Path) -> None:
    """Where a result has measures in place of an accuracy, the page shows those and no interval of nothing."""
    record = RunRecord.create(tmp_path)
    write_config(record, PASS, [document(0)])
    path = record.folder / PASS / "result.json"
    none = dict.fromkeys(("accuracy", "threshold", "tolerance", "floor"))
    measures = {"bits_per_byte": 0.91234, "perplexity": 7.5}
    write_json(path, {**json.loads(path.read_text()), **none, "gates": [], "measures": measures})
    page = Page(write_page(record.folder))
    words = " ".join(page.text.split())
    assert "bits_per_byte 0.9123" in words
    assert "perplexity7.5" in words
    _, index = page.index(PASS)
    assert index["interval"] is None
    assert index["history"][-1]["measures"] == measures
    (shown,) = page.samples(PASS)
    assert (shown["correct"], shown["value"]) == (None, 0.9), "a text is neither right nor wrong"


def test_a_change_of_scores_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Against a baseline of scores there are no flips: what the comparison says of the scores is shown."""
    record = RunRecord.create(tmp_path)
    facts = {"drift": {"sentence": "bits per byte grew by 0.0100"}, "values": {"mean": 0.01}, "baseline_runs": 2}
    write_config(record, PASS, [document(0)], against_baseline=facts)
    text = Page(write_page(record.folder)).text
    assert "bits per byte grew by 0.0100; against a baseline of 2 runs" in text


def test_a_run_that_stopped_early_shows_the_interval_that_holds(tmp_path: Path) -> None:
    """The interval of the counts does not hold where the answers chose when to stop: the stop's own is shown."""
    record = RunRecord.create(tmp_path)
    write_config(record, PASS, [sample(0)])
    path = record.folder / PASS / "result.json"
    stop = {"interval": {"low": 0.61, "high": 0.97, "confidence": 0.999}}
    write_json(path, {**json.loads(path.read_text()), "stopped_early": stop})
    page = Page(write_page(record.folder))
    assert page.index(PASS)[1]["interval"] == stop["interval"]
    assert "0.610 to 0.970" in page.text


def test_every_pass_is_shown(tmp_path: Path) -> None:
    """Samples of a second pass are there beside those of the first, and flips are told of the first alone."""
    record = RunRecord.create(tmp_path)
    config = record.config(PASS)
    config.append(sample(1), number=2)
    config.close()
    flip = {"index": 1, "changed": "to wrong", "baseline_right": 1, "baseline_runs": 1, "baseline_text": "x"}
    write_config(record, PASS, [sample(1, right=False)], flips=[flip])
    shown = Page(write_page(record.folder)).samples(PASS)
    assert [(one["pass"], one["correct"], one["changed"]) for one in shown] == [(1, False, "to wrong"), (2, True, None)]


def test_a_config_without_a_result_is_named(tmp_path: Path) -> None:
    """A config that was listed and not judged stands in the table as such."""
    record = RunRecord.create(tmp_path)
    write_config(record, PASS, [sample(0)])
    finish(record, [PASS, "gpu/never"])
    text = Page(write_page(record.folder)).text
    assert "gpu/never" in text
    assert "no result" in text


def test_an_empty_run_is_a_page(tmp_path: Path) -> None:
    """A run that ended before anything was written renders all the same."""
    assert tmp_path.name in Page(write_page(tmp_path)).text


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """The sample that a killed run was writing is owed, not a fault."""
    folder = mixed_run(tmp_path)
    with (folder / PASS / "samples.jsonl").open("ab") as samples:
        samples.write(b'{"index": 60, "te')
    assert len(Page(write_page(folder)).samples(PASS)) == 60


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("samples.jsonl", "{nothing}\n", id="a sample that is no JSON"),
        pytest.param("samples.jsonl", '{"index": 1}\n', id="a sample without its fields"),
        pytest.param("flips.jsonl", '{"index": \n', id="a flip that is no JSON"),
        pytest.param("flips.jsonl", '{"index": 1}\n', id="a flip without its fields"),
        pytest.param("result.json", "{", id="a result that is no JSON"),
        pytest.param("result.json", f'{{"config_id": "{PASS}"}}', id="a result without its fields"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, name: str, content: str) -> None:
    """A record that cannot be read is an outage that names the file, and leaves no half a page behind."""
    folder = mixed_run(tmp_path)
    (folder / PASS / name).write_text(content)
    with pytest.raises(DataUnavailable, match=re.escape(str(folder / PASS / name))):
        write_page(folder)
    assert not [path for path in folder.iterdir() if "report" in path.name]


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Where the page's place is taken the fault names it, and nothing temporary is left."""
    folder = mixed_run(tmp_path)
    (folder / "report.html" / "inside").mkdir(parents=True)
    with pytest.raises(RecordUnwritable, match=r"report\.html: cannot be written"):
        write_page(folder)
    assert not list(folder.glob(".*"))


def test_texts_are_never_held_together(tmp_path: Path) -> None:
    """Rendering 300 replies of 12,000 tokens takes a fraction of what they weigh, and the page less them is small."""
    folder = long_run(tmp_path, questions=300)
    weight = (folder / LONG / "samples.jsonl").stat().st_size
    write_page(folder)  # imports and templates are loaded
    tracemalloc.start()
    try:
        path = write_page(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weight > 13e6
    assert peak < weight / 2
    page = Page(path)
    texts = sum(len(text) for name, text in page.scripts.items() if name.startswith("c0-"))
    assert len(page.source) - texts < 200_000


@pytest.mark.parametrize(
    ("text", "extracted", "found_by", "around"),
    [
        pytest.param("60 is\n#### 60\n", "60", "hash", "#### [60]\n", id="after the last mark"),
        pytest.param("#### 5\n#### none", "5", "hash", "#### [5]\n", id="the mark that has it"),
        pytest.param("a \\boxed{12} b \\boxed{7} 12", "7", "boxed", "{[7]}", id="in a box"),
        pytest.param("7 apples. The answer is 7. Then 7", "7", "statement", "is [7]. Then", id="after a statement"),
        pytest.param("1 and 2 and 12", "2", "last_number", "and [2] and", id="no part of a number"),
        pytest.param("so 1,234 in all", "1234", "last-number", "so [1,234] in", id="thousands set apart"),
        pytest.param("2.5 and 2", "2", "last_number", "and [2]", id="no part of a decimal"),
        pytest.param("x 3.", "3", None, "x [3].", id="before a full stop"),
        pytest.param("(B)", "B", "letter", "([B])", id="a letter"),
    ],
)
def test_an_answer_is_found_by_its_form(text: str, extracted: str, found_by: str | None, around: str) -> None:
    """The place that is marked is the last that fits the form in which the answer was read."""
    span = find_answer(text, extracted, found_by)
    assert span is not None
    assert around in f"{text[: span[0]]}[{text[slice(*span)]}]{text[span[1] :]}"


@pytest.mark.parametrize(
    ("text", "extracted"),
    [(None, "1"), ("", "1"), ("1", None), ("1", ""), ("11", "1"), ("no digits", "1")],
)
def test_an_answer_that_is_not_there_is_not_marked(text: str | None, extracted: str | None) -> None:
    """Nothing is marked where the text does not hold the answer."""
    assert find_answer(text, extracted, "hash") is None


def test_gold_without_a_mark_has_no_final_answer() -> None:
    """Only what follows the last `####` of a gold text is its final answer."""
    assert find_gold("B") is None
    assert find_gold("1\n#### ") is None
    assert find_gold(None) is None
    assert find_gold("#### 1\n#### 1 2 \n") == (12, 15)


def test_places_are_counted_as_browsers_count() -> None:
    """A letter beyond U+FFFF is two to a browser, half a pair is one."""
    assert in_utf16("\U0001f600\ud83d7", (2, 3)) == [3, 4]
