"""Copying an app: what is in it, in which order, and what a damaged or unfinished copy says."""

import itertools
from collections.abc import Awaitable, Callable

import pytest

from infra.ledger.backup import MARK, begin, copy_all, open_backup, placed, put_keys
from infra.ledger.bundle import (
    Bundle,
    PartitionRange,
    StoredRecord,
    StoreWriter,
    checked,
    listed,
    recorded,
    require_unfinished,
)
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import Fence, PolicyEvent, decode, topics
from schemas.errors import BadFrame, ConfigError
from tests.trainer.memory_run import filled_log


class WatchedStore(MemoryStore):
    """Calls `seen` with each key that is read."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self._seen = seen

    def get(self, key: str) -> bytes:
        self._seen(key)
        return super().get(key)


def silent(words: str) -> None:
    """Nobody looks on."""


async def copied(log: Log, store: Store, place: Store) -> Bundle:
    writer = StoreWriter(place, silent)
    return writer.finish(await copy_all(log, store, writer, {}))


async def test_what_names_offsets_is_copied_before_the_log_and_what_the_log_names_after_it() -> None:
    read: list[str] = []
    store, place = WatchedStore(read.append), MemoryStore()
    for key in ("blobs/a", "checkpoints/t/1-1/manifest.json", "identity/t.json", "policies/main/1", "snapshots/t/0"):
        store.put(key, key.encode())
    log = await filled_log(MemoryStore())
    writer = StoreWriter(place, lambda words: read.append("log") if words.startswith("buffer/") else None)
    await copy_all(log, store, writer, {})
    assert [key for key, _ in itertools.groupby(read)] == [
        "checkpoints/t/1-1/manifest.json", "identity/t.json", "snapshots/t/0", "log", "blobs/a", "policies/main/1",
    ]  # fmt: skip


class AskedBus(MemoryBus):
    """Notes whose end was asked for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        self.asked.append(topic)
        return await super().end_offsets(topic)


async def test_no_topic_is_copied_further_than_the_topics_that_its_records_came_from() -> None:
    bus = AskedBus()
    log = await filled_log(MemoryStore(), bus)
    bus.asked.clear()
    await copied(log, MemoryStore(), MemoryStore())
    flow = [log.name(topic) for topic in reversed(topics.ALL)]
    assert bus.asked[: len(flow)] == flow and flow.index("t.batches") < flow.index("t.buffer") < flow.index(
        "t.verified"
    )


class LeasedBus(MemoryBus):
    """Calls `lease` once it is set, as it is asked for the end of the journal."""

    def __init__(self) -> None:
        super().__init__()
        self.lease: Callable[[], Awaitable[object]] | None = None

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        if self.lease is not None and topic == "t.batches":
            lease, self.lease = self.lease, None
            await lease()
        return await super().end_offsets(topic)


async def test_a_lease_that_is_taken_while_ends_are_asked_for_is_copied_with_the_fence_that_names_it() -> None:
    bus = LeasedBus()
    log = await filled_log(MemoryStore(), bus)

    async def lease() -> None:
        at = await log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="main"))
        await log.publish(topics.BATCHES, Fence(run="t", token=at.offset))

    await lease()
    bus.lease = lease
    place = MemoryStore()
    backup = await copied(log, MemoryStore(), place)
    ((policies,), (batches,)) = backup.topics["policies"], backup.topics["batches"]
    fence = decode(list(recorded(place, batches))[-1].value)
    assert isinstance(fence, Fence)
    end = policies.end
    assert fence.token < end


