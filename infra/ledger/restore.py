"""Putting a backup back into a broker and a store that have nothing of the app.

Guarantees: every record is at its offset with its time; every byte put back was compared with its hash; nothing that is
there is replaced; run again, it continues. Objects come first, then the log, then committed offsets; which log the store
belongs to comes last. A key that is there stays as it is, so a user forgotten since is not remembered.
"""

import asyncio
import hashlib
from collections.abc import Iterator

from infra.ledger.backup import find_partition
from infra.ledger.bundle import WHOLE, Bundle, PartitionRange, StoredRecord, Tell, checked, listed, recorded
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.placing import OPEN, Placed, PlacingConnection
from infra.store.store import PRIVATE, Store
from schemas.errors import ConfigError, NotInStore
from schemas.topics import ALL, by_name, topic_config

MARK = "restoring.json"
LAST = "identity/"
ROUND = 10_000  # records held at once, and bytes of them
ROUND_BYTES = 16 * 1024 * 1024


async def restore(
    log: Log,
    store: Store,
    placing: PlacingConnection,
    place: Store,
    backup: Bundle,
    *,
    keep_ms: int,
    replication: int,
    tell: Tell,
) -> None:
    """Put everything back but keys. Raises ConfigError where something of the app is there, BadFrame, OffsetOutOfRange."""
    mark = hashlib.sha256(await asyncio.to_thread(place.get, WHOLE)).hexdigest().encode()
    await begin(log, store, mark)
    await asyncio.to_thread(_put_objects, store, place, backup, tell)
    for name, stretches in backup.topics.items():
        topic = by_name(name)
        config = topic_config(topic, keep_ms, replication)
        await log.bus.create_topic(log.name(topic), len(stretches), config | OPEN, replication)
        for index, stretch in enumerate(stretches):
            await _put_partition(log, placing, find_partition(log, name, index), place, stretch, tell)
        await placing.settle(log.name(topic), config)
    await _commit(log, backup)
    await asyncio.to_thread(_put_identity, store, place, backup)


async def begin(log: Log, store: Store, mark: bytes) -> None:
    """Mark the store as one that this backup goes into. Raises ConfigError where it, or the log, has something else."""
    try:
        there = await asyncio.to_thread(store.get, MARK)
    except NotInStore:
        there = b""
    if there == mark:
        return
    if there:
        raise ConfigError(f"{store!r} has part of another backup: name an empty place in [store], or finish that one")
    taken = await asyncio.to_thread(lambda: next((key for key in store.keys("") if not key.startswith(PRIVATE)), ""))
    if taken:
        raise ConfigError(
            f"{store!r} is not empty: it has {taken}; name an empty place in [store], nothing was changed"
        )
    if name := await _first_there(log):
        raise ConfigError(
            f"topic {name} is there: delete the app's topics, or name another broker; nothing was changed"
        )
    await asyncio.to_thread(store.put, MARK, mark)


def put_keys(store: Store, place: Store, backup: Bundle) -> int:
    """Put keys back that are not there; how many. Raises BadFrame."""
    count = 0
    for entry in listed(place, backup):
        if entry.key.startswith(PRIVATE) and not _has(store, entry.key, None):
            store.put(entry.key, checked(place, entry.sha256))
            count += 1
    return count


async def _first_there(log: Log) -> str:
    for topic in ALL:
        if await log.holds(topic):
            return log.name(topic)
    return ""


def _put_objects(store: Store, place: Store, backup: Bundle, tell: Tell) -> None:
    for number, entry in enumerate(listed(place, backup), 1):
        if not entry.key.startswith((LAST, *PRIVATE)) and not _has(store, entry.key, entry.num_bytes):
            store.put(entry.key, checked(place, entry.sha256))
        tell(f"{number:,} of {backup.num_objects:,} objects: {entry.key}")


def _put_identity(store: Store, place: Store, backup: Bundle) -> None:
    for entry in listed(place, backup):
        if entry.key.startswith(LAST):
            store.put(entry.key, checked(place, entry.sha256))
    store.delete(MARK)


def _has(store: Store, key: str, num_bytes: int | None) -> bool:
    try:
        return store.size(key) == num_bytes or num_bytes is None
    except NotInStore:
        return False


async def _put_partition(
    log: Log, placing: PlacingConnection, partition: Partition, place: Store, stretch: PartitionRange, tell: Tell
) -> None:
    at = (await log.bus.end_offsets(partition.topic))[partition]
    empty: Iterator[Placed] = ((0, b"", b"", ()) for _ in range(at, stretch.begin))
    while chunk := _round(empty):
        at = await placing.place(partition, at, chunk)
    there = placed(recorded(place, stretch), at, stretch)
    while chunk := await asyncio.to_thread(_round, there):
        at = await placing.place(partition, at, chunk)
        tell(f"{partition.topic}/{partition.index}: {at - stretch.begin:,} of {stretch.end - stretch.begin:,} records")
    if stretch.begin:
        await log.bus.delete_records(partition, stretch.begin)


def _round(records: Iterator[Placed]) -> list[Placed]:
    """The next of them, as many as are held at once."""
    taken: list[Placed] = []
    size = 0
    while len(taken) < ROUND and size < ROUND_BYTES and (record := next(records, None)) is not None:
        taken.append(record)
        size += len(record[2])
    return taken


def placed(records: Iterator[StoredRecord], at: int, stretch: PartitionRange) -> Iterator[Placed]:
    """Records to write at each offset from `at` to the end of the stretch: in a hole the record behind it, once more."""
    last: Placed = (0, b"", b"", ())
    for record in records:
        last = (record.timestamp_ms, record.key, record.value, record.headers)
        while at <= record.offset:
            yield last
            at += 1
    while at < stretch.end:
        yield last
        at += 1


async def _commit(log: Log, backup: Bundle) -> None:
    for group, topics in backup.committed.items():
        for name, offsets in topics.items():
            ends = backup.topics[name]
            starts = {find_partition(log, name, at): min(offset, ends[at].end) for at, offset in offsets.items()}
            reader = await log.bus.assigned(starts, group=group)
            try:
                await reader.commit(starts)
            finally:
                await reader.close()
