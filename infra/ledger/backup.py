"""A copy of an app that others may still write to: its topics, its store, and apart from them its keys.

    objects/<sha256>                      what an object of the store, or a part of the log, was
    list/<number>                         JSON lines [key, bytes, sha256] of the store
    log/<topic>/<partition>/<from>-<to>   the sha256 of those records: zstd of u32 length · msgpack `BackupRecord`
    backup.json                           `Backup`, written last: without it the copy is not whole

The order makes every reference resolve, while all roles write:

1. Whatever names offsets: committed offsets, then all of the store but what 3 names (checkpoints, snapshots, identity).
2. The log, up to where it ends then: nothing of 1 is ahead of it. Where topics end is asked from the last that a record reaches
   to the first, so that what a record came from is in the copy; and again where `policies` grew meanwhile, since `batches`
   names offsets of it (leases), and it names steps of `batches`.
3. What the log names (NAMED): it was stored before the record that names it, so it is there.

What is removed meanwhile is missing from the copy; `headrace backup` looks at the end whether the checkpoint it copied is still
the log's. Guarantees: begun again it stores nothing twice; memory holds one object and one part; keys lie in the place
named for them, or nowhere.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import zstandard

from infra.log.bus import Headers, Partition, Record
from infra.log.log import Log
from infra.store.store import BLOBS, PRIVATE, Store
from schemas.errors import BadFrame, ConfigError, NotInStore, OffsetOutOfRange
from schemas.topics import ALL, POLICIES, Topic

FORMAT = 1
WHOLE = "backup.json"
NAMED = (BLOBS, "policies/")
PART_BYTES = 16 * 1024 * 1024
LIST_ENTRIES = 10_000
TRIES = 5

Tell = Callable[[str], None]


class BackupRecord(msgspec.Struct, frozen=True, array_like=True):
    """One record of the log as it lies in a backup.

    offset: in its partition. timestamp_ms: by the broker's clock. key, value, headers: as stored.
    """

    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes
    headers: Headers = ()


class BackupObject(msgspec.Struct, frozen=True, array_like=True):
    """One object of the store.

    key: in the store. num_bytes: its size. sha256: of its bytes, hexadecimal.
    """

    key: str
    num_bytes: int
    sha256: str


class PartitionRange(msgspec.Struct, frozen=True):
    """One partition from its first offset to its next. parts: sha256 of each, in order.

    begin: the first offset. end: the next one.
    """

    begin: int
    end: int
    parts: tuple[str, ...] = ()


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds. topics: partitions in order. committed: group → topic → partition → offset. lists: their sha256.
    num_bytes: of the store's objects, as they lay there.

    format: version of the layout. app: that was backed up. taken_ms: when it began, by this machine's clock. num_objects: of
    the store.
    """

    format: int = FORMAT
    app: str
    taken_ms: int
    topics: dict[str, tuple[PartitionRange, ...]] = {}
    committed: dict[str, dict[str, dict[int, int]]] = {}
    lists: tuple[str, ...] = ()
    num_objects: int = 0
    num_bytes: int = 0


def require_unfinished(place: Store) -> None:
    """Raises ConfigError where a backup is whole: the next one has a place of its own."""
    try:
        place.size(WHOLE)
    except NotInStore:
        return
    raise ConfigError(f"{place!r} holds a whole backup: name another place for the next one")


def open_backup(place: Store, app: str) -> Backup:
    """What a place holds. Raises ConfigError where a whole backup of this app is not there, BadFrame."""
    try:
        data = place.get(WHOLE)
    except NotInStore as error:
        raise ConfigError(f"{place!r}: no {WHOLE}: no backup is here, or it was not finished") from error
    try:
        found = msgspec.json.decode(data, type=Backup)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(f"{place!r}: {WHOLE}: {error}") from error
    if found.format != FORMAT:
        raise BadFrame(f"{place!r}: got format {found.format}, expected {FORMAT}: this headrace is older, upgrade it")
    if found.app != app:
        raise ConfigError(f'{place!r} is a backup of app "{found.app}", and the settings name "{app}"')
    return found


def checked(place: Store, sha256: str) -> bytes:
    """An object of a backup. Raises BadFrame where it is not what was put there."""
    try:
        data = place.get(f"objects/{sha256}")
    except NotInStore as error:
        raise BadFrame(f"{place!r}: objects/{sha256} is missing") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BadFrame(f"{place!r}: objects/{sha256}: its bytes have another sha256")
    return data


def listed(place: Store, backup: Backup) -> Iterator[BackupObject]:
    """All objects of the store that a backup holds. Raises BadFrame."""
    for sha256 in backup.lists:
        for line in checked(place, sha256).splitlines():
            yield msgspec.json.decode(line, type=BackupObject)


def recorded(place: Store, stretch: PartitionRange) -> Iterator[BackupRecord]:
    """The records of a partition. Raises BadFrame."""
    for sha256 in stretch.parts:
        data = memoryview(zstandard.ZstdDecompressor().decompress(checked(place, sha256)))
        at = 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            yield msgspec.msgpack.decode(data[at + 4 : at + 4 + length], type=BackupRecord)
            at += 4 + length


