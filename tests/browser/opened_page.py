"""A page in a real browser, with all it asked for and complained of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Dialog, Page


@dataclass
class Opened:
    """A page that opens from the disk."""

    page: Page
    path: Path
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def go(self, **address: str | int) -> Page:
        """Open the page at an address within it, and wait until it shows that."""
        self.page.goto(self.path.as_uri() + (f"#{urlencode(address)}" if address else ""))
        self.page.locator("html[data-ready]").wait_for(state="attached")
        return self.page

    def refuse(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()
