"""The Data page: letters, tasks, and what processors made."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.cli.console import data
from infra.cli.console.data import SHOWN
from infra.cli.console.fold import MARK, Folder
from infra.cli.console.index import ConsoleIndex
from infra.cli.look.console_bounds import read_only
from infra.log.bus import Record
from infra.store.seal import seal_event, seal_text
from schemas import DeadLetter, decode, encode, topics
from tests.infra.cli.console_rig import HOSTILE, MADE, SECRET, SESSION, looking, steps_of
from tests.infra.cli.test_console_pages import filled, text_of


def test_the_data_page_has_tasks_with_their_success_and_what_processors_made(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            text = text_of(await client.get("/data"))
            assert "add-0 8 62.5% v7" in text, "right in five of eight versions"
            assert "made from question 0" in text
            hardest = text_of(await client.get("/data?order=hardest&task=add-"))
            assert hardest.index("add-0") < hardest.index("add-5")
            assert "experiences/0@9 verify bad frame" in text
            assert "made from question 0" in text_of(await client.get("/answers?made=yes"))
            assert f"{SESSION}.1-0.0-0-0" in text_of(await client.get(f"/answers/{MADE}"))

    asyncio.run(main())


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
            paths = [f"/data/letters/{one.partition}/{one.offset}" for one in places]
            listed = (await client.get("/data")).text
            pages = [await client.get(path) for path in paths]
            assert all(path in listed for path in paths) and {page.status_code for page in pages} == {200}
            assert "&lt;script&gt;" in pages[0].text and "<script>document" not in pages[0].text
            assert not {"\x1b", "\u202e"} & set(pages[0].text)
            assert "(sealed)" in pages[1].text and "&#34;stars&#34;: 3" in pages[1].text
            assert "Sealed: it is about an answer of a named user." in text_of(pages[2])
            assert "Not JSON: 4 bytes." in text_of(pages[3]) and "It holds nothing." in text_of(pages[4])
            assert "Not JSON: 60,000 bytes." in text_of(pages[5])
            assert not any(SECRET in page.text or "sealed:" in page.text for page in pages)
            for nowhere in ("0/999999", "7/0", "x/1", "0/-1", f"0/{'9' * 30}"):
                assert (await client.get(f"/data/letters/{nowhere}")).status_code == 404
            client.cookies.clear()
            assert (await client.get(paths[0])).status_code == 401

    asyncio.run(main())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_letter_was_delivered_again_though_its_mark_is_read_before_it(tmp_path: Path, is_first: bool) -> None:
    index = ConsoleIndex(tmp_path / "console.sqlite")
    folder = Folder(index, run="t", policy="main")
    letter = DeadLetter(topic="tasks", partition=0, offset=5, stage="verify", reason="odd", value=b"x")
    mark = DeadLetter(topic="dead-letters", partition=3, offset=7, stage=MARK, reason=MARK, error="ann: mended")
    records = [
        Record("t.dead-letters", 3, 7, 1000, b"", encode(letter)),
        Record("t.dead-letters", 0, 2, 2000, b"", encode(mark)),
    ]
    for one in records[::-1] if is_first else records:
        folder.fold(topics.DEAD_LETTERS, [(one, decode(one.value))], {})
    database = read_only(index.path)
    (row,) = data.letters(database, "", None)[0]
    assert (row["done"], row["done_by"]) == (1, "ann: mended")
    assert [(one["count"], one["done"]) for one in data.letter_counts(database)] == [(1, 1)]
    database.close()
    index.close()


QUESTIONS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "letters": lambda one: data.letters(one, "", None),
    "letters of a reason": lambda one: data.letters(one, "odd", None),
    **{order: lambda one, order=order: data.tasks(one, order, "") for order in ("hardest", "easiest", "most judged")},  # type: ignore[misc]
    "tasks of a name": lambda one: data.tasks(one, "hardest", "a-0"),
}


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_a_page_of_letters_or_tasks_looks_at_no_more_rows_in_a_long_index(tmp_path: Path, question: str) -> None:
    index = ConsoleIndex(tmp_path / "console.sqlite")
    database = read_only(index.path)
    found = []
    for start, stop in ((0, 10_000), (10_000, 60_000)):
        numbers = range(start, stop)
        with index.database:
            index.many(
                "INSERT INTO tasks VALUES (?, ?, ?, 1, 1)",
                [(f"a-{n:06}", 1 + n % 7, n * 31 % 101 / 101) for n in numbers],
            )
            index.many(
                "INSERT INTO letters (n, part, offset, reason) VALUES (?, 0, ?, 'odd')", [(n, n) for n in numbers]
            )
        found.append(steps_of(database, QUESTIONS[question]))
    assert found[1] <= 1.5 * found[0], found
    database.close()
    index.close()
