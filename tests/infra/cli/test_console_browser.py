"""Every page of the console in a real browser: nothing runs, nothing leaves the machine, anybody can use it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra.cli.terminal import printable
from schemas import Block, Message, topics
from tests.infra.cli.browser_rig import WatchedPage, browser
from tests.infra.cli.console_rig import HOSTILE, LINK, SECRET, SESSION, Console, at_work, console, live

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {
    "flow": "/", "learning": "/learning", "learning-time": "/learning?over=time", "answers": "/answers",
    "search": "/answers?text=refunds&fate=trained", "answer": f"/answers/{SESSION}.1-0.0-0-0",
    "markup": f"/answers/{SESSION}.1-10.0-0-0", "control": f"/answers/{SESSION}.1-11.0-0-0",
    "right-to-left": f"/answers/{SESSION}.1-12.0-0-0", "emoji": f"/answers/{SESSION}.1-13.0-0-0",
    "forty-turns": f"/answers/{SESSION}.1-20.0-0-0", "ten-megabytes": f"/answers/{SESSION}.1-21.0-0-0",
    "sealed": f"/answers/{SESSION}.1-22.0-0-0", "versions": "/versions", "version": "/versions/5",
    "compare": "/versions/compare?a=0&b=5&all=1", "data": "/data", "privacy": "/privacy", "help": "/help/run-a-cluster",
}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console() as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    with browser() as found:
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
    page.get_by_role("heading", name="Its way").wait_for()
    text = page.inner_text("main")
    assert "First learned in version 5" in text and "question 0 about refunds" in text


def test_forty_turns_of_anything_are_shown_whole_and_none_is_executed(
    watched: WatchedPage, here: Console, tmp_path: Path
) -> None:
    """Markup, what moves a terminal or turns a line, right to left, emoji: each turn as it was written, and nothing runs."""
    texts = [f"{text} turn {at}" for at, text in enumerate([*HOSTILE.values()] * 10)]
    turns = tuple(Message(role="user" if at % 2 == 0 else "assistant", content=text) for at, text in enumerate(texts))
    asked = live(30, "", "", lane="usual", turn=-1, id="turns-1.0-0-0", group="turns-1").with_bulk(messages=turns)
    here.publish(Block((asked,)), topics.EXPERIENCES)
    watched.complaints.clear()
    page = watched.page
    page.goto(f"{here.url}/answers/{asked.id}")
    shown = page.locator(".talk pre")
    assert shown.all_inner_texts() == [printable(text) for text in texts]
    assert page.title() == f"{asked.id} · t" and shown.locator("*").count() == 0, "no text became markup"
    directions = [shown.nth(at).evaluate("node => getComputedStyle(node).direction") for at in range(3)]
    assert directions == ["ltr", "ltr", "rtl"], "each turn begins on its own side"
    watched.sound("forty-turns-of-anything", tmp_path)


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


@pytest.fixture(scope="module")
def busy() -> Iterator[Console]:
    with console(opened=at_work) as found:
        yield found


@pytest.fixture
def operator(chromium: "Browser", busy: Console) -> Iterator[WatchedPage]:
    """Somebody who may act on a system at work."""
    found = WatchedPage(chromium, busy.url, "light")
    found.sign_in(busy.keys["operate"])
    yield found
    found.context.close()


def test_the_picture_of_a_system_at_work_says_of_each_part_how_it_does(operator: WatchedPage, tmp_path: Path) -> None:
    picture = operator.page.get_by_role("region", name="The picture")
    for name in (
        "Master, v7: 1.5 tasks issued/s, 40 groups outstanding",
        "Gateway, v7: 2 answers/s, 5 running, wait for the log: missing",
        "Trainer, v7: 0.29 steps/s, 75 answers/s, 64 groups wait",
    ):
        picture.get_by_role("link", name=name).wait_for()
    for name in ("how groups ended, from Collect to Master", "hot reload, from Versions to Explorers"):
        picture.get_by_role("img", name=name).wait_for()
    wide = "all => all.filter(box => box.scrollWidth > box.clientWidth).map(box => box.innerText)"
    assert operator.page.eval_on_selector_all(".columns > section", wide) == [], "no table is wider than its column"
    operator.sound_by_day_and_night("flow-at-work", tmp_path)


def test_the_door_the_forms_and_an_opened_answer_can_be_used_by_anybody(
    chromium: "Browser", busy: Console, tmp_path: Path
) -> None:
    found = WatchedPage(chromium, busy.url, "light")
    page = found.page
    page.goto(f"{busy.url}/enter")
    found.sound_by_day_and_night("sign-in", tmp_path)
    found.sign_in(busy.keys["unseal"])
    page.get_by_role("link", name="Privacy").click()
    page.get_by_role("link", name=f"{SESSION}.1-22.0-0-0").click()
    assert SECRET not in page.content()
    page.get_by_label("Why").fill("a complaint")
    page.get_by_role("button", name="Open it once").click()
    page.get_by_text("Opened for this look only").wait_for()
    assert SECRET in page.inner_text("main")
    found.sound_by_day_and_night("opened", tmp_path)
    found.context.close()


def test_an_operator_promotes_a_version_from_its_page_and_signs_out(operator: WatchedPage, tmp_path: Path) -> None:
    page = operator.page
    for path in ("/versions", "/versions/6", "/data"):
        page.goto(f"{operator.url}{path}")
        operator.sound_by_day_and_night(f"operator{path.replace('/', '-')}", tmp_path)
    page.goto(f"{operator.url}/versions/6")
    form = page.locator("form[action='/actions/promote']")
    form.get_by_label("Why").fill("looked at <b>fifty</b> answers")
    form.get_by_role("button").click()
    page.wait_for_url("**/versions?done=**")
    text = page.inner_text("main")
    assert "Customers get version 6" in text and "looked at <b>fifty</b> answers" in text
    assert not operator.complaints
    page.get_by_role("button", name="Sign out").click()
    assert "Sign in" in page.inner_text("main")


# Of each of these what it says, and its edges: left, top, right, bottom.
