"""A reader that stays open brings what `Log.chunks` brings."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.log.bus import Partition, Reader, Record
from infra.log.follower import Follower
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import topics
from schemas.topics import Topic

FOLLOWED = (topics.EXPERIENCES, topics.VERIFIED)
PARTS = 2


class CountingBus(MemoryBus):
    """Counts the readers that were opened."""

    num_opened = 0

    async def assigned(self, starts, *, group=None, fetch_bytes=0) -> Reader:  # type: ignore[no-untyped-def]
        self.num_opened += 1
        return await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)


async def log_of() -> tuple[Log, CountingBus]:
    bus = CountingBus()
    log = Log(bus, "app")
    for topic in FOLLOWED:
        await bus.create_topic(log.name(topic), PARTS, {})
    return log, bus


async def read(
    follower: Follower, log: Log, topic: Topic, nexts: dict[int, int], short: Sequence[int] = ()
) -> list[Record]:
    """What has come, up to the end or `short` of it, and where to go on."""
    begins, ends = await log.bounds(topic)
    ends = {
        part: max(nexts[part], end - less)
        for (part, end), less in zip(ends.items(), short or (0,) * PARTS, strict=True)
    }
    starts = {part: max(begins[part], at) for part, at in nexts.items()}
    found: list[Record] = []
    async with aclosing(follower.chunks(topic, starts, ends, max_records=3)) as chunks:
        async for records in chunks:
            found += records
    nexts |= {part: max(starts[part], end) for part, end in ends.items()}
    return found


Step = tuple[str, int, int, tuple[int, int]]
steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "read", "read", "again", "trim", "break off"]),
        st.integers(0, 1),
        st.integers(1, 8),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_each_record_comes_once_in_order_and_none_is_left_out(script: list[Step]) -> None:
    async def check() -> None:
        log, bus = await log_of()
        follower = Follower(log, FOLLOWED)
        nexts = {topic: dict.fromkeys(range(PARTS), 0) for topic in FOLLOWED}
        seen: dict[tuple[str, int], list[int]] = {}
        for what, which, num, short in script:
            topic = FOLLOWED[which]
            name = log.name(topic)
            if what == "send":
                for one in range(num):
                    await bus.send(name, b"%d" % one, key=b"", partition=one % PARTS)
            elif what == "again":  # what was read before was lost by its reader
                nexts[topic][num % PARTS] = (await log.bounds(topic))[0][num % PARTS]
                seen.pop((topic.name, num % PARTS), None)
            elif what == "trim":
                part = Partition(name, num % PARTS)
                await bus.delete_records(part, min(num, (await bus.end_offsets(name))[part]))
            elif what == "break off":
                begins, ends = await log.bounds(topic)
                starts = {part: max(begins[part], at) for part, at in nexts[topic].items()}
                async with aclosing(follower.chunks(topic, starts, ends, max_records=2)) as chunks:
                    async for _ in chunks:
                        break
            else:
                for record in await read(follower, log, topic, nexts[topic], short):
                    seen.setdefault((topic.name, record.partition), []).append(record.offset)
        for topic in FOLLOWED:
            for record in await read(follower, log, topic, nexts[topic]):
                seen.setdefault((topic.name, record.partition), []).append(record.offset)
            begins, ends = await log.bounds(topic)
            for part in range(PARTS):
                offsets = seen.get((topic.name, part), [])
                assert offsets == sorted(set(offsets))
                assert set(range(begins[part], ends[part])) <= set(offsets)
        await follower.close()

    asyncio.run(check())


def test_a_call_that_begins_elsewhere_connects_anew_and_does_not_wait_behind_a_fetch_at_the_logs_end() -> None:
    async def check() -> None:
        log, bus = await log_of()
        follower = Follower(log, FOLLOWED)
        for topic in FOLLOWED:
            await bus.send(log.name(topic), b"old", key=b"", partition=1)
        nexts = {topic: (await log.bounds(topic))[1] for topic in FOLLOWED}
        await bus.send(log.name(topics.VERIFIED), b"new", key=b"", partition=1)
        assert len(await read(follower, log, topics.VERIFIED, nexts[topics.VERIFIED])) == 1
        for topic in FOLLOWED:  # what came before it began to follow, of each topic
            assert len(await read(follower, log, topic, dict.fromkeys(range(PARTS), 0))) in (1, 2)
        assert bus.num_opened == 3
        await bus.send(log.name(topics.VERIFIED), b"newer", key=b"", partition=1)
        assert len(await read(follower, log, topics.VERIFIED, nexts[topics.VERIFIED])) == 1
        assert bus.num_opened == 3
        await follower.close()

    asyncio.run(check())


async def looked(log: Log) -> None:
    """Each look finds what came since the one before."""
    follower = Follower(log, (topics.EXPERIENCES,))
    nexts = dict.fromkeys(range(PARTS), 0)
    for look in range(4):
        for number in range(10):
            await log.bus.send(
                log.name(topics.EXPERIENCES), b"%d.%d" % (look, number), key=b"", partition=number % PARTS
            )
        ends = (await log.bounds(topics.EXPERIENCES))[1]
        found = []
        async with aclosing(follower.chunks(topics.EXPERIENCES, nexts, ends)) as chunks:
            async for records in chunks:
                found += [record.value for record in records]
        assert sorted(found) == [b"%d.%d" % (look, number) for number in range(10)]
        nexts = ends
    await follower.close()


@pytest.mark.slow
def test_over_kafka_a_follower_reads_on(kafka: str, app_name: str) -> None:
    async def main() -> None:
        bus = KafkaBus(kafka, deadline_s=20)
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=PARTS, keep_ms=-1)
        await looked(log)
        await bus.close()

    asyncio.run(main())
