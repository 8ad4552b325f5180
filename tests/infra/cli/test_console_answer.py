"""The page of one answer: its whole life, what lies beside it, and what of it stays shut."""

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from infra.cli.console.answers import beside
from infra.cli.console.fold import Folder
from infra.cli.console.index import ConsoleIndex, key_of
from infra.cli.console.keeping import FILE
from infra.cli.look.console_bounds import read_only
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.seal import seal_text
from schemas import Batch, BatchItem, Block, Feedback, topics
from schemas.ids import answer_id
from tests.infra.cli.console_rig import live, looking, of_suite
from tests.infra.cli.test_console_pages import FIRST, filled, text_of


def test_one_answers_page_has_its_whole_life(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            page = await client.get(FIRST)
            text = text_of(page)
            assert "question 0 about refunds" in text and "answer 0" in text
            assert page.text.count('class="tok l') > 6 and ' odd"' in page.text, "tokens by chance, and by version"
            assert "exact 1 the whole answer version 1" in text and "Went through validate@1 → exact@1." in text
            said = text.partition("Feedback")[2].partition("Its way")[0]
            assert re.findall(r"user (?:\w+ )?([01])", said) == ["0", "1"], "feedback as it came and as it was revised"
            assert "buffered 1 +0.5" in text and "trained, step 9 – +0.5 1 lane live, on version 4" in text
            assert "First learned in version 5" in text
            assert "The turns of the session around it." in text and "question 1 about refunds" in text

    asyncio.run(main())


def test_of_an_answer_that_waits_the_page_says_that_nothing_was_made_of_it_yet(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            text = text_of(await client.get(f"/answers/{live(4, '', '').id}"))
            way = text.partition("Its way")[2].partition("Its session")[0]
            assert "It was answered. Nothing else has happened to it yet." in way
            assert "Nothing else has happened" not in text_of(await client.get(FIRST))

    asyncio.run(main())


def test_an_answer_to_a_suite_is_evaluated_and_never_pending(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            rows = text_of(await client.get("/answers?suite=dev")).rpartition("became")[2]
            assert rows.count("evaluated") == 48 and "pending" not in rows
            page = text_of(await client.get(f"/answers/{of_suite(3, 2).id}"))
            assert "Not learned from: it was asked to evaluate a version." in page

    asyncio.run(main())


def test_what_the_trainer_dropped_says_so_on_its_page(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        name = live(3, "", "").id
        item = BatchItem(id=name, partition=0, offset=0, index=0, lane="live", advantage=0.5, min_version=3)
        batch = Batch(run="t", token=1, step=10, version=4, items=(), dropped=(item,), dropped_because=("too old",))
        await log.publish(topics.BATCHES, batch)
        async with looking(tmp_path, log) as (client, _):
            text = text_of(await client.get(f"/answers/{name}"))
            assert "Not learned from: too old." in text and "became too old" in text.partition("Its way")[2]

    asyncio.run(main())


def test_what_was_written_of_an_answer_is_shown_where_it_is_of_nobody_and_else_stays_sealed(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        assert log.keys is not None
        nobodys = live(90, "sum", "it is 4", id="sum-7.0-0-0", group="sum-7", lane="usual", turn=-1)
        await log.publish(topics.EXPERIENCES, Block((nobodys,)))
        for name in (nobodys.id, live(0, "", "").id):
            said = await asyncio.to_thread(seal_text, "a fine answer", log.keys, name)
            await log.publish(
                topics.VERIFIED, Feedback(ref=answer_id(name), id="w", source="user", rater="r", text=said)
            )
        async with looking(tmp_path, log) as (client, _):
            assert "a fine answer" in text_of(await client.get(f"/answers/{nobodys.id}"))
            shut = text_of(await client.get(FIRST))
            assert "a fine answer" not in shut and "text sealed" in shut

    asyncio.run(main())


def test_an_answer_that_is_waited_for_keeps_no_other_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database, database:
                gone = "sum-9.0-0-0"  # listed, and in no log
                database.execute("INSERT INTO answers (n, key, id) VALUES (?, ?, ?)", (9999, key_of(gone), gone))
            waiting = asyncio.create_task(client.get(f"/answers/{gone}"))
            for _ in range(3):
                assert (await client.get(FIRST)).status_code == 200
            assert not waiting.done()
            waiting.cancel()

    asyncio.run(main())


def test_beside_an_answer_of_a_long_session_are_the_turns_around_it(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        for at in range(200):
            await log.publish(topics.EXPERIENCES, Block((live(at, f"turn {at}", "so"),)))
        index = ConsoleIndex(tmp_path / "console.sqlite")
        await Folder(index, run="t", policy="main").refresh(log)
        database = read_only(index.path)
        ids = [row[0] for row in database.execute("SELECT id FROM answers ORDER BY n")]
        assert [row["id"] for row in beside(database, ids[150])] == ids[119:183]
        assert [row["id"] for row in beside(database, ids[2])] == ids[:35]
        database.close()
        index.close()

    asyncio.run(main())


def test_beside_an_answer_is_its_whole_group(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        members = [
            live(0, "2+2=", f"it is {at}", id=f"sum-7.0-{at}-0", group="sum-7", episode=at, lane="usual", turn=-1)
            for at in range(4)
        ]
        await log.publish(topics.EXPERIENCES, Block(tuple(members)))
        await log.publish(topics.EXPERIENCES, Block((live(5, "another", "group"),)))
        index = ConsoleIndex(tmp_path / "console.sqlite")
        await Folder(index, run="t", policy="main").refresh(log)
        database = read_only(index.path)
        assert [row["answered"] for row in beside(database, "sum-7.0-2-0")] == [f"it is {at}" for at in range(4)]
        database.close()
        index.close()

    asyncio.run(main())
