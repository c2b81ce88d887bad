"""`report.html` in a real browser, opened from the disk: filters, samples, links, keys, hostile text, and speed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opened_page import Opened
from playwright.sync_api import Page, expect
from run_records import (
    FAILED,
    HOSTILE,
    LONG,
    OUTAGE,
    PASS,
    REGRESSION,
    TO_RIGHT,
    TO_WRONG,
    TRUNCATED,
    UNANSWERED,
    choice,
    document,
    long_run,
    mixed_run,
    write_config,
)

from harness.gates.threshold import Verdict
from harness.records import RunRecord
from harness.reports.page import PastRun, write_page

OPENS_WITHIN = 2.0
"""Seconds until a page of 1,319 samples of 12,000 tokens can be used."""
MOST_PAGE = 3_000_000
"""Bytes of such a page less its packed texts."""


def _past(number: int) -> PastRun:
    accuracy = 0.8 + 0.01 * number
    return PastRun(
        run_id=f"run-{number}",
        started=f"2026-02-0{number}T00:00:00+00:00",
        commit=f"{number}" * 40,
        config_id=REGRESSION,
        accuracy=accuracy,
        low=accuracy - 0.1,
        high=accuracy + 0.1,
        tokens_per_second=100.0 + number,
        acceptance_length=2.0 + 0.1 * number,
        startup=40.0,
        verdict=Verdict.PASS,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = mixed_run(tmp_path_factory.mktemp("mixed"))
    return write_page(folder, history=[_past(number) for number in range(1, 6)])


@pytest.fixture(scope="module")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(long_run(tmp_path_factory.mktemp("long")))


@pytest.fixture
def opened(open_page: Callable[..., Opened], report: Path) -> Iterator[Opened]:
    """The mixed run's page; whatever a test does with it asks no network and raises no complaint."""
    one = open_page(report)
    yield one
    assert not [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))]
    assert one.complaints == []
    assert one.dialogs == []


def listed(page: Page) -> list[int]:
    cells = page.locator("section.config:not([hidden]) .rows tbody td:first-child").all_inner_texts()
    return [int(cell) for cell in cells]


def heading(page: Page) -> str:
    return page.locator("section.config:not([hidden]) .sample h3").inner_text()


def panel(page: Page, name: str) -> str:
    return page.locator(f"section.config:not([hidden]) .panel.{name} pre").first.inner_text()


def test_the_page_asks_no_network(opened: Opened) -> None:
    """From the table to a sample's texts, the file itself is all that is loaded."""
    page = opened.go(config=REGRESSION, sample=TO_WRONG[0])
    expect(page.locator(".badge.flip:visible")).to_have_text("flipped to wrong")
    assert [url.partition("#")[0] for url in opened.requests] == [opened.path.as_uri()]


def test_the_page_opens_on_what_went_wrong(opened: Opened) -> None:
    """Without an address the first regression is shown, not the first pass."""
    expect(opened.go().locator("section.config:visible h2")).to_contain_text(REGRESSION)


def test_the_policy_refuses_what_a_script_would_fetch(open_page: Callable[..., Opened], report: Path) -> None:
    """Even code within the page could not send what it holds: the browser refuses before anything leaves."""
    opened = open_page(report)
    page = opened.go()
    refused = page.evaluate("fetch('http://127.0.0.1:9/x').then(() => 'sent', (error) => String(error))")
    assert refused.startswith("TypeError")
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)


@pytest.mark.parametrize(
    ("show", "indices"),
    [
        ("flipped", sorted((*TO_WRONG, *TO_RIGHT))),
        ("truncated", [TRUNCATED]),
        ("unanswered", [UNANSWERED]),
        ("error", [FAILED]),
    ],
)
def test_samples_are_filtered(opened: Opened, show: str, indices: list[int]) -> None:
    """Each filter lists the samples of its kind alone, and says how many there are."""
    page = opened.go(config=REGRESSION)
    button = page.locator(f"section.config:not([hidden]) [data-show={show}]")
    expect(button.locator(".count")).to_have_text(str(len(indices)))
    button.click()
    expect(page.locator("section.config:not([hidden]) .told")).to_have_text(f"{len(indices)} of 60 samples")
    assert listed(page) == indices
    assert f"show={show}" in page.url


def test_a_flipped_sample_shows_both_replies_and_the_marked_answer(opened: Opened) -> None:
    """Prompt, reply, gold and the baseline's reply stand together; the answer that was read is marked."""
    page = opened.go(config=REGRESSION, show="flipped")
    page.locator("section.config:not([hidden]) .rows tbody tr").first.click()
    expect(page.locator(".panel.reply mark:visible")).to_have_text("1,701")
    expect(page.locator(".panel.gold mark:visible")).to_have_text("1700")
    assert panel(page, "prompt").startswith("A crate holds 17 boxes")
    assert panel(page, "baseline") == "The baseline said <i>otherwise</i> about 10."
    reply, gold = page.locator(".panel.reply:visible"), page.locator(".panel.gold:visible")
    assert reply.count() == gold.count() == 1


