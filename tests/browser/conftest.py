"""A real browser for pages that open from a disk, and what it did behind them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opened_page import Opened
from playwright.sync_api import Browser, sync_playwright


def chromium() -> str | None:
    """Find Chromium: what CHROMIUM names, or what is on the PATH."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Headless Chromium; a test that asks for it is skipped where there is none.

    One for each test: while Playwright's driver lives an event loop runs in this thread, and no other test could run
    one of its own.
    """
    executable = chromium()
    if executable is None:
        pytest.skip("there is no Chromium: `apt-get install chromium`, or name one in CHROMIUM")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Open a file in a context of its own, of the colour scheme and size that are asked for."""
    opened: list[Opened] = []

    def start(path: Path, **context: Any) -> Opened:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(20_000)
        one = Opened(page=page, path=path)
        page.on("request", lambda request: one.requests.append(request.url))
        page.on("console", lambda message: one.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: one.complaints.append(str(error)))
        page.on("dialog", one.refuse)
        opened.append(one)
        return one

    yield start
    for one in opened:
        one.page.context.close()