class BackupTarget:
    """A place that is being filled: objects by hash, what was put there before is not put again."""

    def __init__(self, place: Store, tell: Tell) -> None:
        self.place = place
        self.tell = tell
        self.lists: list[str] = []
        self.num_objects = self.num_bytes = 0
        self._entries: list[BackupObject] = []

    def keep(self, data: bytes) -> str:
        """Put an object there; its hash."""
        sha256 = hashlib.sha256(data).hexdigest()
        try:
            self.place.size(f"objects/{sha256}")
        except NotInStore:
            self.place.put(f"objects/{sha256}", data)
        return sha256

    def copy(self, store: Store, wanted: Callable[[str], bool]) -> None:
        """All objects with such keys; one that is removed meanwhile is not in it."""
        for key in store.keys(""):
            if not wanted(key):
                continue
            try:
                data = store.get(key)
            except NotInStore:
                continue
            self._entries.append(BackupObject(key, len(data), self.keep(data)))
            self.num_objects, self.num_bytes = self.num_objects + 1, self.num_bytes + len(data)
            self.tell(f"{self.num_objects:,} objects, {self.num_bytes:,} bytes: {key}")
            if len(self._entries) >= LIST_ENTRIES:
                self.close_list()

    def close_list(self) -> None:
        """Put the entries so far there."""
        if self._entries:
            self.lists.append(self.keep(b"\n".join(msgspec.json.encode(one) for one in self._entries)))
            self._entries = []

    def finish(self, backup: Backup) -> Backup:
        """Write what makes it whole."""
        self.close_list()
        whole = msgspec.structs.replace(
            backup, lists=tuple(self.lists), num_objects=self.num_objects, num_bytes=self.num_bytes
        )
        self.place.put(WHOLE, msgspec.json.encode(whole))
        return whole


async def copy_all(
    log: Log, store: Store, shelf: BackupTarget, committed: Mapping[str, dict[str, dict[int, int]]]
) -> Backup:
    """Positions, the log, and what it names, in this order; not yet whole. committed: as they were before this call."""
    taken_ms = int(time.time() * 1000)
    await asyncio.to_thread(shelf.copy, store, lambda key: not key.startswith((*NAMED, *PRIVATE)))
    ends = await _ends(log)
    topics = {topic.name: await copy_topic(log, topic, ends[topic.name], shelf) for topic in ALL}
    await asyncio.to_thread(shelf.copy, store, lambda key: key.startswith(NAMED))
    return Backup(app=log.app, taken_ms=taken_ms, topics=topics, committed=dict(committed))


async def _ends(log: Log) -> dict[str, dict[int, int]]:
    """Where each topic ends, all at one moment as far as one of them names another."""
    while True:
        ends = {topic.name: (await log.bounds(topic))[1] for topic in reversed(ALL)}
        if (await log.bounds(POLICIES))[1] == ends[POLICIES.name]:
            return ends


async def copy_topic(
    log: Log, topic: Topic, ends: Mapping[int, int], shelf: BackupTarget
) -> tuple[PartitionRange, ...]:
    """All partitions of a topic, up to these ends."""
    return tuple([await _copy_partition(log, topic, index, end, shelf) for index, end in sorted(ends.items())])


async def _copy_partition(log: Log, topic: Topic, index: int, end: int, shelf: BackupTarget) -> PartitionRange:
    for _ in range(TRIES):
        begin = (await log.bounds(topic))[0][index]
        try:
            return await _copy_stretch(log, topic, index, (begin, max(begin, end)), shelf)
        except OffsetOutOfRange:  # retention went on meanwhile: what is left is copied
            continue
    raise ConfigError(f"{topic.name}/{index}: retention removes records faster than they can be copied")


async def _copy_stretch(
    log: Log, topic: Topic, index: int, bounds: tuple[int, int], shelf: BackupTarget
) -> PartitionRange:
    """Parts that an earlier, unfinished run has put there are taken over as far as they follow one another."""
    begin, end = bounds
    prefix = f"log/{topic.name}/{index}/"
    at, first = begin, begin
    parts: list[str] = []
    for key in await asyncio.to_thread(lambda: list(shelf.place.keys(prefix))):
        there, stop = map(int, key.removeprefix(prefix).split("-"))
        if there <= at < stop <= end and (not parts or there == at):
            first = min(first, there)
            parts.append((await asyncio.to_thread(shelf.place.get, key)).decode())
            at = stop
    body = bytearray()
    start = at

    async def put(stop: int) -> None:
        sha256 = await asyncio.to_thread(shelf.keep, zstandard.ZstdCompressor(level=3).compress(bytes(body)))
        await asyncio.to_thread(shelf.place.put, f"{prefix}{start:020d}-{stop:020d}", sha256.encode())
        parts.append(sha256)
        shelf.tell(f"{topic.name}/{index}: {stop - first:,} of {end - first:,} records")

    if at < end:
        async for records in log.chunks(topic, {index: at}, {index: end}):
            for record in records:
                body += _packed(record)
                at = record.offset + 1
                if len(body) >= PART_BYTES:
                    await put(at)
                    body, start = bytearray(), at
        if body:
            await put(end)
    return PartitionRange(first, end, tuple(parts))


def _packed(record: Record) -> bytes:
    kept = BackupRecord(record.offset, record.timestamp_ms, record.key, record.value, record.headers)
    body = msgspec.msgpack.encode(kept)
    return len(body).to_bytes(4, "little") + body


async def committed_offsets(log: Log, groups: list[str]) -> dict[str, dict[str, dict[int, int]]]:
    """What each group has committed of the app's topics."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    for group in groups:
        for topic in ALL:
            if offsets := await log.bus.committed(group, log.name(topic)):
                found.setdefault(group, {})[topic.name] = {at.index: offset for at, offset in offsets.items()}
    return found


def partition_of(log: Log, name: str, index: int) -> Partition:
    """A partition of the app's topic called `name`."""
    return Partition(f"{log.app}.{name}", index)
