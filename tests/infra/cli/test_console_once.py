"""The log is read once for the pages' index and for that of `trace`, and both come right wherever they were and whenever the
reading of them was broken off.
"""

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.cli.console.fold import FOLDED, Folder
from infra.cli.console.index import ConsoleIndex
from infra.cli.console.keeping import FILE, TRACE_FILE, IndexState, Keeper
from infra.cli.settings import Settings
from infra.ledger.following import Following
from infra.ledger.index import INDEXED, LogIndex
from infra.log.bus import Partition, Reader, Record
from infra.log.follower import Follower
from infra.log.log import Log
from infra.log.memory import MemoryBus, MemoryReader
from infra.store.memory import MemoryStore
from schemas import Block, topics
from tests.infra.cli.console_rig import fill, live
from tests.infra.ledger.test_trace import until
from tests.made_log import APP, MadeBus

# Of rows that are numbered as they come what does not depend on it.
OF_PAGES = {
    "answers": "SELECT key, id, grp, lane, hi, reward, advantage, fate, said, rated FROM answers",
    "scores": "SELECT key, name, value FROM scores JOIN answers USING (n)",
    "texts": "SELECT key, asked, answered FROM texts JOIN answers USING (n)",
    "uses": "SELECT key, step FROM uses JOIN answers USING (n)",
    "fates": "SELECT version, fate, sum(count) FROM fates GROUP BY 1, 2 HAVING sum(count) > 0",
    **{name: f"SELECT * FROM {name}" for name in ("reads", "curves", "evals", "letters", "steps", "published")},
    "tasks": "SELECT task, judged, total FROM tasks",
}
OF_TRACE = ("reads", "places", "sealed", "steps", "trained", "undone", "policies")


class CountingReader(MemoryReader):
    """Counts what it hands out, by topic."""

    counts: Counter[str]

    async def get_many(self, *, timeout_s: float, max_records: int = 500, topic: str | None = None) -> list[Record]:
        found = await super().get_many(timeout_s=timeout_s, max_records=max_records, topic=topic)
        self.counts.update(one.topic for one in found)
        return found


