"""The Data page: letters, tasks, and what processors made; and sealed letters, which a key that may opens once."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.cli.console import data
from infra.cli.console.data import SHOWN
from infra.cli.console.letters import GONE, MAX_OPENED, OF_NOBODY, TOO_MANY, opened_letter
from infra.ledger.index import bounds
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, seal_event, seal_text
from schemas import DeadLetter, Directive, topics
from schemas.errors import BadFrame, Sealed
from schemas.ids import answer_id
from tests.infra.cli.console_rig import (
    HOSTILE,
    MADE,
    SECRET,
    SESSION,
    Console,
    browser,
    console,
    filled,
    folded,
    form_token,
    look,
    looking,
    page_text,
    sqlite_steps,
)

OTHERS = "n" * 64  # the session of somebody who is forgotten
OF_ANN = f"{SESSION}.1-7.0-0-0"
OF_OTHER = f"{OTHERS}.1-7.0-0-0"


def test_the_data_page_has_tasks_with_their_success_what_processors_made_and_every_bound(tmp_path: Path) -> None:
    paths = ("/data", "/data?order=hardest&task=add-", "/answers?made=yes", f"/answers/{MADE}")
    text, hardest, made, answer = map(page_text, look(tmp_path, *paths))
    assert "add-0 8 62.5% v7" in text, "right in five of eight versions"
    assert "made from question 0" in text and "experiences/0@9 verify bad frame" in text
    assert hardest.index("add-0") < hardest.index("add-5")
    assert "made from question 0" in made and f"{SESSION}.1-0.0-0-0" in answer
    assert "curves 40 the newest 50,000 versions" in text and "(keep.replay)" in text
    assert all(table in text for table in bounds(""))


def test_every_letter_is_on_a_page_of_the_data_though_many_came_at_one_moment(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        for at in range(2 * SHOWN):
            lost = DeadLetter(topic="experiences", partition=1, offset=at, stage="verify", reason="bad frame")
            await log.publish(topics.DEAD_LETTERS, lost)
        async with looking(tmp_path, log) as (client, _):
            for first in ("/data", "/data?reason=bad+frame"):
                found, path = [], first
                for _ in range(3):
                    page = (await client.get(path)).text
                    found += re.findall(r"<code>(experiences/\d+@\d+)</code>", page)
                    path = page.partition('class="more" href="')[2].partition('"')[0].replace("&amp;", "&")
                assert not path and len(found) == len(set(found)) == 2 * SHOWN + 1

    asyncio.run(main())


def test_what_a_letter_holds_is_shown_unless_it_is_sealed_or_not_json_and_is_never_run(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        assert log.keys is not None
        shut = json.dumps({"said": seal_text(SECRET, log.keys, MADE), "stars": 3}).encode()
        values = [
            json.dumps({"text": HOSTILE["markup"], "turned": HOSTILE["control"]}).encode(), shut,
            seal_event(json.dumps({"said": SECRET}).encode(), log.keys, [SESSION]), b"\x00HR\xff", b"", b"[" * 60_000,
        ]  # fmt: skip
        places = []
        for at, value in enumerate(values):
            lost = DeadLetter(topic="tasks", partition=0, offset=at, stage="verify", reason="odd", value=value)
            places.append(await log.publish(topics.DEAD_LETTERS, lost))
        async with looking(tmp_path, log) as (client, _):
            paths = [f"/data/letters/{place.partition}/{place.offset}" for place in places]
            listed = (await client.get("/data")).text
            pages = [await client.get(path) for path in paths]
            assert all(path in listed for path in paths) and {page.status_code for page in pages} == {200}
            assert "&lt;script&gt;" in pages[0].text and "<script>document" not in pages[0].text
            assert not {"\x1b", "\u202e"} & set(pages[0].text)
            assert "(sealed)" in pages[1].text and "&#34;stars&#34;: 3" in pages[1].text
            assert "Sealed: it is about an answer of a named user." in page_text(pages[2])
            assert "Not JSON: 4 bytes." in page_text(pages[3]) and "It holds nothing." in page_text(pages[4])
            assert "Not JSON: 60,000 bytes." in page_text(pages[5])
            assert not any(SECRET in page.text or "sealed:" in page.text for page in pages)
            for nowhere in ("0/999999", "7/0", "x/1", "0/-1", f"0/{'9' * 30}"):
                assert (await client.get(f"/data/letters/{nowhere}")).status_code == 404
            client.cookies.clear()
            assert (await client.get(paths[0])).status_code == 401

    asyncio.run(main())


QUESTIONS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "letters": lambda index: data.letters(index, "", None),
    "letters of a reason": lambda index: data.letters(index, "odd", None),
    **{
        order: lambda index, order=order: data.tasks(index, order, "")
        for order in ("hardest", "easiest", "most judged")
    },  # type: ignore[misc]
    "tasks of a name": lambda index: data.tasks(index, "hardest", "a-0"),
}


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_a_page_of_letters_or_tasks_looks_at_no_more_rows_in_a_long_index(tmp_path: Path, question: str) -> None:
    index = folded(tmp_path)
    database = index.database
    found = []
    for start, stop in ((0, 10_000), (10_000, 60_000)):
        numbers = range(start, stop)
        with database:
            database.executemany(
                "INSERT INTO tasks VALUES (?, ?, ?, 1, 1)",
                [(f"a-{n:06}", 1 + n % 7, n * 31 % 101 / 101) for n in numbers],
            )
            database.executemany(
                "INSERT INTO letters (n, part, offset, reason) VALUES (?, 0, ?, 'odd')", [(n, n) for n in numbers]
            )
        found.append(sqlite_steps(database, QUESTIONS[question]))
    assert found[1] <= 1.5 * found[0], found
    index.close()


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


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_sealed_in_a_letter_is_opened_once_by_a_key_that_may_and_the_log_says_so(
    here: Console, is_whole: bool
) -> None:
    """The whole event, or texts in it."""
    assert here.log.keys is not None
    texts = json.dumps(sealed_feedback(here.log.keys, OF_ANN, SECRET, "and more")).encode()
    place = published(here, shut(here, SESSION) if is_whole else texts)
    path, about = f"/data/letters/{place}", f"dead-letters/{place.replace('/', '@')}"
    with browser(here, "operate") as client:
        page = client.get(path)
        assert (
            "/actions/open-letter" not in page.text
            and ("Sealed" if is_whole else "2 texts of a named user") in page.text
        )
        assert is_whole or (page.text.count("(sealed)") == 2 and OF_ANN in page.text)
    with browser(here, "unseal") as client:
        assert SECRET not in client.get(path).text
        form = {"token": form_token(client, path), "letter": place}
        assert client.post("/actions/open-letter", data=form | {"why": " "}).status_code == 400
        assert not [order for order in orders(here) if order.about == about], "nothing was opened without a reason"
        opened = client.post("/actions/open-letter", data=form | {"why": "a complaint"})
        assert opened.status_code == 200 and SECRET in opened.text and "Opened for this look only" in opened.text
        assert (is_whole or "and more" in opened.text) and SECRET not in client.get(path).text
    record = here.newest(Directive)
    assert (record.order, record.about, record.reason) == ("open", about, "a complaint")


def test_what_is_forgotten_or_not_sealed_or_nowhere_is_not_opened_and_nothing_is_written(here: Console) -> None:
    assert here.log.keys is not None
    gone, plain = published(here, shut(here, OTHERS)), published(here, b'{"said": "hello"}')
    here.log.keys.destroy(OTHERS)
    before = len(orders(here))
    with browser(here, "unseal") as client:
        form = {"token": form_token(client, f"/data/letters/{gone}"), "why": "a complaint"}
        for place, code in ((gone, 400), (plain, 400), ("0/99999", 404), ("x/1", 404), ("", 404), ("1/2/3", 404)):
            answer = client.post("/actions/open-letter", data=form | {"letter": place})
            assert answer.status_code == code and SECRET not in answer.text, place
        assert "forgotten" in page_text(client.post("/actions/open-letter", data=form | {"letter": gone}))
    assert len(orders(here)) == before


def sealed_feedback(keys: Keys, answer: str, *texts: str) -> dict[str, object]:
    """What the gateway hands on of somebody's words: in the clear all but the texts."""
    return {"answer_id": answer_id(answer), "value": 0.5, "said": [seal_text(text, keys, answer) for text in texts]}


