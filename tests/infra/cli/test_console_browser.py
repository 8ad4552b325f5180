"""Every page of the console in a real browser: nothing runs, nothing leaves the machine, anybody can use it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.cli.console_rig import LINK, SECRET, SESSION, Console, console

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

PAGES = {
    "flow": "/", "learning": "/learning", "answers": "/answers",
    "search": "/answers?text=refunds&fate=trained", "answer": f"/answers/{SESSION}.1-0.0-0-0",
    "markup": f"/answers/{SESSION}.1-10.0-0-0", "control": f"/answers/{SESSION}.1-11.0-0-0",
    "right-to-left": f"/answers/{SESSION}.1-12.0-0-0", "emoji": f"/answers/{SESSION}.1-13.0-0-0",
    "forty-turns": f"/answers/{SESSION}.1-20.0-0-0", "ten-megabytes": f"/answers/{SESSION}.1-21.0-0-0",
    "sealed": f"/answers/{SESSION}.1-22.0-0-0", "versions": "/versions", "version": "/versions/5",
    "data": "/data", "privacy": "/privacy",
}  # fmt: skip

pytestmark = pytest.mark.slow

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
def chromium_browser() -> "Iterator[Browser]":
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


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console() as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    with chromium_browser() as found:
        yield found


@pytest.fixture(scope="module", params=["light", "dark"])
def watched(request: pytest.FixtureRequest, chromium: "Browser", here: Console) -> Iterator[WatchedPage]:
    found = WatchedPage(chromium, here.url, request.param)
    found.page.goto(f"{here.url}/enter?link={LINK}")
    yield found
    found.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_nothing_foreign_asks_nobody_else_and_can_be_used_by_anybody(
    watched: WatchedPage, name: str, tmp_path: Path
) -> None:
    watched.complaints.clear()
    answer = watched.page.goto(watched.url + PAGES[name])
    assert answer is not None and answer.status == 200
    assert watched.page.title().endswith("· t")
    watched.sound(name, tmp_path)
    watched.fits(name)


@pytest.mark.parametrize("by", ["the table", "the timeline"])
def test_from_the_first_page_links_lead_to_why_a_version_was_not_promoted_and_what_it_learned_from(
    watched: WatchedPage, by: str
) -> None:
    page = watched.page
    page.goto(f"{watched.url}/")
    page.get_by_role("link", name=re.compile("^Versions: v7 published, v2 stable, v5 held back")).click()
    held = "v5" if by == "the table" else re.compile("^v5 held back by gate: dev: 0.500")
    page.get_by_role("link", name=held, exact=True).first.click()
    page.get_by_role("heading", name="Version 5").wait_for()
    text = page.inner_text("main")
    assert "Held back by gate: dev: 0.500, expected at least 0.600." in text, "why"
    row = page.get_by_role("row", name=re.compile("^dev"))
    assert row.first.inner_text().split() == ["dev", "0.5", "0.667"], (
        "and on which numbers, the stable version's beside"
    )
    learned = page.get_by_role("region", name="Answers found")
    assert "question 0 about refunds" in learned.inner_text(), "what it learned from, on the same page"
    page.get_by_role("link", name="All of them").click()
    page.get_by_role("heading", name="Answers").wait_for()
    assert page.get_by_role("row").count() == 2
    page.get_by_role("table").get_by_role("link").first.click()
    page.get_by_role("heading", name="History").wait_for()
    text = page.inner_text("main")
    assert "First trained into version 5" in text and "question 0 about refunds" in text


def test_a_chart_is_drawn_and_the_pointer_on_it_is_told_the_version_and_its_values(watched: WatchedPage) -> None:
    page = watched.page
    page.goto(f"{watched.url}/learning")
    figure = page.locator("figure", has_text="Suite dev")
    assert page.locator("canvas").count() == page.locator("figure").count() > 4
    box = figure.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 5 / 7, box["y"] + 20)
    figure.get_by_text("v5: t 0.6667 (0.2 to 0.9)").wait_for()
    page.mouse.move(0, 0)
    assert figure.locator(".told").inner_text() == "", "and when it has gone nothing is said"


def test_a_live_page_is_asked_for_again_and_says_when_it_cannot_be(watched: WatchedPage) -> None:
    page = watched.page
    page.goto(f"{watched.url}/")
    with page.expect_response("**/flow", timeout=20_000) as again:
        pass
    assert again.value.status == 200
    page.context.set_offline(True)
    page.wait_for_selector("[data-stale]", timeout=20_000)
    page.context.set_offline(False)
    page.wait_for_selector("[data-fragment]:not([data-stale])", timeout=20_000)
    watched.complaints.clear()


def test_the_door_the_forms_and_an_opened_answer_can_be_used_by_anybody(
    chromium: "Browser", here: Console, tmp_path: Path
) -> None:
    found = WatchedPage(chromium, here.url, "light")
    page = found.page
    page.goto(f"{here.url}/enter")
    found.sound("sign-in", tmp_path)
    page.get_by_label("Key").fill(here.keys["unseal"])
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Flow", exact=True).wait_for()
    page.get_by_role("link", name="Privacy").click()
    page.get_by_role("link", name=f"{SESSION}.1-22.0-0-0").click()
    assert SECRET not in page.content()
    page.get_by_label("Reason").fill("a complaint")
    page.get_by_role("button", name="Open it once").click()
    page.get_by_text("Opened for this view only").wait_for()
    assert SECRET in page.inner_text("main")
    found.sound("opened", tmp_path)
    page.get_by_role("button", name="Sign out").click()
    assert "Sign in" in page.inner_text("main")
    found.context.close()
