"""The index of the log: what it says is what the log says, in whatever order that is read, and every table has a bound."""

import asyncio
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from infra.ledger.account import audit
from infra.ledger.index import FILE, NEWEST, LogIndex, bounds, follow, sizes, trim
from infra.ledger.index_fold import Folder
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Batch, BatchItem, Block, Fence, PolicyEvent, Progress, Rollback, Skip, topics
from tests.actors.rig import running, until
from tests.infra.cli.console_rig import SECRET, fill, folded, live

BEYOND = 20


def rows(index: LogIndex, question: str) -> list[tuple[object, ...]]:
    found = [tuple(row) for row in index.database.execute(question)]
    index.close()
    return found


def batch(step: int, *numbers: int, token: int = 1) -> Batch:
    items = tuple(
        BatchItem(id=live(number, "", "").id, partition=0, offset=0, index=0, lane="live", advantage=0.5)
        for number in numbers
    )
    return Batch(run="t", token=token, step=step, version=step, items=items)


async def publish(log: Log, *records: Batch | Fence | Skip | Rollback | PolicyEvent) -> None:
    for record in records:
        await log.publish(topics.POLICIES if isinstance(record, PolicyEvent) else topics.BATCHES, record)


async def four(log: Log) -> None:
    for number in range(4):
        await log.publish(topics.EXPERIENCES, Block((live(number, f"question {number}", "said"),)))


async def nothing(log: Log) -> None:
    pass


def test_what_became_of_answers_is_what_the_audit_says_however_often_the_log_is_read(tmp_path: Path) -> None:
    expected: Counter[str] = Counter()

    async def account(log: Log) -> None:
        found = await audit(log, "t")
        expected.update({"trained": found.trained, "": found.pending, **found.dropped})

    index = folded(tmp_path, fill, account)
    assert Counter(dict(rows(index, "SELECT fate, count(*) FROM answers WHERE suite = '' GROUP BY fate"))) == +expected


def test_nothing_that_is_sealed_is_in_the_file(tmp_path: Path) -> None:
    ((sealed,),) = rows(folded(tmp_path, fill), "SELECT count(*) FROM answers WHERE sealed > 0")
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert sealed == 2 and b"about refunds" in written
    assert SECRET.encode() not in written and b"Wilhelmina" not in written and b"wilhelmina" not in written


def test_answers_are_in_the_order_of_their_times_whatever_order_they_are_read_in(tmp_path: Path) -> None:
    """Experts are read first, and partitions one after another."""
    index = folded(tmp_path, nothing)
    folder = Folder(index.database, run="t", policy="main")
    with index.database:
        for time_ms, number in ((9000, 0), (1000, 1), (5000, 2), (5000, 3), (5000, 4)):
            folder.add([(time_ms, live(number, "asked", f"said {number}"))])
    assert rows(index, "SELECT answered FROM texts ORDER BY n") == [(f"said {at}",) for at in (1, 2, 3, 4, 0)]


async def test_of_two_processes_one_writes_and_the_other_goes_on_when_it_is_gone(tmp_path: Path) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await fill(log)
    first, second = (LogIndex(tmp_path / FILE, run="t", policy="main") for _ in range(2))
    assert await first.refresh(log) and not await second.refresh(log, wait_s=0.0)
    waiting = asyncio.create_task(second.refresh(log))
    assert await waiting, "the writer has read as far"
    first.close()
    await log.publish(topics.EXPERIENCES, Block((live(80, "a later wish", "granted"),)))
    assert await second.refresh(log)
    assert second.places(live(80, "", "").group)
    second.close()


async def test_a_log_that_begins_anew_and_a_file_that_is_gone_or_of_another_layout_begin_the_index_anew(
    tmp_path: Path,
) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await fill(log)
    with sqlite3.connect(tmp_path / FILE) as old:
        old.execute("CREATE TABLE answers (x)")
        old.execute("PRAGMA user_version = 999")
    old.close()
    index = LogIndex(tmp_path / FILE, run="t", policy="main")
    await index.refresh(log)
    held = sizes(index.database)["answers"]
    for end in ("", "-wal", "-shm"):
        tmp_path.joinpath(FILE + end).unlink(missing_ok=True)
    await index.refresh(log)
    assert sizes(index.database)["answers"] == held > 10
    other = Log(MemoryBus(), "t", store=MemoryStore())
    await other.create_topics(partitions=2, keep_ms=-1)
    await other.publish(topics.EXPERIENCES, Block((live(1, "another", "log"),)))
    await index.refresh(other)
    assert rows(index, "SELECT asked FROM texts") == [("another",)]


