"""The console's index has a bound for each of its tables, and says how much there is."""

import asyncio
import threading
from pathlib import Path

from infra.cli.console.index import ConsoleIndex
from infra.cli.look.console_bounds import MAX_TASKS, NEWEST, bounds_of, read_only, sizes, trim
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import PolicyEvent, topics
from tests.infra.cli.console_rig import fill, looking
from tests.infra.cli.test_console_pages import text_of

BEYOND = 20


def test_every_table_of_the_index_has_a_bound_and_a_size(tmp_path: Path) -> None:
    index = ConsoleIndex(tmp_path / "console.sqlite")
    named = {
        str(name)
        for (name,) in index.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if not str(name).startswith(("words_", "sqlite_"))
    }
    assert set(bounds_of("30d")) == set(sizes(index.database)) == named
    index.close()


def test_of_what_the_log_keeps_for_ever_the_newest_stays_and_the_rest_goes(tmp_path: Path) -> None:
    index = ConsoleIndex(tmp_path / "console.sqlite")
    with index.database:
        for table, (number, at_most) in NEWEST.items():
            named = {"curves": ("name, ", "'loss', "), "evals": ("suite, ", "'dev', ")}.get(table, ("", ""))
            statement = f"INSERT INTO {table} ({named[0]}{number}) VALUES ({named[1]}?)"
            index.many(statement, [(n,) for n in range(at_most + BEYOND)])
        index.many("INSERT INTO tasks VALUES (?, 1, 1.0, 1, ?)", [(f"t-{n}", n) for n in range(MAX_TASKS + BEYOND)])
    trim(index.database, 0)
    found = sizes(index.database)
    assert {table: found[table] for table in NEWEST} == {table: at_most for table, (_, at_most) in NEWEST.items()}
    assert found["tasks"] == MAX_TASKS
    assert index.database.execute("SELECT min(time_ms), max(time_ms) FROM tasks").fetchone() == (
        BEYOND,
        MAX_TASKS + BEYOND - 1,
    )
    assert index.database.execute("SELECT min(version) FROM curves").fetchone() == (BEYOND,)
    trim(index.database, MAX_TASKS)
    assert sizes(index.database)["tasks"] == BEYOND, "and what is older than the log keeps"
    index.close()


def test_a_fence_takes_the_place_of_the_one_before_it_and_counts_are_those_of_the_tables(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        async with looking(tmp_path, log) as (client, reading):
            found = await reading.ask(sizes)
            assert found["texts"] == await reading.ask(
                lambda one: one.execute("SELECT count(*) FROM texts").fetchone()[0]
            )
            assert found["fence"] == 1 and found["answers"] - found["texts"] == 2, "two are sealed"
            text = text_of(await client.get("/data"))
            assert "curves 40 the newest 50,000 versions" in text
            assert f"answers {found['answers']} {reading.settings.keep.replay} (keep.replay)" in text

    asyncio.run(main())


def test_who_keeps_the_index_up_keeps_it_bounded(tmp_path: Path) -> None:
    """Curves of as many versions as stay, of which the oldest go when the next is read."""
    (_, at_most) = NEWEST["curves"]
    index = ConsoleIndex(tmp_path / "state" / "console.sqlite")
    with index.database:
        index.many("INSERT INTO curves VALUES ('loss', ?, 0, 0, 1)", [(n,) for n in range(at_most)])
    index.close()

    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        event = PolicyEvent(event="published", policy="main", version=at_most + 9, stats={"loss": 1.0})
        await log.publish(topics.POLICIES, event)
        async with looking(tmp_path, log):
            pass

    asyncio.run(main())
    database = read_only(tmp_path / "state" / "console.sqlite")
    assert tuple(database.execute("SELECT min(version), max(version) FROM curves").fetchone()) == (10, at_most + 9)
    database.close()


def test_an_index_is_closed_only_when_no_thread_writes_it(tmp_path: Path) -> None:
    """A thread goes on after the task that asked for it was cancelled."""
    index = ConsoleIndex(tmp_path / "console.sqlite")
    closing = threading.Thread(target=index.close)
    with index.turn:
        closing.start()
        closing.join(timeout=0.2)
        trim(index.database, 0)
    closing.join(timeout=30)
    assert not closing.is_alive()
