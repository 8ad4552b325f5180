"""The log of records: keys, claim checks, poison, records by their offsets, and a reader that loses nothing."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from infra.log.bus import Partition, Reader, partition_for
from infra.log.log import Log, LogMessage, record_key
from infra.log.memory import MemoryBus
from infra.store.directory import DirectoryStore
from infra.store.store import Store
from schemas import (
    Block,
    Closure,
    Control,
    DeadLetter,
    DropMarker,
    EvalResult,
    Feedback,
    Fence,
    Issued,
    PolicyEvent,
    Progress,
    Received,
    Span,
    Task,
    Tick,
    encode,
    make_experience,
)
from schemas import Message as Line
from schemas.errors import BadFrame, ConfigError, RecordTooLarge, StoreError, UnknownMajor
from schemas.records import MAX_LETTER_BYTES
from schemas.topics import (
    ALL,
    BATCHES,
    BUFFER,
    DEAD_LETTERS,
    EVALS,
    EXPERIENCES,
    FEEDBACK,
    MAX_FRAME_BYTES,
    POLICIES,
    PROGRESS,
    REPORTS,
    TASKS,
    TASKSET,
    VERIFIED,
    Topic,
)

GROUP = "add-3745.2"
STUB = DropMarker(id=f"{GROUP}.0-1-0", group=GROUP, episode=1, group_size=2, reason="too short")


def block(num_tokens: int = 8, group: str = GROUP) -> Block:
    """One experience whose tokens do not compress."""
    tokens = np.random.default_rng(7).integers(0, 2**32, num_tokens, dtype=np.uint32)
    experience = make_experience(
        tokens=tokens, logprobs=np.zeros(2, np.float32), messages=(Line(role="user", content="37+45="),),
        id=f"{group}.0-0-0", group=group, episode=0, group_size=2, spans=(Span(num_tokens - 2, num_tokens, 3),),
    )  # fmt: skip
    return Block((experience,))


async def new_log(store: Store | None = None) -> Log:
    """A log with all topics, of four partitions where that is open."""
    log = Log(MemoryBus(clock=lambda: 1_763_715_600_000), "app", store=store)
    assert len(await log.create_topics(partitions=4, keep_ms=1000)) == len(ALL)
    return log


async def all_of(log: Log, topic: Topic) -> list[LogMessage]:
    return [message async for message in log.scan(topic)]


KEYS: list[tuple[Topic, Control | Block, bytes]] = [
    (TASKSET, Task(id="add-3745", messages=()), b"add-3745"),
    (TASKS, Task(id="add-3745", messages=(), issued=Issued(group=GROUP, attempt=0, num_episodes=2, max_tokens=5)), b""),
    (EXPERIENCES, block(), b""),
    (VERIFIED, STUB, b""),
    (VERIFIED, Feedback(ref=f"hr-{GROUP}.0-1-0", id="t-1", value=1.0), b""),
    (FEEDBACK, Received(path="/v1/feedback", body=b"{}", id="t-1", ref=f"{GROUP}.0-1-0"), b""),
    (EVALS, EvalResult(policy="main", version=3, suite="dev", num_tasks=2, num_correct=1), b"main"),
    (POLICIES, PolicyEvent(event="lease", policy="main"), b"main"),
    (BATCHES, Fence(run="demo", token=1), b"demo"),
    (PROGRESS, Closure(group=GROUP, outcome="buffered"), b""),
    (REPORTS, Progress(role="explore", instance="explore-0/1"), b"explore-0/1"),
    (DEAD_LETTERS, DeadLetter(topic="tasks", partition=0, offset=0, stage="s", reason="r", key=b"\xff"), b"\xff"),
]


@pytest.mark.parametrize(("topic", "record", "key"), KEYS)
async def test_the_key_comes_from_the_record(topic: Topic, record: Control | Block, key: bytes) -> None:
    expected = key or GROUP.encode()
    assert record_key(topic, record) == expected
    log = await new_log()
    position = await log.publish(topic, record)
    (message,) = await all_of(log, topic)
    assert (message.key, message.error) == (expected, None)
    assert position.partition == partition_for(expected, topic.partitions or 4)
    assert dict(message.record.headers)["kind"]


async def test_a_tick_goes_to_its_own_partition_and_a_given_key_or_partition_rules() -> None:
    log = await new_log()
    assert [(await log.publish(VERIFIED, Tick(partition=p, due_ms=1))).partition for p in range(4)] == [0, 1, 2, 3]
    assert (await log.publish(VERIFIED, STUB, partition=3)).partition == 3
    assert (await log.publish(VERIFIED, STUB, key="other")).partition == partition_for(b"other", 4)


async def test_a_topic_refuses_records_it_does_not_hold() -> None:
    log = await new_log()
    with pytest.raises(ValueError, match="buffer holds Block; got DropMarker"):
        await log.publish(BUFFER, STUB)
    with pytest.raises(ValueError, match="accepts only issued tasks"):
        await log.publish(TASKS, Task(id="t", messages=()))


async def test_large_frames_go_to_the_store_and_come_back(store_dir: Path) -> None:
    store, large = DirectoryStore(store_dir), block(num_tokens=300_000)
    assert len(encode(large)) > MAX_FRAME_BYTES
    log = await new_log(store)
    await log.publish(EXPERIENCES, large)
    await log.publish(EXPERIENCES, block())
    first, second = await all_of(log, EXPERIENCES)
    assert len(first.record.value) < 300
    assert isinstance(first.value, Block)
    assert np.array_equal(first.value.experiences[0].tokens, large.experiences[0].tokens)
    assert isinstance(second.value, Block)
    assert len(list(store.keys("blobs/"))) == 1


async def test_without_a_store_frames_are_sent_whole_up_to_the_brokers_limit() -> None:
    log = await new_log()
    await log.publish(EXPERIENCES, block(num_tokens=300_000))
    (message,) = await all_of(log, EXPERIENCES)
    assert isinstance(message.value, Block)
    with pytest.raises(RecordTooLarge):
        await log.publish(EXPERIENCES, block(num_tokens=3_000_000))


async def test_a_claim_without_a_store_is_poison_not_silence(store_dir: Path) -> None:
    log = await new_log(DirectoryStore(store_dir))
    await log.publish(EXPERIENCES, block(num_tokens=300_000))
    (message,) = await all_of(Log(log.bus, "app"), EXPERIENCES)
    assert message.value is None
    assert "has no store" in str(message.error)


async def test_poison_is_a_message_and_its_neighbours_are_read() -> None:
    log = await new_log()
    await log.publish(VERIFIED, STUB, partition=0)
    await log.bus.send(log.name(VERIFIED), b"HR\x01\x00garbage", key=b"k", partition=0)
    await log.publish(VERIFIED, STUB, partition=0)
    before, poison, after = await all_of(log, VERIFIED)
    assert (before.value, after.value, poison.value) == (STUB, STUB, None)
    assert isinstance(poison.error, BadFrame)
    await log.dead_letter(poison, stage="verify", reason="bad frame")
    (letter,) = await all_of(log, DEAD_LETTERS)
    assert letter.key == b"k"
    assert letter.value == DeadLetter(
        topic="verified", partition=0, offset=1, stage="verify", reason="bad frame", error=str(poison.error),
        value=b"HR\x01\x00garbage", key=b"k",
    )  # fmt: skip


async def test_a_promotion_in_any_topic_but_policies_is_poison() -> None:
    log = await new_log()
    promoted = PolicyEvent(event="promoted", policy="main", version=9, owner="mallory", channel="stable")
    for topic in ALL:
        await log.bus.send(log.name(topic), encode(promoted), key=b"k", partition=0)
        (found,) = await all_of(log, topic)
        assert found.value == (promoted if topic is POLICIES else None)
        assert topic is POLICIES or "got PolicyEvent" in str(found.error)


async def test_a_dead_letter_is_cut_so_that_it_always_fits() -> None:
    log = await new_log()
    await log.bus.send(log.name(EXPERIENCES), bytes(8_000_000), key=b"k")
    (poison,) = await all_of(log, EXPERIENCES)
    await log.dead_letter(poison, stage="verify", reason="bad frame", error="why")
    (letter,) = await all_of(log, DEAD_LETTERS)
    assert isinstance(letter.value, DeadLetter)
    assert (len(letter.value.value), letter.value.error) == (MAX_LETTER_BYTES, "why")


async def test_a_newer_major_stops_the_reader_where_it_stands() -> None:
    log = await new_log()
    await log.publish(VERIFIED, STUB, partition=0)
    await log.bus.send(log.name(VERIFIED), b"HR\x63\x00\x00\x00\x00\x00", key=b"k", partition=0)
    reader = await log.assigned(VERIFIED, {0: 0})
    for _ in range(2):
        with pytest.raises(UnknownMajor):
            await log.read(reader, timeout_s=0.1)
        assert reader.positions() == {Partition("app.verified", 0): 0}


class FailingStore(DirectoryStore):
    """A store that fails the next `failures` reads."""

    failures = 0

    def get(self, key: str) -> bytes:
        if self.failures:
            self.failures -= 1
            raise StoreError("away")
        return super().get(key)


async def test_a_store_that_fails_is_asked_again_and_then_loses_nothing(store_dir: Path) -> None:
    store = FailingStore(store_dir)
    log = await new_log(store)
    await log.publish(EXPERIENCES, block(num_tokens=300_000), partition=0)
    reader = await log.assigned(EXPERIENCES, {0: 0})
    store.failures = 1
    assert len(await log.read(reader, timeout_s=0.1)) == 1
    reader.seek(Partition("app.experiences", 0), 0)
    store.failures = 100
    reading = asyncio.create_task(log.read(reader, timeout_s=0.1))
    while store.failures > 99:  # noqa: ASYNC110  the reader makes it true
        await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    assert reader.positions() == {Partition("app.experiences", 0): 0}
    store.failures = 0
    assert len(await log.read(reader, timeout_s=0.1)) == 1


async def test_read_all_ends_at_the_end_of_the_call() -> None:
    log = await new_log()
    await log.publish_all(VERIFIED, [Tick(partition=n % 4, due_ms=n) for n in range(1200)])
    seen = []
    async for message in log.scan(VERIFIED):
        seen.append(message)
        if len(seen) == 1:
            await log.publish(VERIFIED, Tick(partition=0, due_ms=9999))
    assert sorted(message.value.due_ms for message in seen if isinstance(message.value, Tick)) == list(range(1200))


async def test_no_role_starts_where_topics_that_are_joined_differ_in_their_partitions() -> None:
    bus = MemoryBus()
    await bus.create_topic("app.experiences", 8, {})
    log = Log(bus, "app")
    with pytest.raises(ConfigError, match=r"app\.experiences: got 8 partitions .* expected 4"):
        await log.create_topics(partitions=4, keep_ms=1000)
    with pytest.raises(ConfigError, match=r"app\.experiences: got 8 partitions .* expected 4"):
        await log.require_topics()


async def test_the_records_at_offsets_are_those_that_are_kept_in_one_read_for_neighbours() -> None:
    log = Log(MemoryBus(), "bot")
    await log.create_topics(partitions=1, keep_ms=-1)
    for number in range(200):
        await log.bus.send(log.name(PROGRESS), str(number).encode(), key=b"k")
    await log.bus.delete_records(Partition(log.name(PROGRESS), 0), 3)
    found = await log.at(PROGRESS, 0, [199, 1, 4, 5, 4, 900])
    assert {offset: record.value for offset, record in found.items()} == {4: b"4", 5: b"5", 199: b"199"}
    assert await log.at(PROGRESS, 0, []) == await log.at(PROGRESS, 0, [2]) == {}
    assert await log.at(PROGRESS, 7, [4]) == {}, "a partition that the topic does not have"


async def test_what_retention_takes_while_offsets_are_read_is_missing_and_the_rest_is_there() -> None:
    class Trimming(MemoryBus):
        async def assigned(
            self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
        ) -> Reader:
            reader = await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)
            for partition in starts:
                await self.delete_records(partition, 5)
            return reader

    log = Log(Trimming(), "bot")
    await log.create_topics(partitions=1, keep_ms=-1)
    for number in range(9):
        await log.bus.send(log.name(PROGRESS), str(number).encode(), key=b"k")
    assert list(await log.at(PROGRESS, 0, [2, 4, 5, 8])) == [5, 8]
