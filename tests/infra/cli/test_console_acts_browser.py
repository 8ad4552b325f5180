"""What people with a key do from the pages alone, in a real browser: each act is one record of the log, with who and why."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra.store.seal import seal_text
from schemas import DeadLetter, Directive, PolicyEvent, topics
from schemas.ids import answer_id
from tests.infra.cli.browser_rig import WatchedPage, browser
from tests.infra.cli.console_rig import SECRET, SESSION, Console, at_work, console

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SEALED = f"{SESSION}.1-22.0-0-0"
LOADED = "Failed to load resource: the server responded with a status of"  # Chromium says it of every page but a 200

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console(opened=at_work) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    with browser() as found:
        yield found


@pytest.fixture
def stranger(chromium: "Browser", here: Console) -> Iterator[WatchedPage]:
    found = WatchedPage(chromium, here.url, "light")
    yield found
    found.context.close()


@pytest.fixture
def operator(stranger: WatchedPage, here: Console) -> WatchedPage:
    stranger.sign_in(here.keys["operate"])
    return stranger


def owner(here: Console, key: str) -> str:
    return f"console:acme/{here.keys[key].split('-')[1]}"


def test_the_door_can_be_used_by_anybody_and_says_why_it_stays_shut(stranger: WatchedPage, tmp_path: Path) -> None:
    page = stranger.page
    page.goto(f"{stranger.url}/enter")
    stranger.sound_by_day_and_night("sign-in", tmp_path)
    page.get_by_label("Key").fill("hr-nobody-nothing")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("That key opens nothing here.").wait_for()
    assert [one for one in stranger.complaints if not one.startswith(f"{LOADED} 401")] == []
    stranger.complaints.clear()
    stranger.sound_by_day_and_night("sign-in-refused", tmp_path)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [("/nowhere", 404, "There is no such page."), ("/versions/99", 404, "version 99 was never published")],
)
def test_a_page_that_is_not_there_says_so_to_anybody(
    operator: WatchedPage, path: str, status: int, said: str, tmp_path: Path
) -> None:
    answer = operator.page.goto(f"{operator.url}{path}")
    assert answer is not None and answer.status == status and said in operator.page.inner_text("main")
    assert [one for one in operator.complaints if not one.startswith(f"{LOADED} {status}")] == []
    operator.complaints.clear()
    operator.sound_by_day_and_night(f"error{path.replace('/', '-')}", tmp_path)
    operator.page.get_by_role("link", name="Back to Flow").click()
    operator.page.get_by_role("heading", name="Flow", exact=True).wait_for()


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
    alarm = (
        operator.page.get_by_role("region", name="Alarms").get_by_role("listitem").filter(has_text="chi2 of lane live")
    )
    assert "A value of a step is unhealthy: chi2 of lane live (estimate of χ²(π‖μ)), at train/1; " in alarm.inner_text()
    roles = operator.page.get_by_role("region", name="Roles").inner_text()
    assert "answers 2 end whole" in roles and "requests 3 route /v1/chat/completions" in roles
    operator.sound_by_day_and_night("flow-at-work", tmp_path)


def test_no_word_of_the_picture_lies_over_another_or_outside_its_box(operator: WatchedPage) -> None:
    page = operator.page
    words = page.eval_on_selector_all(".flow text", PLACES)
    for at, (text, left, top, right, bottom) in enumerate(words):
        for other, x0, y0, x1, y1 in words[at + 1 :]:
            assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top, f"{text!r} over {other!r}"
    drawn = page.eval_on_selector_all(".flow .box", PLACES)
    for text, left, _, right, bottom in page.eval_on_selector_all(".flow a text", PLACES):
        assert any(x0 < left and right < x1 and y0 < bottom < y1 for _, x0, y0, x1, y1 in drawn), text


def test_what_is_read_out_of_the_flow_changes_when_its_words_do_and_at_no_other_time(
    operator: WatchedPage, here: Console
) -> None:
    """A node that is put in anew is read out anew by screen readers: every three seconds, for hours."""
    page = operator.page
    page.evaluate(WATCH)
    for _ in range(2):
        with page.expect_response("**/?fragment=1", timeout=20_000):
            pass
    assert page.evaluate("window.changes") == []
    here.publish(Directive(order="pause", owner="ann", reason="odd"))
    try:
        page.locator("[aria-live]", has_text="Learning is paused by ann").wait_for(timeout=20_000)
        assert len(page.evaluate("window.changes")) == 1 and page.locator("[aria-live]").count() == 1
    finally:
        here.publish(Directive(order="continue", owner="ann"))
    page.locator("[aria-live]", has_text="No part waits long").wait_for(timeout=20_000)


def test_on_a_phone_the_picture_moves_in_its_place_and_the_page_does_not(operator: WatchedPage, tmp_path: Path) -> None:
    on_a_phone(operator.page)
    assert operator.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    name = operator.page.locator(".flow .boxname").first
    assert name.evaluate("one => one.getBoundingClientRect().height") > 8, "pixels: it can be read"
    operator.sound_by_day_and_night("flow-on-a-phone", tmp_path)


def test_where_somebody_is_on_a_live_page_stays_when_it_is_asked_for_again(operator: WatchedPage) -> None:
    page = operator.page
    on_a_phone(page)
    picture = page.get_by_role("region", name="The picture")
    assert picture.evaluate("one => { one.scrollLeft = 60; return one.scrollLeft; }") == 60
    page.get_by_role("region", name="Roles").focus()
    for _ in range(2):
        with page.expect_response("**/?fragment=1", timeout=20_000):
            pass
    assert picture.evaluate("one => one.scrollLeft") == 60
    assert page.evaluate("document.activeElement.ariaLabel") == "Roles"


def test_no_table_of_the_flow_is_wider_than_its_column(operator: WatchedPage) -> None:
    operator.page.locator(".spark").first.wait_for(timeout=20_000)
    wide = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"
    assert operator.page.eval_on_selector_all(".columns > section", wide) == []
    assert operator.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_sealed_answer_is_opened_from_its_page_once_and_the_log_has_who_and_why(
    stranger: WatchedPage, here: Console, tmp_path: Path
) -> None:
    page = stranger.page
    stranger.sign_in(here.keys["unseal"])
    page.get_by_role("link", name="Privacy").click()
    page.get_by_role("link", name=SEALED).click()
    page.get_by_role("heading", name="Sealed").wait_for()
    assert SECRET not in page.content()
    page.get_by_label("Why").fill("a complaint")
    page.get_by_role("button", name="Open it once").click()
    page.get_by_text("Opened for this look only").wait_for()
    assert SECRET in page.inner_text("main")
    stranger.sound_by_day_and_night("opened", tmp_path)
    record = here.newest(Directive)
    assert (record.order, record.about, record.reason) == ("open", SEALED, "a complaint")
    assert record.owner == owner(here, "unseal")
    page.goto(f"{here.url}/answers/{SEALED}")
    assert SECRET not in page.content() and "Sealed" in page.inner_text("main")


def test_texts_sealed_in_a_dead_letter_are_opened_from_its_page_once_and_the_log_has_who_and_why(
    stranger: WatchedPage, here: Console, tmp_path: Path
) -> None:
    assert here.log.keys is not None
    said = {"answer_id": answer_id(SEALED), "text": seal_text(SECRET, here.log.keys, SEALED), "stars": 3}
    lost = DeadLetter(
        topic="feedback",
        partition=0,
        offset=77,
        stage="feedback crm",
        reason="event invalid",
        value=json.dumps(said).encode(),
    )
    here.publish(lost, topics.DEAD_LETTERS)
    page = stranger.page
    stranger.sign_in(here.keys["unseal"])
    link = page.get_by_role("link", name="feedback/0@77")
    for _ in range(60):
        page.goto(f"{here.url}/data")
        if link.count():
            break
        page.wait_for_timeout(500)
    link.click()
    page.get_by_text("1 text of a named user is sealed in it.").wait_for()
    assert SECRET not in page.content()
    stranger.sound_by_day_and_night("letter", tmp_path)
    page.get_by_label("Why").fill("a complaint")
    page.get_by_role("button", name="Open it once").click()
    page.get_by_text("Opened for this look only").wait_for()
    assert SECRET in page.inner_text("main")
    stranger.sound_by_day_and_night("letter-opened", tmp_path)
    record = here.newest(Directive)
    assert (record.order, record.owner, record.reason) == ("open", owner(here, "unseal"), "a complaint")
    assert record.about.startswith("dead-letters/")


def test_the_forms_of_an_operator_can_be_used_by_anybody(operator: WatchedPage, tmp_path: Path) -> None:
    page = operator.page
    page.get_by_role("link", name="Versions", exact=True).click()
    assert page.locator("main form.act").count() >= 2
    operator.sound_by_day_and_night("operator-versions", tmp_path)
    page.goto(f"{operator.url}/versions/1")
    assert page.locator("main form.act").count() >= 4, "promote, try, pin and roll back"
    operator.sound_by_day_and_night("operator-version", tmp_path)
    page.goto(f"{operator.url}/data")
    operator.sound_by_day_and_night("operator-data", tmp_path)


@pytest.mark.parametrize(
    ("version", "action", "record"),
    [
        ("v6", "promote", ("promoted", 6, "stable")), ("v7", "try", ("promoted", 7, "canary")),
        ("v6", "pin", ("pinned", 6, "stable")), ("v2", "rollback", ("rolled_back", 2, "stable")),
    ],
)  # fmt: skip
def test_from_the_first_page_a_version_is_moved_with_a_reason_and_the_log_has_who(
    operator: WatchedPage, here: Console, version: str, action: str, record: tuple[str, int, str]
) -> None:
    page = operator.page
    page.get_by_role("link", name="Versions", exact=True).click()
    page.get_by_role("link", name="Every published version").click()
    page.get_by_role("region", name="Versions").get_by_role("link", name=version, exact=True).click()
    form = page.locator(f"form[action='/actions/{action}']")
    form.get_by_label("Why").fill(f"to {action}, <b>“looked”</b>")
    form.get_by_role("button").click()
    page.wait_for_url("**/versions?done=**")
    found = here.newest(PolicyEvent)
    assert (found.event, found.version, found.channel) == record
    assert (found.owner, found.reason) == (owner(here, "operate"), f"to {action}, <b>“looked”</b>")
    assert f"to {action}, <b>“looked”</b>" in page.get_by_role("region", name="Decisions").inner_text()
    assert not operator.complaints


def test_learning_is_paused_and_let_go_on_from_the_page_and_the_flow_says_so(
    operator: WatchedPage, here: Console
) -> None:
    page = operator.page
    for action, order, shown in (("pause", "pause", "Learning is paused."), ("resume", "continue", "Learning is on.")):
        page.get_by_role("link", name="Versions", exact=True).click()
        form = page.locator(f"form[action='/actions/{action}']")
        form.get_by_label("Why").fill(f"to {action}")
        form.get_by_role("button").click()
        page.wait_for_url("**/versions?done=**")
        assert shown in page.inner_text("main")
        found = here.newest(Directive)
        assert (found.order, found.owner, found.reason) == (order, owner(here, "operate"), f"to {action}")
        page.get_by_role("link", name="Flow", exact=True).click()
        is_said = f"Learning is paused by {owner(here, 'operate')}" in page.inner_text("#sentence")
        assert is_said is (action == "pause")
    assert not operator.complaints


def on_a_phone(page: "Page") -> None:
    """Until the window is as narrow as one: it is made so a moment after it was asked for."""
    page.set_viewport_size({"width": 390, "height": 800})
    for _ in range(200):
        if page.evaluate("innerWidth") == 390:
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"got a window of {page.evaluate('innerWidth')}, expected 390")


# Of each of these what it says, and its edges: left, top, right, bottom.
PLACES = """all => all.map(one => {
  const box = one.getBBox();
  return [one.textContent, box.x, box.y, box.x + box.width, box.y + box.height];
})"""
WATCH = """() => {
  window.changes = [];
  new MutationObserver(seen => {
    for (const one of seen) {
      const spoken = [one.target, ...one.addedNodes].find(
        node => node.closest?.("[aria-live]") || (node !== document.body && node.querySelector?.("[aria-live]")));
      if (spoken) window.changes.push(spoken.textContent);
    }
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