class CountingBus(MemoryBus):
    """Counts what its readers hand out, by topic."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    async def assigned(self, starts, *, group=None, fetch_bytes=0) -> Reader:  # type: ignore[no-untyped-def]
        reader = CountingReader(self, dict(starts), group=group)
        reader.counts = self.counts
        return reader


def rows(folder: Path) -> dict[str, list[str]]:
    """What both indexes say."""
    found = {}
    for file, questions in (
        (FILE, OF_PAGES),
        (TRACE_FILE, {name: f"SELECT * FROM {name}" for name in OF_TRACE}),
    ):
        database = sqlite3.connect(folder / file)
        found |= {f"{file} {name}": sorted(map(repr, database.execute(asked))) for name, asked in questions.items()}
        database.close()
    return found


def answers_in(folder: Path) -> int:
    """How many the pages list."""
    database = sqlite3.connect(folder / FILE)
    (count,) = database.execute("SELECT count(*) FROM answers").fetchone()
    database.close()
    return int(count)


@asynccontextmanager
async def indexes(folder: Path) -> AsyncIterator[tuple[ConsoleIndex, Folder, LogIndex]]:
    index = ConsoleIndex(folder / FILE)
    trace = LogIndex(folder / TRACE_FILE, run="t", policy="main")
    try:
        yield index, Folder(index, run="t", policy="main"), trace
    finally:
        index.close()
        trace.close()


async def built(folder: Path, log: Log) -> dict[str, list[str]]:
    """What both say where each was built by itself."""
    async with indexes(folder) as (_, folding, trace):
        await folding.refresh(log)
        await trace.refresh(log)
    return rows(folder)


async def filled(bus: MemoryBus | None = None) -> Log:
    log = Log(bus or MemoryBus(), "t", store=MemoryStore())
    await fill(log)
    return log


async def more(log: Log, numbers: range) -> None:
    """What comes while a run goes on."""
    for number in numbers:
        block = Block((live(number, f"asked {number}", f"said {number}"),))
        for topic in (topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER):
            await log.publish(topic, block)


def test_each_record_is_read_once_for_both_indexes(tmp_path: Path) -> None:
    async def main() -> None:
        bus = CountingBus()
        log = await filled(bus)
        kept = IndexState()
        keeping = asyncio.create_task(Keeper(Settings(app="t"), log, tmp_path, kept, looked := asyncio.Event()).run())
        await until(lambda: kept.is_caught_up)
        bus.counts.clear()
        before = answers_in(tmp_path)
        await more(log, range(100, 140))
        looked.set()
        async with asyncio.timeout(30):
            while answers_in(tmp_path) < before + 40 or kept.left != dict.fromkeys(kept.left, 0):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert bus.counts == {log.name(topic): 40 for topic in (topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER)}
        assert rows(tmp_path) == await built(tmp_path / "fresh", log)

    asyncio.run(main())


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("where", ["trace behind", "pages behind", "trace removed", "pages removed", "neither there"])
def test_both_come_right_wherever_each_was(tmp_path: Path, where: str, trimmed: bool) -> None:
    async def main() -> None:
        log = await filled()
        async with indexes(tmp_path) as (_, folding, trace):
            if where in ("trace behind", "pages removed"):
                await trace.refresh(log)
            if where in ("pages behind", "trace removed"):
                await folding.refresh(log)
            await more(log, range(100, 110))
            if where == "trace behind":
                await folding.refresh(log)
            if where == "pages behind":
                await trace.refresh(log)
            await more(log, range(110, 120))
            if trimmed:
                for at, end in (await log.bus.end_offsets(log.name(topics.EXPERIENCES))).items():
                    await log.bus.delete_records(Partition(at.topic, at.index), end - 2)
            follower = Follower(log, FOLDED)
            await folding.refresh(log, follower=follower, trace=trace)
            await more(log, range(120, 125))
            await folding.refresh(log, follower=follower, trace=trace)
            await follower.close()
        if not trimmed:
            assert rows(tmp_path) == await built(tmp_path / "fresh", log)
        else:
            ends = {
                (topic.name, at.index): end
                for topic in INDEXED
                for at, end in (await log.bus.end_offsets(log.name(topic))).items()
                if end
            }
            async with indexes(tmp_path) as (index, _, trace):
                assert {at: end for at, end in trace.reads().items() if end} == ends
                assert {at: end for at, end in index.reads().items() if end and at in ends} == ends

    asyncio.run(main())


@pytest.mark.parametrize("begins_with", ["nothing", "trace", "pages"])
def test_both_come_right_wherever_the_reading_was_broken_off(tmp_path: Path, begins_with: str) -> None:
    """Cancelled at one step of the event loop after the other, and gone on with over files that are opened anew."""

    async def main() -> None:
        log = await filled()
        expected = await built(tmp_path / "fresh", log)
        breaks = 0
        async with indexes(tmp_path) as (_, folding, trace):
            if begins_with == "trace":
                await trace.refresh(log)
            if begins_with == "pages":
                await folding.refresh(log)
        for steps in range(1, 2000, 2):
            async with indexes(tmp_path) as (_, folding, trace):
                reading = asyncio.create_task(folding.refresh(log, trace=trace))
                for _ in range(steps):
                    await asyncio.sleep(0)
                is_over = reading.done()
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            if is_over:
                break
            breaks += 1
        assert breaks > 3
        async with indexes(tmp_path) as (_, folding, trace):
            await folding.refresh(log, trace=trace)
        assert rows(tmp_path) == expected

    asyncio.run(main())


def test_of_a_reading_that_began_behind_its_place_the_trace_takes_nothing_and_of_the_next_all(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled()
        async with indexes(tmp_path) as (_, folding, trace), indexes(tmp_path / "other") as (_, whole, _):
            end = (await log.bounds(topics.POLICIES))[1][0]
            records = [one async for chunk in log.chunks(topics.POLICIES) for one in chunk]
            values = [log.decode(one).value for one in records]
            await trace.offer(topics.POLICIES, records[2:], values[2:], {0: 2}, {0: end})
            assert trace.reads() == {} and trace.newest_version() == -1
            await trace.offer(topics.POLICIES, records, values, {0: 0}, {0: end})
            assert trace.reads() == {("policies", 0): end} and trace.newest_version() == 7
            await whole.refresh(log)
            await folding.refresh(log, trace=trace)
        assert rows(tmp_path) == await built(tmp_path / "fresh", log)

    asyncio.run(main())


def test_what_keeps_an_index_up_rests_while_another_process_does_and_goes_on_when_that_ends(tmp_path: Path) -> None:
    async def main() -> None:
        bus = CountingBus()
        log = await filled(bus)
        mine, other = (LogIndex(tmp_path / TRACE_FILE, run="t", policy="main") for _ in range(2))
        following = Following(log, mine)
        await following.read_on()
        await more(log, range(100, 110))
        await other.refresh(log)  # as the console does
        bus.counts.clear()
        await more(log, range(110, 120))
        await following.read_on()
        assert not bus.counts
        await following.read_on()
        assert sum(bus.counts.values()) == 30 and len(mine.places(live(115, "", "").group)) == 3
        await following.close()
        mine.close()
        other.close()

    asyncio.run(main())


KEEPER = """
import asyncio, pathlib, sys
from tests.made_log import APP, MadeBus
from infra.cli.console.keeping import keep
from infra.cli.settings import Settings
from infra.log.log import Log
from infra.store.memory import MemoryStore
state, num = pathlib.Path(sys.argv[1]), int(sys.argv[2])
asyncio.run(keep(state, Settings(app=APP), Log(MadeBus(num), APP, store=MemoryStore())))
"""


@pytest.mark.full
def test_both_come_right_however_often_their_keeper_is_killed(tmp_path: Path) -> None:
    num, drawn = 2048, random.Random(7)
    kills = 0
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(tmp_path), str(num)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()  # it has looked how much there is
            time.sleep(drawn.uniform(0.0, 0.5))
            child.send_signal(signal.SIGKILL)
            kills += child.wait() == -signal.SIGKILL
        if drawn.random() < 0.3:
            for name in (FILE, TRACE_FILE)[drawn.randrange(2) :][:1]:
                for end in ("", "-wal", "-shm"):
                    (tmp_path / f"{name}{end}").unlink(missing_ok=True)
    assert kills == 5

    async def finish(folder: Path) -> dict[str, list[str]]:
        index = ConsoleIndex(folder / FILE)
        trace = LogIndex(folder / TRACE_FILE, run=APP, policy="main")
        await Folder(index, run=APP, policy="main").refresh(Log(MadeBus(num), APP, store=MemoryStore()), trace=trace)
        index.close()
        trace.close()
        return rows(folder)

    assert asyncio.run(finish(tmp_path)) == asyncio.run(finish(tmp_path / "fresh"))
