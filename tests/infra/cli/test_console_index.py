"""The console's index: what it says of a log is what the log says, whatever order it came in and however often it is asked."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.console.fold import FOLDED, Folder
from infra.cli.console.index import ConsoleIndex, inode
from infra.cli.console.learning import CURVES
from infra.cli.console.search import PAGE, Query, choices, query_of, search
from infra.cli.console.serve import source_of
from infra.cli.look.console_bounds import read_only
from infra.ledger.archive import ABOUT, ArchiveHead, writing
from infra.ledger.audit import audit
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Batch, BatchItem, Block, PolicyEvent, Progress, topics
from schemas.fields import KEPT_FIGURES
from schemas.topics import Topic
from tests.infra.cli.console_rig import SECRET, fill, live, looking, looking_at, steps_of


def run_of(folder: Path) -> tuple[Log, ConsoleIndex, Folder]:
    index = ConsoleIndex(folder / "console.sqlite")
    return Log(MemoryBus(), "t", store=MemoryStore()), index, Folder(index, run="t", policy="main")


def test_what_became_of_answers_is_what_the_audit_says(tmp_path: Path) -> None:
    log, index, folder = run_of(tmp_path)

    async def main() -> Counter[str]:
        await fill(log)
        await folder.refresh(log)
        await folder.refresh(log)  # again: nothing is counted twice
        account = await audit(log, "t")
        return Counter({"trained": account.trained, "": account.pending, **account.dropped})

    expected = asyncio.run(main())
    rows = index.database.execute("SELECT fate, count(*) FROM answers WHERE suite = '' GROUP BY fate").fetchall()
    assert Counter(dict(rows)) == +expected
    totals = index.database.execute("SELECT fate, sum(count) FROM fates GROUP BY fate HAVING sum(count) > 0").fetchall()
    assert dict(totals) == dict(rows), "the areas of the chart are the same answers"
    index.close()


def test_what_is_still_to_be_read_of_every_topic_is_said_before_any_of_it_is_read(tmp_path: Path) -> None:
    log, index, folder = run_of(tmp_path)
    said: list[tuple[str, int, int]] = []
    held: dict[str, int] = {}

    def on_left(topic: str, left: int, of: int) -> None:
        held[topic] = of
        said.append((topic, left, index.database.execute("SELECT count(*) FROM answers").fetchone()[0]))

    async def main() -> None:
        await fill(log)
        await folder.refresh(log, on_left)

    asyncio.run(main())
    index.close()
    first = {topic: (left, answers) for topic, left, answers in reversed(said)}
    assert set(first) == {topic.name for topic in FOLDED}
    assert first["batches"][0] > 0 and first["evals"][0] > 0
    assert {answers for _, answers in first.values()} == {0}
    assert {topic: left for topic, left, _ in said} == dict.fromkeys(first, 0)
    assert held == {topic: left for topic, (left, _) in first.items()}, "and how much the log has of it"


def test_nothing_that_is_sealed_is_in_the_file(tmp_path: Path) -> None:
    log, index, folder = run_of(tmp_path)

    async def main() -> None:
        await fill(log)
        await folder.refresh(log)

    asyncio.run(main())
    (sealed,) = index.database.execute("SELECT count(*) FROM answers WHERE sealed > 0").fetchone()
    index.close()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert sealed == 2 and b"about refunds" in written
    assert SECRET.encode() not in written and b"Wilhelmina" not in written and b"wilhelmina" not in written


def test_a_log_that_begins_anew_makes_the_index_begin_anew(tmp_path: Path) -> None:
    log, index, folder = run_of(tmp_path)
    other = Log(MemoryBus(), "t", store=MemoryStore())

    async def main() -> None:
        await fill(log)
        await folder.refresh(log)
        await other.create_topics(partitions=2, keep_ms=-1)
        await other.publish(topics.EXPERIENCES, Block((live(1, "another", "log"),)))
        await folder.refresh(other)

    asyncio.run(main())
    assert [row[0] for row in index.database.execute("SELECT asked FROM texts")] == ["another"]
    index.close()


def test_pages_of_a_search_hold_every_answer_once(tmp_path: Path) -> None:
    log, index, folder = run_of(tmp_path)
    wanted = 3 * PAGE + 7

    async def main() -> None:
        await log.create_topics(partitions=1, keep_ms=-1)
        for number in range(2 * wanted):
            tenant = "acme" if number % 2 else "globex"
            await log.publish(topics.EXPERIENCES, Block((live(number, "where is it", "here", tenant=tenant),)))
        await folder.refresh(log)

    asyncio.run(main())
    database = read_only(index.path)
    for query in (
        Query(tenant="acme"),
        Query(tenant="acme", text="where"),
        Query(tenant="acme", text="her", lane="live"),
    ):
        seen: list[str] = []
        before = None
        while True:
            page = search(database, msgspec.structs.replace(query, before=before))
            seen += [row["id"] for row in page.rows]
            if page.further is None:
                break
            before = page.further
        assert len(seen) == len(set(seen)) == wanted
    hurried = search(database, Query(tenant="nobody"), longest_s=-1.0)
    assert not hurried.rows and hurried.further is not None and hurried.looked_at_ms, "it says how far back it looked"
    assert choices(database)["tenant"] == ["acme", "globex"]
    database.close()
    index.close()


def test_of_a_trimmed_journal_the_first_record_stands_for_the_fence_before_it(tmp_path: Path) -> None:
    async def main() -> None:
        log, index, folder = run_of(tmp_path)
        await log.create_topics(partitions=1, keep_ms=-1)
        members = [live(at, "asked", "said") for at in range(2)]
        for one in members:
            await log.publish(topics.EXPERIENCES, Block((one,)))
        for token, step in ((5, 0), (2, 1)):  # the second is of a trainer that was overtaken
            item = BatchItem(
                id=members[step].id, partition=0, offset=step, index=0, lane="live", advantage=0.5, min_version=3
            )
            await log.publish(topics.BATCHES, Batch(run="t", token=token, step=step, version=3, items=(item,)))
        await folder.refresh(log)
        assert [tuple(row) for row in index.database.execute("SELECT step, token FROM steps")] == [(0, 5)]
        fates = [row[0] for row in index.database.execute("SELECT fate FROM answers ORDER BY n")]
        assert fates[0] == "trained" and fates[1] != "trained"
        index.close()

    asyncio.run(main())


def test_a_search_for_the_newest_looks_at_no_more_rows_in_a_long_index(tmp_path: Path) -> None:
    index = ConsoleIndex(tmp_path / "console.sqlite")
    database = read_only(index.path)
    found = []
    for many in (2_000, 18_000):
        (last,) = database.execute("SELECT coalesce(max(n), 0) FROM answers").fetchone()
        rows = [(n, n, f"{n}", "trained") for n in range(last + 1, last + many + 1)]
        with index.database:
            index.many("INSERT INTO answers (n, key, id, fate) VALUES (?, ?, ?, ?)", rows)
        found.append(
            [
                steps_of(database, lambda one, query=query: search(one, query))
                for query in (Query(), Query(fate="trained"))
            ]
        )
    assert all(after <= 2 * before for before, after in zip(*found, strict=True)), found
    database.close()
    index.close()


@given(st.dictionaries(st.sampled_from([one.name for one in msgspec.structs.fields(Query)]), st.text(max_size=30)))
def test_a_query_takes_whatever_a_form_holds(asked: dict[str, str]) -> None:
    query, faults = query_of(asked)
    assert set(faults) <= set(asked)
    assert isinstance(query, Query)


def test_of_two_consoles_one_writes_and_the_other_takes_over_when_it_is_gone(tmp_path: Path) -> None:
    one, other = ConsoleIndex(tmp_path / "console.sqlite"), ConsoleIndex(tmp_path / "console.sqlite")
    assert one.is_writer and not other.is_writer and not other.take_over()
    one.close()
    assert other.take_over()
    other.begin_anew()
    other.close()


def test_what_an_archive_holds_can_be_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "run.tar.zst"
    held: tuple[Topic, ...] = (topics.BATCHES, topics.BUFFER)

    async def main() -> None:
        store = MemoryStore()
        log = Log(MemoryBus(), "t", store=store)
        await fill(log)
        with writing(file) as archive:
            about = ArchiveHead(
                settings={"app": "t", "policy": {"model": "x/y"}}, topics=tuple(one.name for one in held)
            )
            archive.add(ABOUT, msgspec.json.encode(about))
            for topic in held:
                found = [message.record async for message in log.read_all(topic)]

                async def records(found: list[Record] = found) -> AsyncIterator[Record]:
                    for one in found:
                        yield one

                await archive.add_records(topic, records(), store)
            archive.close()
        async with (
            source_of(file, []) as (settings, restored, _, state),
            looking_at(settings, restored, state) as (client, reading),
        ):
            page = await reading.ask(lambda one: search(one, Query(fate="trained")))
            assert [row["asked"] for row in page.rows] == ["question 0 about refunds"]
            assert "trained, step 9" in (await client.get(f"/answers/{page.rows[0]['id']}")).text
            for path, told in (
                ("/", "No role has spoken yet."), ("/learning", "Nothing was measured yet."),
                ("/answers", "question 0 about refunds"), ("/versions", "No version was published yet."),
                ("/data", "An archive has no settings of stages."), ("/privacy", "nothing was opened"),
            ):  # fmt: skip
                answer = await client.get(path)
                assert answer.status_code == 200 and told in answer.text, path

    asyncio.run(main())


def test_what_the_events_of_versions_keep_of_their_steps_outlives_the_reports(tmp_path: Path) -> None:
    """A run that is first looked at a day after it ended has no report, and all of its curves."""
    log, index, folder = run_of(tmp_path)

    async def main() -> None:
        await log.create_topics(partitions=1, keep_ms=-1)
        for version in range(3):
            stats = {"reward_mean": 0.25 * version, "live/entropy": 0.5, "live/k3": 0.125, "bytes": 9e9}
            event = PolicyEvent(event="published", policy="main", version=version, stats=stats)
            await log.publish(topics.POLICIES, event)
        report = Progress(
            role="train", instance="train/1", version=1, gauges={"reward_mean": 7.0, "loss": 2.0, "mfu": 0.5}
        )
        await log.publish(topics.REPORTS, report)
        await folder.refresh(log)

    asyncio.run(main())
    rows = index.database.execute("SELECT name, version, value FROM curves ORDER BY name, version").fetchall()
    index.close()
    assert rows == [
        *[("live/entropy", version, 0.5) for version in range(3)], *[("live/k3", version, 0.125) for version in range(3)],
        ("loss", 1, 2.0), *[("reward_mean", version, 0.25 * version) for version in range(3)],
    ]  # fmt: skip


def test_what_is_drawn_of_a_step_is_what_the_event_of_its_version_keeps() -> None:
    assert {end for _, ends, _ in CURVES for end in ends} == set(KEPT_FIGURES)


def test_an_index_that_is_removed_under_a_console_is_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        async with looking(tmp_path, log) as (client, _):
            for path in (tmp_path / "state").glob("console.*"):
                path.unlink()
            await log.publish(topics.EXPERIENCES, Block((live(80, "a later wish", "granted"),)))

            async def has(text: str) -> bool:
                page = await client.get("/answers", params={"text": text})
                return page.status_code == 200 and page.text.count(text) > 1

            async with asyncio.timeout(30):
                while not await has("a later wish"):  # noqa: ASYNC110 (a page tells no one)
                    await asyncio.sleep(0.05)
            assert await has("question 0 about refunds")

    asyncio.run(main())


def test_what_is_forgotten_goes_by_its_time_and_not_by_the_order_it_was_read_in(tmp_path: Path) -> None:
    """After an index was made anew, what teachers said, which was read first, is newer than what was read after it."""
    index = ConsoleIndex(tmp_path / "console.sqlite")
    members = [
        (9_000_000, live(0, "new, read first", "a")),
        (1_000, live(1, "old", "b")),
        (9_000_000, live(2, "new", "c")),
    ]
    with index.database:
        for one in members:
            index.add([one])
    assert index.prune(5_000_000) == 1 and index.prune(5_000_000) == 0
    assert [row[0] for row in index.database.execute("SELECT asked FROM texts ORDER BY n")] == [
        "new, read first",
        "new",
    ]
    assert index.database.execute("SELECT rowid FROM words WHERE words MATCH 'old'").fetchall() == []
    assert len(index.database.execute("SELECT rowid FROM words WHERE words MATCH 'new'").fetchall()) == 2
    index.close()


def test_an_index_of_another_layout_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "console.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE answers (x)")
        old.execute("PRAGMA user_version = 999")
    old.close()
    reader, before = read_only(path), inode(path)  # who reads it keeps it there
    index = ConsoleIndex(path)
    assert index.database.execute("SELECT count(*) FROM fates").fetchone() == (0,)
    assert inode(path) != before, "as another file: to empty a long one takes as long as to read it"
    assert index.is_there()
    reader.close()
    index.close()