def test_prompt_reply_and_gold_are_side_by_side(opened: Opened) -> None:
    """On a wide screen the three texts are beside each other, not below."""
    page = opened.go(config=REGRESSION, sample=8)
    boxes = [page.locator(f".panel.{name}:visible").bounding_box() for name in ("prompt", "reply", "gold")]
    assert all(boxes)
    places = [(box["x"], box["y"]) for box in boxes if box]
    assert places == sorted(places)
    assert len({round(y) for _, y in places}) == 1


def test_a_link_to_a_sample_holds_after_a_reload(opened: Opened) -> None:
    """The address names config, filter and sample: opened anew it shows the same, in sight."""
    page = opened.go(config=REGRESSION)
    page.locator("[data-show=wrong]:visible").click()
    page.locator("section.config:not([hidden]) .rows tbody tr").nth(3).click()
    expect(page.locator(".sample h3:visible")).to_be_visible()
    before, link = heading(page), page.locator(".permalink:visible").get_attribute("href")
    assert link
    assert page.url.endswith(link)
    page.reload()
    expect(page.locator(".sample h3:visible")).to_have_text(before)
    expect(page.locator(".sample h3:visible")).to_be_in_viewport()
    expect(page.locator("[data-show=wrong]:visible")).to_have_attribute("aria-pressed", "true")


def test_an_address_that_names_nothing_is_said(opened: Opened) -> None:
    """A link to a sample that this run does not hold is answered, not ignored."""
    page = opened.go(config=REGRESSION, sample=4711)
    expect(page.locator(".sample:visible")).to_have_text("This run has no sample 4711.")


def test_the_keyboard_does_everything(opened: Opened) -> None:
    """Samples, filters, configs, search, theme and the list of keys are reached without a mouse."""
    page = opened.go(config=REGRESSION)
    title = page.locator(".sample h3:visible")
    for key, shown in (("j", "Sample 0"), ("j", "Sample 1"), ("k", "Sample 0"), ("3", "Sample 0"), ("j", "Sample 10")):
        page.keyboard.press(key)
        expect(title).to_have_text(shown)
    page.keyboard.press("ArrowDown")
    expect(title).to_have_text("Sample 11")
    page.keyboard.press("Escape")
    expect(title).to_have_count(0)
    page.keyboard.press("1")
    page.keyboard.press("/")
    page.keyboard.type("2700 crate")
    expect(page.locator("section.config:not([hidden]) .told")).to_have_text("1 of 60 samples")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(title).to_have_text("Sample 20")
    page.keyboard.press("]")
    expect(page.locator("section.config:visible h2")).to_contain_text(OUTAGE)
    page.keyboard.press("[")
    page.keyboard.press("[")
    expect(page.locator("section.config:visible h2")).to_contain_text(PASS)
    page.keyboard.press("?")
    expect(page.locator("dialog#keys")).to_contain_text("previous, next config")
    page.keyboard.press("Escape")
    expect(page.locator("dialog#keys")).to_be_hidden()


def test_replies_are_searched_in_full(opened: Opened) -> None:
    """A word that only a reply or the gold text holds finds its sample."""
    page = opened.go(config=REGRESSION)
    page.locator("input[type=search]:visible").fill("onerror=ALERT")
    expect(page.locator("section.config:not([hidden]) .told")).to_have_text("1 of 60 samples")
    assert listed(page) == [0]


@pytest.mark.parametrize(("index", "name"), list(enumerate(HOSTILE)), ids=list(HOSTILE))
def test_hostile_text_is_shown_as_text(opened: Opened, index: int, name: str) -> None:
    """Markup in a reply runs and becomes nothing; what would steer or hide is written out."""
    page = opened.go(config=REGRESSION, sample=index)
    expect(page.locator(".panel.reply mark:visible")).to_be_visible()
    shown = panel(page, "reply")
    expected = {
        "terminal": "\\x1b[31mred\\x1b[0m\\x07\\x00bell \\x9b2J",
        "direction": "pay \\u202e100\\u202c or \\u2067200\\u2069 \\u200bhidden",
        "surrogate": "half a pair \\ud83d and a whole one \U0001f600",
    }
    assert shown.startswith(expected.get(name, HOSTILE[name]))
    inside = page.locator(".sample:visible pre :not(mark):not(.control)")
    assert inside.count() == 0
    assert page.title() == f"{opened.path.parent.name} · accuracy-gate"
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, "a long line widens the page"