def test_of_several_texts_in_a_letter_each_opens_under_its_own_key_or_says_why_it_stays_sealed() -> None:
    keys = Keys(MemoryStore())
    record = {"a": sealed_feedback(keys, OF_ANN, SECRET), "b": sealed_feedback(keys, OF_OTHER, "of another")}
    elsewhere = seal_text("of an answer that is not named", keys, f"{SESSION}.1-9.0-0-0")
    letter = feedback_letter(record | {"c": elsewhere})
    keys.destroy(OTHERS)
    found = json.loads(opened_letter(letter, keys).value)
    assert (found["a"]["said"], found["b"]["said"], found["c"]) == ([SECRET], [GONE], OF_NOBODY)
    assert found["a"]["value"] == 0.5


def test_a_letter_of_which_nothing_opens_is_refused_with_why() -> None:
    keys = Keys(MemoryStore())
    with pytest.raises(BadFrame, match="nothing that is sealed"):
        opened_letter(feedback_letter({"said": "hello"}), keys)
    with pytest.raises(BadFrame, match="nothing here names the answer"):
        opened_letter(feedback_letter({"said": seal_text(SECRET, keys, OF_ANN)}), keys)
    gone = feedback_letter(sealed_feedback(keys, OF_OTHER, SECRET))
    keys.destroy(OTHERS)
    with pytest.raises(Sealed):
        opened_letter(gone, keys)


def test_of_one_letter_a_number_of_texts_is_opened_and_the_rest_says_so() -> None:
    keys = Keys(MemoryStore())
    letter = feedback_letter(sealed_feedback(keys, OF_ANN, *(f"text {at}" for at in range(MAX_OPENED + 3))))
    found = json.loads(opened_letter(letter, keys).value)["said"]
    assert found == [*(f"text {at}" for at in range(MAX_OPENED)), *[TOO_MANY] * 3]


def feedback_letter(record: object) -> DeadLetter:
    value = json.dumps(record).encode()
    return DeadLetter(
        topic="feedback", partition=0, offset=1, stage="feedback crm", reason="event invalid", value=value
    )


def orders(here: Console) -> list[Directive]:
    async def read() -> list[Directive]:
        found = [message.value async for message in here.log.read_all(topics.POLICIES)]
        return [value for value in found if isinstance(value, Directive)]

    return asyncio.run_coroutine_threadsafe(read(), here.loop).result(timeout=20)
