"""A real browser, and its pages with all they complained of."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

CHROMIUM = "/usr/bin/chromium"
VIEWPORT: "ViewportSize" = {"width": 1280, "height": 860}
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

WINDOWS = ((1280, 900), (390, 844))  # of a screen and of a phone
# What lies beyond the window's edge or has to be moved aside. is_wide: the window is a screen's.
BEYOND = """(isWide) => {
  const edge = document.documentElement.clientWidth + 1;
  const name = one => `${one.tagName} ${one.getAttribute("class") ?? ""} "${one.textContent.trim().slice(0, 40)}"`;
  const found = document.documentElement.scrollWidth > edge ? ["the page"] : [];
  for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    if (!one.closest(".scroll, .long") && box.width > 1 && box.right > edge) found.push(name(one));
  }
  for (const one of document.querySelectorAll(".scroll"))
    if (one.scrollWidth > one.clientWidth + 1 && (isWide ? !one.closest(".figures") : one.querySelector(".stack")))
      found.push(`${one.getAttribute("aria-label")}: ${one.scrollWidth} in ${one.clientWidth}`);
  return found.slice(0, 5);
}"""


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
        self.context = browser.new_context(color_scheme=scheme, viewport=VIEWPORT, reduced_motion="reduce")
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

    def sound(self, name: str, folder: Path) -> None:
        """Take a picture, and assert that the page can be used by anybody, complained of nothing and asked nobody else. name:
        of the page. folder: of the pictures, unless HEADRACE_SCREENSHOTS names one.
        """
        from axe_playwright_python.sync_playwright import Axe

        scheme = "dark" if self.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
        where = Path(os.environ.get("HEADRACE_SCREENSHOTS", folder))
        self.page.screenshot(path=where / f"{name}-{scheme}.png", full_page=True)
        results = Axe().run(self.page, options={"runOnly": ["wcag2a", "wcag2aa", "best-practice"]})
        found = [
            f"{item['id']}: {item['nodes'][0]['html'][:160]}"
            for item in results.response["violations"]
            if item["impact"] in ("serious", "critical")
        ]
        assert not found, f"{name} {scheme}: {found}"
        assert not self.complaints, f"{name} {scheme}: {self.complaints}"
        assert {url for url in self.asked if not url.startswith((self.url, "data:"))} == set()

    def fits(self, name: str) -> None:
        """Assert that nothing lies beyond the edge of a window as wide as a screen or a phone; on a phone the pictures, and
        tables that are no list, may be moved aside.
        """
        for width, height in WINDOWS:
            self.page.set_viewport_size({"width": width, "height": height})
            beyond = self.page.evaluate(BEYOND, width == WINDOWS[0][0])
            assert not beyond, f"{name}, {width} wide: {beyond}"
        self.page.set_viewport_size(VIEWPORT)

    def sound_by_day_and_night(self, name: str, folder: Path) -> None:
        """`sound` in light and in dark, of a page that cannot be asked for twice."""
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            self.sound(name, folder)

    def sign_in(self, key: str) -> None:
        """As a person does, at the door."""
        self.page.goto(f"{self.url}/enter")
        self.page.get_by_label("Key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("heading", name="Flow", exact=True).wait_for()
