"""A sealed event among the dead letters is opened as a sealed answer is: by a key that may, and the log says who and why."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from infra.store.seal import seal_event
from schemas import DeadLetter, Directive, topics
from tests.infra.cli.console_rig import SECRET, SESSION, Console, console
from tests.infra.cli.test_console_access import browser, newest, token_of
from tests.infra.cli.test_console_pages import text_of

OTHERS = "n" * 64  # the session of somebody who is forgotten


@pytest.fixture(scope="module")
def here() -> Iterator[Console]:
    with console() as found:
        yield found


def published(here: Console, value: bytes) -> str:
    """Where a letter of an event lies, as its page has it."""
    lost = DeadLetter(topic="crm", partition=0, offset=1, stage="feedback crm", reason="event invalid", value=value)
    at = asyncio.run_coroutine_threadsafe(here.log.publish(topics.DEAD_LETTERS, lost), here.loop).result(timeout=20)
    return f"{at.partition}/{at.offset}"


def shut(here: Console, session: str) -> bytes:
    assert here.log.keys is not None
    return seal_event(json.dumps({"said": SECRET}).encode(), here.log.keys, [session])


def test_a_sealed_letter_stays_sealed_until_a_key_that_may_opens_it_and_the_log_says_so(here: Console) -> None:
    place = published(here, shut(here, SESSION))
    path = f"/data/letters/{place}"
    about = f"dead-letters/{place.replace('/', '@')}"
    with browser(here, "operate") as client:
        assert "Sealed" in client.get(path).text and "/actions/open-letter" not in client.get(path).text
    with browser(here, "unseal") as client:
        assert SECRET not in client.get(path).text
        form = {"token": token_of(client, path), "letter": place}
        assert client.post("/actions/open-letter", data=form | {"why": " "}).status_code == 400
        assert not [one for one in orders(here) if one.about == about], "nothing was opened without a reason"
        opened = client.post("/actions/open-letter", data=form | {"why": "a complaint"})
        assert opened.status_code == 200 and SECRET in opened.text
        assert SECRET not in client.get(path).text
    record = newest(here, Directive)
    assert (record.order, record.about, record.reason) == ("open", about, "a complaint")


def test_what_is_forgotten_or_not_sealed_or_nowhere_is_not_opened_and_nothing_is_written(here: Console) -> None:
    assert here.log.keys is not None
    gone, plain = published(here, shut(here, OTHERS)), published(here, b'{"said": "hello"}')
    here.log.keys.destroy(OTHERS)
    before = len(orders(here))
    with browser(here, "unseal") as client:
        form = {"token": token_of(client, f"/data/letters/{gone}"), "why": "a complaint"}
        for place, code in ((gone, 400), (plain, 400), ("0/99999", 404), ("x/1", 404), ("", 404), ("1/2/3", 404)):
            answer = client.post("/actions/open-letter", data=form | {"letter": place})
            assert answer.status_code == code and SECRET not in answer.text, place
        assert "forgotten" in text_of(client.post("/actions/open-letter", data=form | {"letter": gone}))
    assert len(orders(here)) == before


def orders(here: Console) -> list[Directive]:
    async def read() -> list[Directive]:
        found = [one.value async for one in here.log.read_all(topics.POLICIES)]
        return [one for one in found if isinstance(one, Directive)]

    return asyncio.run_coroutine_threadsafe(read(), here.loop).result(timeout=20)
