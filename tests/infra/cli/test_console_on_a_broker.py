"""What the Data page does, driven in a browser to its end over a real broker: letters go back, other rules are compared."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from infra.cli.connect import connected
from infra.cli.settings import Settings
from infra.log.log import Log
from infra.store.store import Store
from schemas import Block, DeadLetter, DropMarker, encode, topics
from tests.infra.cli.browser_rig import WatchedPage, browser
from tests.infra.cli.console_rig import BROKER_TOML, Console, console, live

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def here(kafka: str) -> Iterator[Console]:
    with console(BROKER_TOML.format(app=uuid4().hex[:12], kafka=kafka), recorded) as found:
        yield found


@pytest.fixture(scope="module")
def watched(here: Console) -> Iterator[WatchedPage]:
    """An operator's browser; nothing may be complained of on the way."""
    with browser() as chromium:
        found = WatchedPage(chromium, here.url, "light")
        found.sign_in(here.keys["operate"])
        yield found
        assert not found.complaints


@pytest.fixture
def page(watched: WatchedPage) -> "Page":
    return watched.page


@asynccontextmanager
async def recorded(settings: Settings, store: Store) -> AsyncIterator[Log]:
    """Two answers, one dropped by a rule that is gone; two letters, one of which decodes by now."""
    async with connected(settings, create=True) as log:
        await log.create_topics(partitions=1, keep_ms=-1)
        kept, short = live(0, "where is it", "here"), live(1, "and now", "no")
        for one in (kept, short):
            await log.publish(topics.EXPERIENCES, Block((one,)))
        await log.publish(topics.VERIFIED, Block((kept,)))
        marker = DropMarker(
            id=short.id,
            group=short.group,
            episode=0,
            group_size=1,
            reason="too short",
            stage="verify",
            processor="mine@1",
        )
        await log.publish(topics.VERIFIED, marker)
        for offset, value in ((7, encode(Block((live(2, "lost once", "and found"),)))), (8, b"HR never")):
            letter = DeadLetter(
                topic="experiences",
                partition=0,
                offset=offset,
                stage="verify",
                reason="bad frame",
                value=value,
                key=b"k",
            )
            await log.publish(topics.DEAD_LETTERS, letter)
        yield log


def test_a_dead_letter_is_delivered_again_once_and_is_an_answer_from_then_on(here: Console, page: "Page") -> None:
    page.goto(f"{here.url}/data")
    page.get_by_label("Why").fill("they decode now")
    page.get_by_role("button", name="Deliver again what can be read").click()
    page.wait_for_url("**/data?done=**")
    assert "delivered again: 1 to experiences; left: 1 still does not decode" in page.inner_text("main")
    reload_until(page, f"{here.url}/data", "experiences/0@7\tverify\tbad frame delivered again")
    assert page.locator("tr", has_text="experiences/0@8").get_by_text("delivered again").count() == 0
    reload_until(page, f"{here.url}/answers?text=lost+once", "and found")
    page.goto(f"{here.url}/data")
    page.get_by_label("Why").fill("they decode now")
    page.get_by_role("button", name="Deliver again what can be read").click()
    page.wait_for_url("**/data?done=**")
    assert "delivered again: none; left: 1 still does not decode" in page.inner_text("main")


def test_other_rules_are_compared_with_what_is_on_record_and_nothing_is_written(
    here: Console, watched: WatchedPage, page: "Page", tmp_path: Path
) -> None:
    page.goto(f"{here.url}/data")
    form = page.locator("form[action='/actions/reprocess']")
    form.get_by_label("Stage").select_option("verify")
    form.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="Stage verify once more").wait_for(timeout=120_000)
    text = page.inner_text("main")
    assert "Not as recorded." in text
    change = page.locator("tr", has_text="too short").inner_text()
    assert change.startswith("no longer dropped\ttoo short\t1\t") and change.endswith("\ttoo short\tkept")
    watched.sound_by_day_and_night("reprocess", tmp_path)
    page.goto(f"{here.url}/answers?fate=too+short")
    assert "and now" in page.inner_text("main"), "what is on record stays"


def reload_until(page: "Page", url: str, text: str) -> None:
    """Until the index has read what came."""
    for _ in range(60):
        page.goto(url)
        if text in page.inner_text("main"):
            return
        page.wait_for_timeout(500)
    raise AssertionError(f"got {page.inner_text('main')}, expected {text!r}")
