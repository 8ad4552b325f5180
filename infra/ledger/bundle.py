"""The format of backups and exports: objects by hash, the log in parts, and a manifest that is written last.

    objects/<sha256>   an object of the store, a file of the model, a list of objects, or a part of the log
    bundle.json        `Bundle`, written last: without it the bundle is not whole

    a list             JSON lines of `BundleObject`
    a part             zstd of u32 length · msgpack `StoredRecord`, for each record

Guarantees: every byte that is read was compared with its hash; of a part one record at a time is in memory, of at most
MAX_PACKED_BYTES; a part unpacks to at most MAX_PART_BYTES.
"""

import asyncio
import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zstandard

from infra.log.bus import Headers, Record
from infra.log.log import Log
from infra.store.store import Store
from schemas.errors import BadFrame, ConfigError, NotInStore
from schemas.topics import MAX_RECORD_BYTES, Topic

FORMAT = 2
WHOLE = "bundle.json"
OBJECTS = "objects/"
PART_BYTES = 16 * 1024 * 1024
MAX_PACKED_BYTES = 2 * MAX_RECORD_BYTES
MAX_PART_BYTES = PART_BYTES + MAX_PACKED_BYTES
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
LIST_ENTRIES = 10_000

Tell = Callable[[str], None]


class StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record of the log in a part of an archive. timestamp_ms: by the broker's clock."""

    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes
    headers: Headers = ()


class BundleObject(msgspec.Struct, frozen=True, array_like=True):
    """One object. key: in the store, or below model/. num_bytes: its size. sha256: of its bytes, hexadecimal."""

    key: str
    num_bytes: int
    sha256: str


