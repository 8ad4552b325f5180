"""A console whose index is not there yet: its pages answer from what there is, and say how far it is."""

import asyncio
import fcntl
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.cli.console.fold import FOLDED
from infra.cli.console.index import ConsoleIndex
from infra.cli.console.keeping import FILE, TRACE_FILE, IndexState
from infra.cli.console.pages_look import BEING_READ
from infra.cli.console.reading import NotReadYet, Reading
from infra.cli.settings import Settings
from infra.log.bus import Partition, Reader
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas.topics import topic_name
from tests.infra.cli.console_rig import SESSION, fill, looking_at, until
from tests.infra.cli.test_console_pages import text_of

FIRST = f"{SESSION}.1-0.0-0-0"
OF_THE_INDEX = ("/learning", "/answers", "/answers?text=refunds", "/versions/compare", "/data", "/privacy")


class LongLog(MemoryBus):
    """A broker that tells at once how long a log is, and whose records come only when `here` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.here = asyncio.Event()
        self.here.set()

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        """See Bus."""
        await self.here.wait()
        return await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)


async def long_log() -> tuple[Log, LongLog, int]:
    """A log of which no record can be read until it is said so; and how many records the index is made of."""
    bus = LongLog()
    log = Log(bus, "t", store=MemoryStore())
    await fill(log)
    bus.here.clear()
    ends = [sum((await bus.end_offsets(topic_name("t", topic))).values()) for topic in FOLDED]
    return log, bus, sum(ends)


def test_every_page_answers_before_anything_is_read_and_says_how_much_there_is_to_read(tmp_path: Path) -> None:
    async def main() -> None:
        log, bus, held = await long_log()
        async with looking_at(Settings(app="t", folder=tmp_path), log, tmp_path, is_built=False) as (client, reading):
            await until(lambda: sum(reading.kept.held.values()) == held)
            said = f"The index is being built: 0 of {held:,} records are read; to be read:"
            for path in OF_THE_INDEX:
                page = await client.get(path)
                assert page.status_code == 200 and said in text_of(page), path
            for path in ("/", "/?fragment=1"):
                page = await client.get(path)
                assert page.status_code == 200 and BEING_READ in page.text, path
                assert said in page.text
            page = await client.get(f"/answers/{FIRST}")
            assert page.status_code == 503 and "Not read yet: the index is behind the log by" in text_of(page)
            bus.here.set()
            await until(lambda: reading.kept.is_caught_up)
            for path in ("/", *OF_THE_INDEX, f"/answers/{FIRST}"):
                page = await client.get(path)
                assert page.status_code == 200 and "is being built" not in page.text, path

    asyncio.run(main())


def test_a_page_of_an_answer_does_not_read_the_whole_log_for_it(tmp_path: Path) -> None:
    """Who keeps the index of `trace` up has not begun: a page that began would have everybody wait for it."""

    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        kept = IndexState()
        reading = Reading(Settings(app="t", folder=tmp_path), log, tmp_path, kept, asyncio.Event())
        with pytest.raises(NotReadYet, match="the index is being built"):
            await reading.answer(FIRST)
        kept.is_traced = True
        assert (await reading.answer(FIRST)).published is not None
        await reading.close()
        again = Reading(Settings(app="t", folder=tmp_path), log, tmp_path, IndexState(), asyncio.Event())
        assert (await again.answer(FIRST)).published is not None, "an index that was whole once answers at once"
        await again.close()

    asyncio.run(main())


def test_a_console_beside_the_one_that_builds_the_index_says_how_far_that_is(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        writer = ConsoleIndex(tmp_path / FILE)  # as another process that has not read anything yet
        assert writer.is_writer
        settings = Settings(app="t", folder=tmp_path)
        async with looking_at(settings, log, tmp_path, is_built=False) as (client, reading):
            await until(lambda: reading.kept.is_traced and reading.kept.left.get("experiences", 0) > 0)
            assert not reading.kept.is_caught_up
            assert "The index is being built: 0 of" in text_of(await client.get("/answers"))
            writer.close()
            await until(lambda: reading.kept.is_caught_up)
            assert "question 0 about refunds" in text_of(await client.get("/answers?text=refunds"))

    asyncio.run(main())


def test_while_another_process_notes_where_records_lie_a_page_of_an_answer_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        with (tmp_path / TRACE_FILE).with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            settings = Settings(app="t", folder=tmp_path)
            async with looking_at(settings, log, tmp_path, is_built=False) as (client, reading):
                await until(lambda: bool(reading.kept.held))
                page = await client.get(f"/answers/{FIRST}")
                assert page.status_code == 503 and "Not read yet" in text_of(page)
                fcntl.flock(lock, fcntl.LOCK_UN)
                await until(lambda: reading.kept.is_traced)
                assert (await client.get(f"/answers/{FIRST}")).status_code == 200

    asyncio.run(main())


def test_what_was_read_before_a_decision_is_read_again_after_it(tmp_path: Path) -> None:
    """A reading that began before somebody decided something, and ended after it."""

    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await fill(log)
        reading = Reading(Settings(app="t", folder=tmp_path), log, tmp_path, IndexState(), asyncio.Event())
        go_on, told = asyncio.Event(), ["before"]

        async def read() -> str:
            word = told[-1]
            await go_on.wait()
            return word

        early = asyncio.create_task(reading.held("word", read))
        with pytest.raises(NotReadYet):
            await reading.held("word", read, wait_s=0.01)
        told.append("after")
        reading.forget_fresh()
        late = asyncio.create_task(reading.held("word", read))
        await asyncio.sleep(0)
        go_on.set()
        assert (await early, await late) == ("before", "after")
        assert await reading.held("word", read) == "after"
        await reading.close()

    asyncio.run(main())
