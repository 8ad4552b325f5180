"""Records by where they lie: those that are kept, by one reader for all that are asked for."""

import asyncio
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from infra.log.bus import Partition, Reader
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas.topics import DEAD_LETTERS, PROGRESS, VERIFIED
from tests.infra.bus.test_log import progress_log


def test_the_records_at_offsets_are_those_that_are_kept_in_one_read_for_neighbours() -> None:
    async def main() -> None:
        log = await progress_log()
        for number in range(200):
            await log.bus.send(log.name(PROGRESS), str(number).encode(), key=b"k")
        await log.bus.delete_records(Partition(log.name(PROGRESS), 0), 3)
        found = await log.at(PROGRESS, 0, [199, 1, 4, 5, 4, 900])
        assert {offset: record.value for offset, record in found.items()} == {4: b"4", 5: b"5", 199: b"199"}
        assert await log.at(PROGRESS, 0, []) == await log.at(PROGRESS, 0, [2]) == {}
        assert await log.at(PROGRESS, 7, [4]) == {}, "a partition that the topic does not have"

    asyncio.run(main())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 420)), max_size=30))
def test_records_of_many_places_are_read_by_one_reader_and_are_those_of_each_place(
    places: list[tuple[int, int, int]],
) -> None:
    class CountingBus(MemoryBus):
        num_opened = 0

        async def assigned(
            self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
        ) -> Reader:
            self.num_opened += 1
            return await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)

    async def main() -> None:
        bus = CountingBus()
        log, held = Log(bus, "bot"), (DEAD_LETTERS, VERIFIED)
        await log.create_topics(partitions=2, keep_ms=-1)
        for topic in held:
            for number in range(400):
                await bus.send(log.name(topic), b"%d" % number, key=b"", partition=number % 2)
        wanted = [(held[which], partition, offset) for which, partition, offset in places]
        found = await log.messages_of(wanted)
        assert bus.num_opened == bool(found)
        assert {at: message.record.value for at, message in found.items()} == {
            (topic.name, partition, offset): b"%d" % (2 * offset + partition)
            for topic, partition, offset in wanted
            if partition < 2 and offset < 200
        }

    asyncio.run(main())


def test_what_retention_takes_while_offsets_are_read_is_missing_and_the_rest_is_there() -> None:
    class Trimming(MemoryBus):
        async def assigned(
            self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
        ) -> Reader:
            reader = await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)
            for partition in starts:
                await self.delete_records(partition, 5)
            return reader

    async def main() -> None:
        log = Log(Trimming(), "bot")
        await log.create_topics(partitions=1, keep_ms=-1)
        for number in range(9):
            await log.bus.send(log.name(PROGRESS), str(number).encode(), key=b"k")
        assert list(await log.at(PROGRESS, 0, [2, 4, 5, 8])) == [5, 8]

    asyncio.run(main())