class PartitionRange(msgspec.Struct, frozen=True):
    """A partition. begin: its first offset. end: its next. parts: sha256 of each, in order."""

    begin: int
    end: int
    parts: tuple[str, ...] = ()


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a bundle. taken_ms: of that machine's clock at its begin. committed: group → topic → partition → offset.

    lists: sha256 of each. num_objects, num_bytes: of all objects. settings: tables of the TOML, of an export.
    """

    format: int = FORMAT
    app: str
    taken_ms: int = 0
    topics: dict[str, tuple[PartitionRange, ...]] = {}
    committed: dict[str, dict[str, dict[int, int]]] = {}
    lists: tuple[str, ...] = ()
    num_objects: int = 0
    num_bytes: int = 0
    settings: dict[str, Any] = {}


class BundleWriter:
    """Fills a bundle; a subclass says where it lies. An object that was put before is not put again."""

    def __init__(self, tell: Tell = lambda words: None) -> None:
        self.tell = tell
        self.lists: list[str] = []
        self.num_objects = self.num_bytes = 0
        self._entries: list[BundleObject] = []
        self._kept: set[str] = set()

    def put(self, name: str, data: bytes | memoryview) -> None:
        raise NotImplementedError

    def keep(self, data: bytes | memoryview) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 not in self._kept:
            self.put(OBJECTS + sha256, data)
            self._kept.add(sha256)
        return sha256

    def add(self, key: str, data: bytes | memoryview) -> None:
        self._entries.append(BundleObject(key, len(data), self.keep(data)))
        self.num_objects, self.num_bytes = self.num_objects + 1, self.num_bytes + len(data)
        self.tell(f"{self.num_objects:,} objects, {self.num_bytes:,} bytes: {key}")
        if len(self._entries) >= LIST_ENTRIES:
            self._close_list()

    def copy(self, store: Store, wanted: Callable[[str], bool]) -> None:
        """All objects with such keys; one that is removed meanwhile is not in it."""
        for key in filter(wanted, store.keys("")):
            with contextlib.suppress(NotInStore):
                self.add(key, store.get(key))

    async def copy_records(
        self, log: Log, topic: Topic, index: int, begin: int, end: int,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> PartitionRange:  # fmt: skip
        """Put the records of a partition there. Raises OffsetOutOfRange."""
        body, parts = bytearray(), list[str]()

        async def put(stop: int) -> None:
            packed = await asyncio.to_thread(zstandard.ZstdCompressor(level=3).compress, bytes(body))
            parts.append(await asyncio.to_thread(self.keep, packed))
            body.clear()
            self.tell(f"{topic.name}/{index}: {stop - begin:,} of {end - begin:,} records")

        if begin < end:
            async for records in log.chunks(topic, {index: begin}, {index: end}):
                for record in records:
                    on_record(record)
                    kept = StoredRecord(record.offset, record.timestamp_ms, record.key, record.value, record.headers)
                    packed = msgspec.msgpack.encode(kept)
                    body += len(packed).to_bytes(4, "little") + packed
                    if len(body) >= PART_BYTES:
                        await put(record.offset + 1)
            if body:
                await put(end)
        return PartitionRange(begin, max(begin, end), tuple(parts))

    def finish(self, bundle: Bundle) -> Bundle:
        self._close_list()
        whole = msgspec.structs.replace(
            bundle, lists=tuple(self.lists), num_objects=self.num_objects, num_bytes=self.num_bytes
        )
        self.put(WHOLE, msgspec.json.encode(whole))
        return whole

    def _close_list(self) -> None:
        if self._entries:
            self.lists.append(self.keep(b"\n".join(msgspec.json.encode(entry) for entry in self._entries)))
            self._entries = []


class StoreWriter(BundleWriter):
    """A bundle in a store. Raises ConfigError where the store is not empty."""

    def __init__(self, place: Store, tell: Tell = lambda words: None) -> None:
        super().__init__(tell)
        if taken := next(place.keys(""), ""):
            raise ConfigError(f"{place!r} holds {taken}: choose another place, which is empty")
        self.place = place

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.place.put(name, data)


def open_bundle(place: Store) -> Bundle:
    """The contents of a place. Raises ConfigError where no whole bundle is there, BadFrame."""
    try:
        size = place.size(WHOLE)
    except NotInStore as error:
        raise ConfigError(f"{place!r}: no {WHOLE}: no backup is here, or it was not finished") from error
    if size > MAX_MANIFEST_BYTES:
        raise BadFrame(f"{place!r}: {WHOLE}: got {size} bytes, expected at most {MAX_MANIFEST_BYTES}")
    try:
        found = msgspec.json.decode(place.get(WHOLE), type=Bundle)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(f"{place!r}: {WHOLE}: {error}") from error
    if found.format != FORMAT:
        raise BadFrame(f"{place!r}: got format {found.format}, expected {FORMAT}: another release wrote it, upgrade")
    return found


def checked(place: Store, sha256: str) -> bytes:
    """An object of a bundle. Raises BadFrame where it is missing or its bytes have changed."""
    try:
        data = place.get(OBJECTS + sha256)
    except (NotInStore, ValueError) as error:
        raise BadFrame(f"{place!r}: {OBJECTS}{sha256} is missing") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BadFrame(f"{place!r}: {OBJECTS}{sha256}: its bytes have another sha256")
    return data


def listed(place: Store, bundle: Bundle) -> Iterator[BundleObject]:
    """All objects of a bundle. Raises BadFrame."""
    for sha256 in bundle.lists:
        for line in checked(place, sha256).splitlines():
            try:
                yield msgspec.json.decode(line, type=BundleObject)
            except msgspec.MsgspecError as error:
                raise BadFrame(f"{place!r}: {OBJECTS}{sha256}: {error}") from error


def recorded(place: Store, partition: PartitionRange) -> Iterator[StoredRecord]:
    """The records of a partition. Raises BadFrame."""
    for sha256 in partition.parts:
        where = f"{place!r}: part {sha256}"
        left = MAX_PART_BYTES
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(checked(place, sha256))) as plain:
                while head := plain.read(4):
                    length = int.from_bytes(head, "little")
                    left -= 4 + length
                    if length > MAX_PACKED_BYTES or left < 0:
                        raise BadFrame(
                            f"{where}: unpacks to more than {MAX_PART_BYTES} bytes, or a record does not fit"
                        )
                    body = plain.read(length)
                    if len(head) < 4 or len(body) != length:
                        raise BadFrame(f"{where}: a record of {length} bytes ends after {len(body)}")
                    yield msgspec.msgpack.decode(body, type=StoredRecord)
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise BadFrame(f"{where}: {error}") from error


def describe(bundle: Bundle) -> str:
    count = sum(part.end - part.begin for partitions in bundle.topics.values() for part in partitions)
    return f"{count:,} records, {bundle.num_objects:,} objects of {bundle.num_bytes:,} bytes"
