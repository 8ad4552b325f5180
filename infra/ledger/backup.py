"""A backup: a bundle of an app that others may still write to, and apart from it its keys.

    log/<topic>/<partition>/<from>-<to>   the sha256 of those records, beside the bundle: a backup that is begun again takes
    it over

The order makes every reference resolve, while all roles write:

1. Whatever names offsets: committed offsets, then all of the store but what 3 names (checkpoints, snapshots, identity).
2. The log, up to where it ends then: nothing of 1 is ahead of it. Topics are asked for their ends from the last that a record
   reaches to the first, so that the origin of a record is in the copy; and again where `policies` grew meanwhile, since
   `batches` names offsets of it (leases), and it names steps of `batches`.
3. What the log names (NAMED): it was stored before the record that names it, so it is there.

Objects that are removed meanwhile are missing from the copy; `headrace backup` checks at the end that the checkpoint it
copied is still the log's. Guarantees: begun again it stores nothing twice; keys lie in the place named for them, or nowhere.
"""

import asyncio
import time
from collections.abc import Mapping

from infra.ledger.bundle import Bundle, PartitionRange, StoreWriter, open_bundle
from infra.log.bus import Partition
from infra.log.log import Log
from infra.store.store import BLOBS, PRIVATE, Store
from schemas.errors import ConfigError, OffsetOutOfRange
from schemas.topics import ALL, POLICIES, Topic

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