async def test_a_backup_holds_every_record_and_object_and_no_key() -> None:
    store, place = MemoryStore(), MemoryStore()
    log = await filled_log(store)
    await log.bus.delete_records(Partition(log.name(topics.BUFFER), 0), 3)
    store.put("blobs/a", b"a")
    store.put("keys/u/1", b"secret")
    store.put("gateway/secret", b"secret")
    await copied(log, store, place)
    backup = open_backup(place, "t")
    assert [one.key for one in listed(place, backup)] == ["blobs/a"]
    assert not any(b"secret" in place.get(key) for key in place.keys(""))
    (buffer,) = backup.topics["buffer"]
    records = [message.record async for message in log.read_all(topics.BUFFER)]
    assert (buffer.begin, buffer.end) == (3, records[-1].offset + 1)
    assert list(recorded(place, buffer)) == [
        StoredRecord(one.offset, one.timestamp_ms, one.key, one.value, one.headers) for one in records
    ]


async def test_a_backup_that_is_begun_again_takes_over_the_parts_that_are_there() -> None:
    store, place = MemoryStore(), MemoryStore()
    log = await filled_log(store)
    writer = StoreWriter(place, silent)
    await copy_all(log, store, writer, {})
    with pytest.raises(ConfigError, match="was not finished"):
        open_backup(place, "t")
    before = list(place.keys("log/buffer/"))
    records = [message.record async for message in log.read_all(topics.BUFFER)]
    await log.bus.send(records[0].topic, records[0].value, key=records[0].key)
    backup = await copied(log, store, place)
    (buffer,) = backup.topics["buffer"]
    assert len(buffer.parts) == 2 and next(iter(place.keys("log/buffer/"))) == before[0]
    assert [one.offset for one in recorded(place, buffer)] == list(range(len(records) + 1))
    with pytest.raises(ConfigError, match="name another place"):
        require_unfinished(place)


def test_damaged_bytes_of_a_backup_are_refused_by_their_name() -> None:
    place = MemoryStore()
    sha256 = StoreWriter(place, silent).keep(b"body")
    place.put(f"objects/{sha256}", b"Body")
    with pytest.raises(BadFrame, match=f"objects/{sha256}: its bytes have another sha256"):
        checked(place, sha256)
    place.delete(f"objects/{sha256}")
    with pytest.raises(BadFrame, match=f"objects/{sha256} is missing"):
        checked(place, sha256)


async def test_nothing_is_restored_over_topics_or_objects_that_are_there() -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match="is there: delete the app's topics"):
        await begin(await filled_log(MemoryStore()), store, b"one")
    assert list(store.keys("")) == []
    store.put("keys/u/1", b"secret")
    empty = Log(MemoryBus(), "t")
    await begin(empty, store, b"one")
    await begin(await filled_log(MemoryStore()), store, b"one")  # begun again
    with pytest.raises(ConfigError, match="part of another backup"):
        await begin(empty, store, b"two")
    store.delete(MARK)
    store.put("blobs/a", b"a")
    with pytest.raises(ConfigError, match="it has blobs/a"):
        await begin(empty, store, b"one")


def test_keys_come_back_where_none_are_and_one_that_was_destroyed_since_does_not() -> None:
    store, place = MemoryStore(), MemoryStore()
    for key in ("keys/u/1", "keys/v/1", "gateway/secret"):
        store.put(key, b"secret")
    writer = StoreWriter(place, silent)
    writer.copy(store, lambda key: True)
    backup = writer.finish(Bundle(app="t", taken_ms=1))
    store.put("keys/u/1", b"")
    store.delete("keys/v/1")
    store.delete("gateway/secret")
    assert put_keys(store, place, backup) == 2
    assert [store.get(key) for key in ("keys/u/1", "keys/v/1", "gateway/secret")] == [b"", b"secret", b"secret"]


def test_in_a_hole_of_a_compacted_topic_lies_the_record_behind_it_once_more() -> None:
    records = [StoredRecord(12, 5, b"a", b"A"), StoredRecord(15, 6, b"b", b"B")]
    a, b = (5, b"a", b"A", ()), (6, b"b", b"B", ())
    stretch = PartitionRange(10, 17)
    whole = [a, a, a, b, b, b, b]
    assert list(placed(iter(records), 10, stretch)) == whole
    for at in range(10, 18):  # where a restore that is begun again goes on
        assert list(placed(iter(records), at, stretch)) == whole[at - 10 :]
