"""A real browser, and its pages with all they complained of."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def browser() -> "Iterator[Browser]":
    """Chromium, or the test is skipped where there is none and none was required."""
    if not Path(CHROMIUM).exists():
        assert not os.environ.get("HEADRACE_REQUIRE_BROWSER"), f"a browser was required: {CHROMIUM} is not there"
        pytest.skip(f"no browser: {CHROMIUM} is not there (Debian's package chromium has it)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


class WatchedPage:
    """A page of a browser, with everything it complained of and asked for."""

    def __init__(self, browser: "Browser", url: str, scheme: Any) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 860})
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: set[str] = set()
        self.page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.url = url
