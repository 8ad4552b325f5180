"""A backup: a bundle of an app that others may still write to, and apart from it its keys; and putting one back.

    log/<topic>/<partition>/<from>-<to>   the sha256 of those records, beside the bundle: a backup that is begun again takes
    it over

The order of a backup makes every reference resolve, while all roles write:

1. Whatever names offsets: committed offsets, then all of the store but what 3 names (checkpoints, snapshots, identity).
2. The log, up to where it ends then: nothing of 1 is ahead of it. Topics are asked for their ends from the last that a record
   reaches to the first, so that the origin of a record is in the copy; and again where `policies` grew meanwhile, since
   `batches` names offsets of it (leases), and it names steps of `batches`.
3. What the log names (NAMED): it was stored before the record that names it, so it is there.

A restore goes into a broker and a store that have nothing of the app: objects first, then the log, then committed offsets,
then which log the store belongs to.

Guarantees: begun again, a backup stores nothing twice, and a restore continues; keys lie in the place named for them, or
nowhere. A restore puts every record at its offset with its time, compares every byte with its hash, and replaces nothing: a
key that is there stays as it is, so a user forgotten since is not remembered. Objects that are removed during a backup are
missing from the copy; `headrace backup` checks at the end that the checkpoint it copied is still the log's.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping

from infra.ledger.bundle import (
    WHOLE,
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
from schemas.errors import ConfigError, NotInStore, OffsetOutOfRange
from schemas.topics import ALL, POLICIES, Topic, by_name, topic_config

NAMED = (BLOBS, "policies/")
TRIES = 5


def open_backup(place: Store, app: str) -> Bundle:
    """The contents of a place. Raises ConfigError where a whole backup of this app is not there, BadFrame."""
    found = open_bundle(place)
    if found.app != app:
        raise ConfigError(f'{place!r} is a backup of app "{found.app}", and the settings name "{app}"')
    return found


async def copy_all(
    log: Log, store: Store, writer: StoreWriter, committed: Mapping[str, dict[str, dict[int, int]]]
) -> Bundle:
    """Positions, the log, and what it names, in this order; not yet whole. committed: as they were before this call."""
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
        try:
            return await _copy_range(log, topic, index, (begin, max(begin, end)), writer)
        except OffsetOutOfRange:  # retention went on meanwhile: what is left is copied
            continue
    raise ConfigError(f"{topic.name}/{index}: retention removes records faster than they can be copied")


async def _copy_range(
    log: Log, topic: Topic, index: int, bounds: tuple[int, int], writer: StoreWriter
) -> PartitionRange:
    """Parts that an earlier, unfinished run has put there are taken over as far as they follow one another."""
    begin, end = bounds
    prefix = f"log/{topic.name}/{index}/"
    at, first, parts = begin, begin, list[str]()
    for key in await asyncio.to_thread(lambda: list(writer.place.keys(prefix))):
        there, stop = map(int, key.removeprefix(prefix).split("-"))
        if there <= at < stop <= end and (not parts or there == at):
            first = min(first, there)
            parts.append((await asyncio.to_thread(writer.place.get, key)).decode())
            at = stop

    def on_part(start: int, stop: int, sha256: str) -> None:
        writer.place.put(f"{prefix}{start:020d}-{stop:020d}", sha256.encode())
        parts.append(sha256)
        writer.tell(f"{topic.name}/{index}: {stop - first:,} of {end - first:,} records")

    await writer.copy_records(log, topic, index, at, end, on_part)
    return PartitionRange(first, end, tuple(parts))


async def committed_offsets(log: Log, groups: list[str]) -> dict[str, dict[str, dict[int, int]]]:
    """Committed offsets of each group in the app's topics."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    for group in groups:
        for topic in ALL:
            if offsets := await log.bus.committed(group, log.name(topic)):
                found.setdefault(group, {})[topic.name] = {at.index: offset for at, offset in offsets.items()}
    return found


def find_partition(log: Log, name: str, index: int) -> Partition:
    """A partition of the app's topic called `name`."""
    return Partition(f"{log.app}.{name}", index)


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
        raise ConfigError(
            f"{store!r} has part of another backup: name an empty place in [store], or finish that backup"
        )
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
