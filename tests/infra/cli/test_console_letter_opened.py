"""A sealed event among the dead letters is opened as a sealed answer is: by a key that may, and the log says who and why."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from infra.cli.console.letters import GONE, MAX_OPENED, OF_NOBODY, TOO_MANY, opened_letter
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, seal_event, seal_text
from schemas import DeadLetter, Directive, topics
from schemas.errors import BadFrame, Sealed
from schemas.ids import answer_id
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


OF_ANN = f"{SESSION}.1-7.0-0-0"
OF_OTHER = f"{OTHERS}.1-7.0-0-0"


def said_of(keys: Keys, answer: str, *texts: str) -> dict[str, object]:
    """What the gateway hands on of somebody's words: in the clear all but the texts."""
    return {"answer_id": answer_id(answer), "value": 0.5, "said": [seal_text(text, keys, answer) for text in texts]}


def test_texts_that_are_sealed_in_a_letter_are_opened_once_by_a_key_that_may_and_the_log_says_so(here: Console) -> None:
    assert here.log.keys is not None
    place = published(here, json.dumps(said_of(here.log.keys, OF_ANN, SECRET, "and more")).encode())
    path = f"/data/letters/{place}"
    with browser(here, "operate") as client:
        page = client.get(path)
        assert "2 texts of a named user are sealed in it." in page.text and "/actions/open-letter" not in page.text
        assert page.text.count("(sealed)") == 2 and OF_ANN in page.text
    with browser(here, "unseal") as client:
        form = {"token": token_of(client, path), "letter": place}
        assert client.post("/actions/open-letter", data=form | {"why": " "}).status_code == 400
        opened = client.post("/actions/open-letter", data=form | {"why": "a complaint"})
        assert opened.status_code == 200 and SECRET in opened.text and "and more" in opened.text
        assert "Opened for this look only" in opened.text
        assert SECRET not in client.get(path).text
    record = newest(here, Directive)
    assert (record.order, record.about) == ("open", f"dead-letters/{place.replace('/', '@')}")


def test_of_several_texts_in_a_letter_each_opens_under_its_own_key_or_says_why_it_stays_sealed() -> None:
    keys = Keys(MemoryStore())
    record = {"a": said_of(keys, OF_ANN, SECRET), "b": said_of(keys, OF_OTHER, "of another")}
    elsewhere = seal_text("of an answer that is not named", keys, f"{SESSION}.1-9.0-0-0")
    letter = letter_of(record | {"c": elsewhere})
    keys.destroy(OTHERS)
    found = json.loads(opened_letter(letter, keys).value)
    assert (found["a"]["said"], found["b"]["said"], found["c"]) == ([SECRET], [GONE], OF_NOBODY)
    assert found["a"]["value"] == 0.5


def test_a_letter_of_which_nothing_opens_is_refused_with_why() -> None:
    keys = Keys(MemoryStore())
    with pytest.raises(BadFrame, match="nothing that is sealed"):
        opened_letter(letter_of({"said": "hello"}), keys)
    with pytest.raises(BadFrame, match="nothing here names the answer"):
        opened_letter(letter_of({"said": seal_text(SECRET, keys, OF_ANN)}), keys)
    gone = letter_of(said_of(keys, OF_OTHER, SECRET))
    keys.destroy(OTHERS)
    with pytest.raises(Sealed):
        opened_letter(gone, keys)


def test_of_one_letter_a_number_of_texts_is_opened_and_the_rest_says_so() -> None:
    keys = Keys(MemoryStore())
    letter = letter_of(said_of(keys, OF_ANN, *(f"text {at}" for at in range(MAX_OPENED + 3))))
    found = json.loads(opened_letter(letter, keys).value)["said"]
    assert found == [*(f"text {at}" for at in range(MAX_OPENED)), *[TOO_MANY] * 3]


def letter_of(record: object) -> DeadLetter:
    value = json.dumps(record).encode()
    return DeadLetter(
        topic="feedback", partition=0, offset=1, stage="feedback crm", reason="event invalid", value=value
    )


def orders(here: Console) -> list[Directive]:
    async def read() -> list[Directive]:
        found = [one.value async for one in here.log.read_all(topics.POLICIES)]
        return [one for one in found if isinstance(one, Directive)]

    return asyncio.run_coroutine_threadsafe(read(), here.loop).result(timeout=20)
