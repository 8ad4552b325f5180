"""A backup: a bundle of an app that others may still write to, and apart from it its keys; and putting one back.

The order of a backup makes every reference resolve, while all roles write:

1. All that names offsets: committed offsets, then the store without the objects of 3 (so checkpoints, snapshots, identity).
2. The log up to its present end, so that nothing of 1 is ahead of it. The ends are read from the last topic downstream to the
   first, so that the origin of each record is in the copy, and again if `policies` grew meanwhile, since
   `batches` names offsets of it (leases), and it names steps of `batches`.
3. Objects that the log names (NAMED): each was stored before the record that names it, so it is there.

A restore goes into a broker and a store that have nothing of the app: objects first, then the log, then committed offsets,
then the name of the log that the store belongs to.

Guarantees: keys lie in the place named for them, or nowhere. A restore puts every record at its offset with its time, compares
every byte with its hash, and replaces nothing: a key that exists stays unchanged, so a user forgotten since stays forgotten.
Objects that are removed during a backup are missing from the copy; `headrace backup` checks at the end that the checkpoint it
copied is still the log's.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping

from infra.ledger.bundle import (
    Bundle,
    PartitionRange,
    StoredRecord,
    StoreWriter,
    Tell,
    checked,
    listed,
    open_bundle,
    recorded,
)
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.placing import OPEN, Placed, PlacingConnection
from infra.store.store import BLOBS, PRIVATE, Store
from schemas.errors import ConfigError, OffsetOutOfRange
from schemas.topics import ALL, POLICIES, Topic, by_name, topic_config

NAMED = (BLOBS, "policies/")
LAST = "identity/"  # put back when all else is there
TRIES = 5
ROUND = 10_000  # records held at once, and bytes of them
ROUND_BYTES = 16 * 1024 * 1024


def open_backup(place: Store, app: str) -> Bundle:
    """The contents of a place. Raises ConfigError where a whole backup of this app is not there, BadFrame."""
    found = open_bundle(place)
    if found.app != app:
        raise ConfigError(f'{place!r} is a backup of app "{found.app}", and the settings name "{app}"')
    return found


async def copy_all(
    log: Log, store: Store, writer: StoreWriter, committed: Mapping[str, dict[str, dict[int, int]]]
) -> Bundle:
    """Copy positions, the log, and objects that it names, in this order; not yet whole. committed: as before this call."""
    taken_ms = int(time.time() * 1000)
    await asyncio.to_thread(writer.copy, store, lambda key: not key.startswith((*NAMED, *PRIVATE)))
    ends = await _ends(log)
    topics = {
        topic.name: tuple(
            [await _copy_partition(log, topic, index, end, writer) for index, end in sorted(ends[topic.name].items())]
        )
        for topic in ALL
    }
    await asyncio.to_thread(writer.copy, store, lambda key: key.startswith(NAMED))
    return Bundle(app=log.app, taken_ms=taken_ms, topics=topics, committed=dict(committed))


async def _ends(log: Log) -> dict[str, dict[int, int]]:
    """The ends of all topics, at one moment as far as one topic names another."""
    while True:
        ends = {topic.name: (await log.bounds(topic))[1] for topic in reversed(ALL)}
        if (await log.bounds(POLICIES))[1] == ends[POLICIES.name]:
            return ends


async def _copy_partition(log: Log, topic: Topic, index: int, end: int, writer: StoreWriter) -> PartitionRange:
    for _ in range(TRIES):
        begin = (await log.bounds(topic))[0][index]
        with contextlib.suppress(OffsetOutOfRange):  # retention went on meanwhile: copy the remaining records
            return await writer.copy_records(log, topic, index, begin, end)
    raise ConfigError(f"{topic.name}/{index}: retention removes records faster than they can be copied")


async def committed_offsets(log: Log, groups: list[str]) -> dict[str, dict[str, dict[int, int]]]:
    """Committed offsets of each group in the app's topics."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    for group in groups:
        for topic in ALL:
            if offsets := await log.bus.committed(group, log.name(topic)):
                found.setdefault(group, {})[topic.name] = {at.index: offset for at, offset in offsets.items()}
    return found


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
    await require_empty(log, store)
    await asyncio.to_thread(_put, store, place, backup, lambda key: not key.startswith((LAST, *PRIVATE)), tell)
    for name, partitions in backup.topics.items():
        topic = by_name(name)
        config = topic_config(topic, keep_ms, replication)
        await log.bus.create_topic(log.name(topic), len(partitions), config | OPEN, replication)
        for index, held in enumerate(partitions):
            await _put_partition(log, placing, Partition(log.name(topic), index), place, held, tell)
        await placing.settle(log.name(topic), config)
    await _commit(log, backup)
    await asyncio.to_thread(_put, store, place, backup, lambda key: key.startswith(LAST), tell)