@pytest.mark.parametrize(
    ("journal", "steps", "fates"),
    [
        ([batch(0, 0, token=5), batch(1, 1, token=2)], [(0, 5)], ["trained", "", "", ""]),  # the beginning was trimmed
        ([Fence(run="t", token=1), batch(0, 0), Fence(run="t", token=2), batch(1, 1)], [(0, 1)], ["trained", "", "", ""]),
        ([batch(0, 0), batch(0, 1)], [(0, 1)], ["trained", "", "", ""]),  # a retried send
        ([batch(0, 0), Batch(run="other", token=9, step=1, version=1, items=())], [(0, 1)], ["trained", "", "", ""]),
        (
            [batch(1, 0, 1, 2), batch(2, 1, 2, 3), batch(3, 0, 1), Skip(run="t", token=1, step=3, reason="not finite"),
             Rollback(run="t", token=1, from_step=2, to_step=2, restored_version=1, version=2, reason="spike")],
            [(1, 1), (2, 1), (3, 1)], ["trained", "trained", "trained", "rolled back"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [True, False])
async def test_only_journal_records_that_count_train_an_answer(
    tmp_path: Path,
    journal: list[Batch | Fence | Skip | Rollback],
    steps: list[tuple[int, int]],
    fates: list[str],
    at_once: bool,
) -> None:
    """Also where the index is opened anew between any two of them."""
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    await four(log)
    for record in journal:
        await publish(log, record)
        if not at_once:
            index = LogIndex(tmp_path / FILE, run="t", policy="main")
            await index.refresh(log)
            index.close()
    index = LogIndex(tmp_path / FILE, run="t", policy="main")
    await index.refresh(log)
    assert index.database.execute("SELECT step, token FROM steps").fetchall() == steps
    assert rows(index, "SELECT fate FROM answers ORDER BY id") == [(fate,) for fate in fates]


def test_what_the_events_of_versions_keep_of_their_steps_outlives_the_reports(tmp_path: Path) -> None:
    """A run that is first looked at a day after it ended has no report, and all of its curves."""

    async def measure(log: Log) -> None:
        for version in range(3):
            stats = {"reward_mean": 0.25 * version, "live/entropy": 0.5, "live/k3": 0.125, "bytes": 9e9}
            await publish(log, PolicyEvent(event="published", policy="main", version=version, stats=stats))
        gauges = {"reward_mean": 7.0, "loss": 2.0, "mfu": 0.5}
        await log.publish(topics.REPORTS, Progress(role="train", instance="train/1", version=1, gauges=gauges))

    assert rows(folded(tmp_path, measure), "SELECT name, version, value FROM curves ORDER BY name, version") == [
        *[("live/entropy", version, 0.5) for version in range(3)], *[("live/k3", version, 0.125) for version in range(3)],
        ("loss", 1, 2.0), *[("reward_mean", version, 0.25 * version) for version in range(3)],
    ]  # fmt: skip


def test_every_table_of_the_index_has_a_bound_and_a_size(tmp_path: Path) -> None:
    index = folded(tmp_path, fill)
    found = sizes(index.database)
    (texts,) = index.database.execute("SELECT count(*) FROM texts").fetchone()
    assert found["texts"] == texts and found["answers"] - texts == 2, "two are sealed"
    named = {str(name) for (name,) in rows(index, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert set(bounds("30d")) == set(found) == {name for name in named if not name.startswith(("words_", "sqlite_"))}


def test_rows_beyond_their_bound_are_removed_the_oldest_first(tmp_path: Path) -> None:
    index = folded(tmp_path, nothing)
    with index.database as database:
        for table, (number, at_most) in NEWEST.items():
            named = {"curves": ("name, ", "'loss', "), "evals": ("suite, ", "'dev', ")}.get(table, ("", ""))
            statement = f"INSERT INTO {table} ({named[0]}{number}) VALUES ({named[1]}?)"
            database.executemany(statement, [(n,) for n in range(at_most + BEYOND)])
    trim(index.database, 0)
    found = sizes(index.database)
    assert {table: found[table] for table in NEWEST} == {table: at_most for table, (_, at_most) in NEWEST.items()}
    assert tuple(index.database.execute("SELECT min(version) FROM curves").fetchone()) == (BEYOND,)
    index.close()


def test_who_keeps_the_index_up_keeps_it_bounded(tmp_path: Path) -> None:
    (_, at_most) = NEWEST["curves"]
    index = folded(tmp_path, nothing)

    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        async with running(asyncio.create_task(follow(log, index, every_s=0.01))):
            await until(lambda: index.note("whole") == 1)
            with index.database as database:
                database.executemany("INSERT INTO curves VALUES ('loss', ?, 0, 0, 1)", [(n,) for n in range(at_most)])
            await publish(log, PolicyEvent(event="published", policy="main", version=at_most, stats={"loss": 0.5}))
            await until(lambda: sizes(index.database)["policies"] == 1 and sizes(index.database)["curves"] == at_most)
        index.close()

    asyncio.run(main())