def test_scored_texts_and_choices_are_shown_as_what_they_are(open_page: Callable[..., Opened], tmp_path: Path) -> None:
    """A text is scored, not wrong, and a choice lists its choices with their scores."""
    record = RunRecord.create(tmp_path)
    write_config(record, "choices", [choice(index) for index in range(6)])
    write_config(record, "texts", [document(index) for index in range(4)])
    opened = open_page(write_page(record.folder))
    page = opened.go(config="texts", sample=2)
    expect(page.locator(".sample .badge.kind:visible")).to_have_text("scored")
    expect(page.locator("[data-show=wrong]:visible .count")).to_have_text("0")
    expect(page.locator(".sample-facts:visible")).to_contain_text("nll: 250.5")
    heads = page.locator("section.config:not([hidden]) .rows thead th").all_inner_texts()
    assert heads == ["#", "result", "value", "s", "question"]
    page = opened.go(config="choices", sample=1)
    expect(page.locator(".panel.reply mark:visible")).to_have_text("blue")
    rows = page.locator(".measures:visible tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["blue", "-1.5", "true"], ["red", "-2.5", "false"]]
    assert opened.complaints == []


def test_a_failed_request_shows_its_error(opened: Opened) -> None:
    """A question without a response shows what failed, as text."""
    page = opened.go(config=REGRESSION, sample=FAILED)
    expect(page.locator(".panel.fault pre:visible")).to_contain_text("no reply within 600 s <b>at all</b>")
    expect(page.locator(".panel.reply:visible")).to_contain_text("No reply: the request failed.")


def test_an_outages_log_unfolds(opened: Opened) -> None:
    """The reason is shown short, and whole with the log's tail on request."""
    page = opened.go(config=OUTAGE)
    log = page.locator("details.log:visible pre")
    expect(log).to_be_hidden()
    page.locator("details.log:visible summary").click()
    expect(log).to_contain_text("RuntimeError: <out> of memory")


def test_past_runs_are_drawn_with_their_commits(opened: Opened) -> None:
    """Accuracy, tokens/s, acceptance length and start-up have a point a run; a point tells its commit."""
    page = opened.go(config=REGRESSION)
    figures = page.locator("section.config:not([hidden]) figure")
    titles = figures.locator("figcaption").all_inner_texts()
    assert titles[:4] == ["accuracy", "output tokens/s", "acceptance length", "start-up (s)"]
    assert [figures.nth(i).locator(".run").count() for i in range(4)] == [6, 6, 5, 6]
    figures.first.locator(".run").nth(2).hover()
    expect(page.locator("#tip")).to_contain_text("333333333")
    expect(page.locator("#tip")).to_contain_text("accuracy 0.83 (0.7300 to 0.9300)")


def test_a_bar_lists_its_answers(opened: Opened) -> None:
    """A bar of the distribution of lengths narrows the list to the answers it counts, until that is undone."""
    page = opened.go(config=REGRESSION)
    figure = page.locator("section.config:not([hidden]) figure", has_text="answer length")
    figure.locator(".bin").last.click()
    assert listed(page) == [TRUNCATED]
    page.locator(".chip:visible").click()
    assert len(listed(page)) == 60


def test_light_and_dark_follow_the_system_and_the_switch(open_page: Callable[..., Opened], report: Path) -> None:
    """The system's choice holds until the reader makes another, which outlives a reload."""

    def brightness(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    light = open_page(report, color_scheme="light").go()
    assert brightness(light) > 700
    dark = open_page(report, color_scheme="dark").go()
    assert brightness(dark) < 100
    dark.keyboard.press("t")
    assert brightness(dark) > 700
    dark.reload()
    assert brightness(dark) > 700


def test_a_phone_shows_everything_in_its_width(open_page: Callable[..., Opened], report: Path) -> None:
    """At 390 pixels nothing widens the page, and a sample covers it until it is closed."""
    page = open_page(report, viewport={"width": 390, "height": 844}, has_touch=True).go(config=REGRESSION)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == 390
    page.locator("section.config:not([hidden]) .rows tbody tr").nth(6).tap()
    expect(page.locator(".panel.gold:visible")).to_be_visible()
    assert page.evaluate(width) == 390
    page.get_by_label("Close the sample").tap()
    expect(page.locator(".sample:visible")).to_have_count(0)


def test_a_long_run_opens_at_once(open_page: Callable[..., Opened], long_report: Path) -> None:
    """With 1,319 samples of 12,000 tokens the list is there within 2 s, the best of 3 tries, and a sample at a key."""
    tries = []
    for _ in range(3):
        opened = open_page(long_report)
        started = time.monotonic()
        opened.page.goto(long_report.as_uri(), wait_until="commit")
        opened.page.locator("html[data-ready]").wait_for(state="attached")
        tries.append(time.monotonic() - started)
        assert len(listed(opened.page)) >= 100
    assert min(tries) < OPENS_WITHIN
    page = opened.page
    page.keyboard.press("j")
    mark = page.locator(".panel.reply mark:visible")
    expect(mark).to_have_text("701")
    expect(mark).to_be_in_viewport()
    assert len(panel(page, "reply")) > 30_000
    page.locator("input[type=search]:visible").fill("#### 70701")
    expect(page.locator("section.config:not([hidden]) .told")).to_have_text("1 of 1,319 samples", timeout=60_000)
    assert listed(page) == [700]


def test_a_long_runs_page_is_small_but_for_its_texts(long_report: Path) -> None:
    """What is not the packed texts themselves stays under 3 MB, and those weigh less than the record."""
    source = long_report.read_text(encoding="utf-8")
    texts = sum(len(text) for text in re.findall(r'id="c\d+-\d+">([^<]*)', source))
    assert len(source) - texts < MOST_PAGE
    assert texts < (long_report.parent / LONG / "samples.jsonl").stat().st_size