async def require_empty(log: Log, store: Store) -> None:
    """Raise ConfigError where the store or the log has data of an app."""
    taken = await asyncio.to_thread(lambda: next((key for key in store.keys("") if not key.startswith(PRIVATE)), ""))
    if taken:
        raise ConfigError(
            f"{store!r} is not empty: it has {taken}; name an empty place in [store], nothing was changed"
        )
    for topic in ALL:
        if await log.holds(topic):
            raise ConfigError(
                f"topic {log.name(topic)} is there: delete the app's topics, or name another broker; nothing was changed"
            )


def put_keys(store: Store, place: Store, backup: Bundle) -> int:
    """Put keys back that are not there; how many. Raises BadFrame."""
    there = {key for folder in PRIVATE for key in store.keys(folder)}
    return _put(store, place, backup, lambda key: key.startswith(PRIVATE) and key not in there, lambda words: None)


def _put(store: Store, place: Store, backup: Bundle, wanted: Callable[[str], bool], tell: Tell) -> int:
    count = 0
    for entry in listed(place, backup):
        if wanted(entry.key):
            store.put(entry.key, checked(place, entry.sha256))
            count += 1
            tell(f"{count:,} of {backup.num_objects:,} objects: {entry.key}")
    return count


async def _put_partition(
    log: Log, placing: PlacingConnection, partition: Partition, place: Store, held: PartitionRange, tell: Tell
) -> None:
    at = 0
    empty: Iterator[Placed] = ((0, b"", b"", ()) for _ in range(held.begin))
    while chunk := _round(empty):
        at = await placing.place(partition, at, chunk)
    there = placed(recorded(place, held), held)
    while chunk := await asyncio.to_thread(_round, there):
        at = await placing.place(partition, at, chunk)
        tell(f"{partition.topic}/{partition.index}: {at - held.begin:,} of {held.end - held.begin:,} records")
    if held.begin:
        await log.bus.delete_records(partition, held.begin)


def _round(records: Iterator[Placed]) -> list[Placed]:
    """The next of them, as many as are held at once."""
    taken: list[Placed] = []
    size = 0
    while len(taken) < ROUND and size < ROUND_BYTES and (record := next(records, None)) is not None:
        taken.append(record)
        size += len(record[2])
    return taken


def placed(records: Iterator[StoredRecord], held: PartitionRange) -> Iterator[Placed]:
    """A record for each offset of the partition: in a hole the record behind it, once more."""
    at = held.begin
    last: Placed = (0, b"", b"", ())
    for record in records:
        last = (record.timestamp_ms, record.key, record.value, record.headers)
        yield from itertools.repeat(last, record.offset + 1 - at)
        at = record.offset + 1
    yield from itertools.repeat(last, held.end - at)


async def _commit(log: Log, backup: Bundle) -> None:
    for group, topics in backup.committed.items():
        for name, offsets in topics.items():
            ends = backup.topics[name]
            starts = {
                Partition(log.name(by_name(name)), at): min(offset, ends[at].end) for at, offset in offsets.items()
            }
            reader = await log.bus.assigned(starts, group=group)
            try:
                await reader.commit(starts)
            finally:
                await reader.close()
