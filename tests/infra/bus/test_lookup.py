"""Places in the log: looked up, kept in memory, chosen by key."""

import asyncio
from collections.abc import Mapping

from aiokafka.partitioner import murmur2 as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.log.placing import murmur2, partition_for
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


async def play() -> list[Record]:
    """Three readers of one group come and go while records arrive."""
    now = iter(range(1000, 10_000, 10))
    bus = MemoryBus(clock=lambda: next(now))
    await bus.create_topic("t", 5, {})
    seen: list[Record] = []
    readers = [await bus.subscribed(["t"], group="g") for _ in range(2)]
    for step in range(60):
        await bus.send("t", b"%d" % step, key=b"%d" % (step * 7919))
        if step == 20:
            readers.append(await bus.subscribed(["t"], group="g"))
        if step == 40:
            await readers.pop(0).close()
        for reader in readers:
            seen += await reader.get_many(timeout_s=0, max_records=2)
            await reader.commit(reader.positions())
    for reader in readers:
        while records := await reader.get_many(timeout_s=0):
            seen += records
    return seen


def test_the_clock_given_is_the_clock_of_the_log_and_a_run_repeats_exactly() -> None:
    first, second = asyncio.run(play()), asyncio.run(play())
    assert first == second
    assert sorted(int(record.value) for record in first) == list(range(60))
    assert sorted(record.timestamp_ms for record in first) == list(range(1000, 1600, 10))


def test_one_bus_serves_several_event_loops_one_after_the_other() -> None:
    bus = MemoryBus()

    async def write() -> None:
        await bus.create_topic("t", 1, {})
        await bus.send("t", b"x", key=b"k")
        await bus.close()

    async def read() -> list[Record]:
        reader = await bus.assigned({Partition("t", 0): 0})
        return await reader.get_many(timeout_s=1)

    asyncio.run(write())
    assert [record.value for record in asyncio.run(read())] == [b"x"]


def test_no_partition_starves_another() -> None:
    async def check() -> None:
        bus = MemoryBus()
        await bus.create_topic("t", 3, {})
        for partition in (0, 1, 2):
            for _ in range(10):
                await bus.send("t", b"x", key=b"", partition=partition)
        reader = await bus.assigned(await bus.beginning_offsets("t"))
        first = [(await reader.get_many(timeout_s=0, max_records=10))[0].partition for _ in range(3)]
        assert sorted(first) == [0, 1, 2]

    asyncio.run(check())


# Expected values of Kafka's own UtilsTest (signed there).
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def test_the_hash_is_javas() -> None:
    assert {key: murmur2(key) for key in JAVA} == {key: value & 0xFFFFFFFF for key, value in JAVA.items()}


@given(st.binary(max_size=64))
def test_the_hash_is_the_clients(data: bytes) -> None:
    assert murmur2(data) == reference(data)


@given(st.binary(max_size=64), st.integers(1, 64))
def test_every_key_has_a_partition(key: bytes, count: int) -> None:
    assert 0 <= partition_for(key, count) < count
