"""What only the log in memory promises: a clock of one's own, the same run every time."""

import asyncio

from infra.log.bus import Partition, Record
from infra.log.memory import MemoryBus


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
