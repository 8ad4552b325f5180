"""The contract of the log, held by every Bus: memory here, Kafka on the shared broker (slow)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from infra.log.bus import Bus, CommitRefused, Partition, Reader, Record, partition_for
from infra.log.kafka import KafkaBus
from infra.log.memory import MemoryBus
from schemas.errors import OffsetOutOfRange, RecordTooLarge
from schemas.topics import EXPERIENCES, MAX_RECORD_BYTES, topic_config

Hold = Callable[[], AbstractAsyncContextManager[tuple[Bus, str]]]
DEADLINE_S = 30.0
APPEND_TIME = topic_config(EXPERIENCES, 60_000_000)


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.slow)])
def hold(request: pytest.FixtureRequest, app_name: str) -> Hold:
    """Gives a started bus and the name of an existing topic of four partitions."""
    bootstrap = request.getfixturevalue("kafka") if request.param == "kafka" else ""

    @asynccontextmanager
    async def held() -> AsyncIterator[tuple[Bus, str]]:
        bus = KafkaBus(bootstrap, deadline_s=20) if bootstrap else MemoryBus()
        topic = f"{app_name}.topic"
        async with asyncio.timeout(DEADLINE_S):
            await bus.start()
            try:
                assert await bus.create_topic(topic, 4, APPEND_TIME)
                yield bus, topic
            finally:
                await bus.close()

    return held


async def take(reader: Reader, num: int) -> list[Record]:
    """The next `num` records, however many reads that takes."""
    records: list[Record] = []
    while len(records) < num:
        records += await reader.get_many(timeout_s=0.5)
    assert len(records) == num
    return records


async def all_starts(bus: Bus, topic: str) -> dict[Partition, int]:
    return await bus.beginning_offsets(topic)


async def test_confirmed_records_are_read_back_as_sent(hold: Hold) -> None:
    async with hold() as (bus, topic):
        sent = await bus.send(topic, b"value", key=b"key", headers=(("kind", b"block"), ("id", b"a.0")))
        reader = await bus.assigned(await all_starts(bus, topic))
        (record,) = await take(reader, 1)
        assert (record.key, record.value) == (b"key", b"value")
        assert record.headers == (("kind", b"block"), ("id", b"a.0"))
        assert (record.topic, record.partition, record.offset) == (topic, sent.partition, sent.offset)
        assert record.timestamp_ms == sent.timestamp_ms
        await reader.close()


async def test_a_moment_is_the_first_offset_appended_then_or_later(hold: Hold) -> None:
    async with hold() as (bus, topic):
        first = await bus.send(topic, b"x", key=b"", partition=1)
        while True:  # the next one in a later millisecond
            second = await bus.send(topic, b"y", key=b"", partition=1)
            if second.timestamp_ms > first.timestamp_ms:
                break
            await asyncio.sleep(0.002)
        at = Partition(topic, 1)
        assert (await bus.offsets_at(topic, 0))[at] == 0
        assert (await bus.offsets_at(topic, second.timestamp_ms))[at] == second.offset
        assert (await bus.offsets_at(topic, second.timestamp_ms + 60_000)) == await bus.end_offsets(topic)


async def test_records_of_one_key_stay_in_order_in_the_partition_of_their_hash(hold: Hold) -> None:
    async with hold() as (bus, topic):
        keys = [b"add-3745.2", b"b", "é".encode(), b"", b"a longer key than the others"]
        sends = [bus.send(topic, b"%d" % n, key=key) for n in range(20) for key in keys]
        positions = await asyncio.gather(*sends)
        assert {p.partition for p in positions} == {partition_for(key, 4) for key in keys}
        reader = await bus.assigned(await all_starts(bus, topic))
        records = await take(reader, len(sends))
        for key in keys:
            mine = [record for record in records if record.key == key]
            assert {record.partition for record in mine} == {partition_for(key, 4)}
            assert [int(record.value) for record in mine] == list(range(20))
        for index in range(4):
            offsets = [record.offset for record in records if record.partition == index]
            assert offsets == list(range(len(offsets)))
        await reader.close()


async def test_max_records_bounds_a_read_and_loses_nothing(hold: Hold) -> None:
    async with hold() as (bus, topic):
        await asyncio.gather(*(bus.send(topic, b"%d" % n, key=b"%d" % n) for n in range(50)))
        reader = await bus.assigned(await all_starts(bus, topic))
        seen: list[int] = []
        while len(seen) < 50:
            records = await reader.get_many(timeout_s=0.5, max_records=7)
            assert len(records) <= 7
            seen += [int(record.value) for record in records]
        assert sorted(seen) == list(range(50))
        await reader.close()


@pytest.mark.parametrize("fetch_bytes", [0, 1024])
async def test_seek_moves_the_next_read_and_positions_follow(hold: Hold, fetch_bytes: int) -> None:
    values = [b"%d" % n * size for n, size in enumerate((10, 300_000, 2_000, 70_000, 1, 2_000))]
    async with hold() as (bus, topic):
        at = Partition(topic, 2)
        for value in values:
            await bus.send(topic, value, key=b"k", partition=2)
        reader = await bus.assigned({at: 4}, fetch_bytes=fetch_bytes)
        assert reader.positions() == {at: 4}
        assert [record.value for record in await take(reader, 2)] == values[4:]
        assert reader.positions() == {at: 6}
        reader.seek(at, 1)
        assert [record.value for record in await take(reader, 5)] == values[1:]
        with pytest.raises(ValueError):
            reader.seek(Partition(topic, 3), 0)
        await reader.close()


async def test_a_group_begins_at_the_beginning_by_an_explicit_commit(hold: Hold) -> None:
    async with hold() as (bus, topic):
        for n in range(3):
            await bus.send(topic, b"%d" % n, key=b"k", partition=1)
        await bus.delete_records(Partition(topic, 1), 2)
        reader = await bus.subscribed([topic], group=f"{topic}-group")
        expected = {Partition(topic, index): 2 if index == 1 else 0 for index in range(4)}
        assert await bus.committed(f"{topic}-group", topic) == expected
        assert [record.value for record in await take(reader, 1)] == [b"2"]
        await reader.close()


async def test_a_group_resumes_behind_its_commit(hold: Hold) -> None:
    async with hold() as (bus, topic):
        group, at = f"{topic}-group", Partition(topic, 1)
        for n in range(10):
            await bus.send(topic, b"%d" % n, key=b"k", partition=1)
        reader = await bus.subscribed([topic], group=group)
        await take(reader, 10)
        await reader.commit({at: 6})
        await reader.close()
        assert (await bus.committed(group, topic))[at] == 6
        reader = await bus.subscribed([topic], group=group)
        assert [record.value for record in await take(reader, 4)] == [b"6", b"7", b"8", b"9"]
        await reader.close()


async def test_first_commits_leave_what_a_group_has(hold: Hold) -> None:
    async with hold() as (bus, topic):
        group, at = f"{topic}-group", Partition(topic, 0)
        await bus.send(topic, b"x", key=b"k", partition=0)
        reader = await bus.assigned({at: 0}, group=group)
        await reader.commit({at: 1})
        await reader.close()
        await bus.commit_beginnings(group, topic)
        assert await bus.committed(group, topic) == {Partition(topic, i): 1 if i == 0 else 0 for i in range(4)}


async def test_two_readers_of_a_group_share_the_partitions(hold: Hold) -> None:
    async with hold() as (bus, topic):
        group = f"{topic}-group"
        readers = [await bus.subscribed([topic], group=group) for _ in range(2)]
        shares: list[set[int]] = [set(), set()]
        while set.union(*shares) != {0, 1, 2, 3} or any(len(share) != 2 for share in shares):
            for reader in readers:
                await reader.get_many(timeout_s=0.05)
            shares = [{partition.index for partition in reader.positions()} for reader in readers]
        for n in range(40):
            await bus.send(topic, b"%d" % n, key=b"", partition=n % 4)
        seen: list[Record] = []
        while len(seen) < 40:
            for reader, share in zip(readers, shares, strict=True):
                records = await reader.get_many(timeout_s=0.1)
                assert {record.partition for record in records} <= share
                seen += records
        assert sorted(int(record.value) for record in seen) == list(range(40))
        for reader in readers:
            await reader.close()


async def test_a_commit_of_a_lost_partition_is_refused(hold: Hold) -> None:
    async with hold() as (bus, topic):
        group = f"{topic}-group"
        first = await bus.subscribed([topic], group=group)
        while len(first.positions()) < 4:
            await first.get_many(timeout_s=0.05)
        second = await bus.subscribed([topic], group=group)
        while len(second.positions()) < 2:
            await asyncio.gather(first.get_many(timeout_s=0.05), second.get_many(timeout_s=0.05))
        lost = next(iter(second.positions()))
        with pytest.raises(CommitRefused):
            await first.commit({lost: 0})
        await first.commit(dict(first.positions()))
        await first.close()
        await second.close()


async def test_deleted_records_are_loud_and_their_neighbours_stay(hold: Hold) -> None:
    async with hold() as (bus, topic):
        at = Partition(topic, 3)
        for n in range(8):
            await bus.send(topic, b"%d" % n, key=b"k", partition=3)
        await bus.delete_records(at, 5)
        assert (await bus.beginning_offsets(topic))[at] == 5
        assert (await bus.end_offsets(topic))[at] == 8
        reader = await bus.assigned({at: 2})
        for _ in range(2):  # and stays loud until somebody decides
            with pytest.raises(OffsetOutOfRange, match=r"offset 2 .* 5 to 8"):
                while True:
                    await reader.get_many(timeout_s=0.5)
        reader.seek(at, 5)
        assert [record.value for record in await take(reader, 3)] == [b"5", b"6", b"7"]
        await reader.close()


async def test_a_group_whose_place_was_trimmed_hears_of_it(hold: Hold) -> None:
    async with hold() as (bus, topic):
        group, at = f"{topic}-group", Partition(topic, 1)
        await bus.commit_beginnings(group, topic)
        for n in range(4):
            await bus.send(topic, b"%d" % n, key=b"k", partition=1)
        await bus.delete_records(at, 3)
        reader = await bus.subscribed([topic], group=group)
        with pytest.raises(OffsetOutOfRange, match=r"offset 0 .* 3 to 4"):
            while True:
                await reader.get_many(timeout_s=0.5)
        reader.seek(at, 3)
        assert [record.value for record in await take(reader, 1)] == [b"3"]
        await reader.close()


async def test_a_position_past_the_end_is_loud(hold: Hold) -> None:
    async with hold() as (bus, topic):
        reader = await bus.assigned({Partition(topic, 0): 5})
        with pytest.raises(OffsetOutOfRange, match=r"offset 5 .* 0 to 0"):
            while True:
                await reader.get_many(timeout_s=0.5)
        await reader.close()
        with pytest.raises(OffsetOutOfRange):
            await bus.delete_records(Partition(topic, 0), 7)


async def test_oversize_is_refused_before_it_is_sent_and_the_next_record_goes(hold: Hold) -> None:
    async with hold() as (bus, topic):
        with pytest.raises(RecordTooLarge, match=str(MAX_RECORD_BYTES)):
            await bus.send(topic, bytes(MAX_RECORD_BYTES), key=b"k")
        assert set((await bus.end_offsets(topic)).values()) == {0}
        largest = bytes(MAX_RECORD_BYTES - 200)
        await bus.send(topic, largest, key=b"k", partition=0)
        await bus.send(topic, b"small", key=b"k", partition=0)
        reader = await bus.assigned({Partition(topic, 0): 0})
        assert [len(record.value) for record in await take(reader, 2)] == [len(largest), 5]
        await reader.close()


async def test_the_group_knows_which_partitions_its_readers_hold(hold: Hold) -> None:
    async with hold() as (bus, topic):
        group = f"{topic}-group"
        assert await bus.held(group, topic) == set()
        await (await bus.assigned(await all_starts(bus, topic), group=group)).close()
        assert await bus.held(group, topic) == set(), "who only commits for a group holds nothing"
        await bus.send(topic, b"x", key=b"k", partition=2)
        reader = await bus.subscribed([topic], group=group)
        await take(reader, 1)
        assert await bus.held(group, topic) == {0, 1, 2, 3}
        assert await bus.held(group, f"{topic}.other") == set()
        await reader.close()
        assert await bus.held(group, topic) == set()
