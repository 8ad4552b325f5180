"""A run in one file, a bundle with all that a replay needs without the broker and the store.

    zstd of      u64 length · bytes, for each object;  u64 length + MANIFEST · `Bundle`, at the end

    topics       those a replay reads, of one partition each
    objects      the checkpoint it begins with, frames too large for the log, images; the model's own files below model/
    settings     the tables that shape a step

Guarantees: no address of a broker or store and no setting of another role is in it. Reading writes plain files below one folder
and nothing else: a key that leaves the folder, and any oversized or truncated object, is a BadFrame that names it. Below
model/ only files as `add_model` writes them come out. An archive names no code to run: see `infra.cli.repeat.source`.
"""

import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import msgspec
import zstandard

from infra.files import replacing
from infra.ledger.bundle import (
    MAX_MANIFEST_BYTES,
    OBJECTS,
    WHOLE,
    Bundle,
    BundleObject,
    BundleWriter,
    PartitionRange,
    listed,
    open_bundle,
    recorded,
)
from infra.log.blobs import is_claim, read_claim
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.directory import DirectoryStore
from infra.store.images import images_of
from infra.store.store import BLOBS, Store, check_key
from schemas import Block, decode
from schemas.errors import BadFrame, ConfigError, NotInStore, OffsetOutOfRange
from schemas.topics import Topic, by_name
from schemas.wire.frame import is_sealed

MODEL = "model/"
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
MAX_BYTES = 32 * 1024**3  # unpacked, unless the reader says otherwise: a few MB may unpack to hundreds of GB
MANIFEST = 1 << 63
READ_BYTES = 1024 * 1024


class Archive(BundleWriter):
    """An archive being written; `finish` makes it whole. sealed: records so far whose keys lie in the store's secrets alone."""

    def __init__(self, target: BinaryIO) -> None:
        super().__init__()
        self.sealed = 0
        self._compressed = zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(target, closefd=False)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._compressed.write((len(data) + (MANIFEST if name == WHOLE else 0)).to_bytes(8, "little"))
        self._compressed.write(data)
        if name == WHOLE:
            self._compressed.close()  # type: ignore[no-untyped-call]

    def add_model(self, folder: Path) -> None:
        """The files of a model folder that are weights, settings or vocabulary; never code. None without a folder."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_file() and path.suffix in MODEL_SUFFIXES and path.stat().st_size:
                with (
                    path.open("rb") as file,
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                    memoryview(data) as view,
                ):
                    self.add(MODEL + path.name, view)

    async def add_topic(
        self, log: Log, topic: Topic, begin: int, store: Store, *, images: bool = False
    ) -> PartitionRange:
        """The records of a topic of one partition from `begin` to its present end, with the frames that they claim.

        images: also the images that they show. Raises OffsetOutOfRange for a record that is missing.
        """
        at, named = begin, set[str]()

        def on_record(record: Record) -> None:
            nonlocal at
            if record.offset != at:
                raise OffsetOutOfRange(f"{topic.name}: offset {at} is missing, the next record is {record.offset}")
            at += 1
            frame = record.value
            if is_claim(frame):
                key = read_claim(frame).key
                frame = store.get(key)
                if key not in named:
                    named.add(key)
                    self.add(key, frame)
            self.sealed += is_sealed(frame)
            for key in shown_by(frame) - named if images else ():
                named.add(key)
                with contextlib.suppress(NotInStore):  # its message was dropped, or a replay will name it
                    self.add(key, store.get(key))

        end = (await log.bounds(topic))[1][0]
        return await self.copy_records(log, topic, 0, begin, end, on_record)


def shown_by(frame: bytes) -> set[str]:
    """Keys of the images that the experiences of a block show; none of a sealed one, which cannot be read here."""
    if is_sealed(frame):
        return set()
    record = decode(frame)
    members = record.experiences if isinstance(record, Block) else ()
    return {BLOBS + image.sha256 for member in members for image in images_of(member.messages)}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Archive]:
    """An archive that appears at `path` once it is left, or not at all. Raises ConfigError where something is there."""
    if path.exists() or not path.parent.is_dir():
        raise ConfigError(
            f"{path}: {'is there already' if path.exists() else 'its folder is not there'}; name a new file"
        )
    with replacing(path) as file:
        yield Archive(file)


def unpack(path: Path, folder: Path, *, max_bytes: int = MAX_BYTES) -> Bundle:
    """Put the files of an archive below `folder`, which is empty: bundle/, model/, store/. Raises BadFrame."""
    try:
        (folder / "bundle" / OBJECTS).mkdir(parents=True)
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
            _unpack(cast("BinaryIO", plain), folder / "bundle", max_bytes)
        place = DirectoryStore(folder / "bundle")
        bundle = open_bundle(place)
        for entry in listed(place, bundle):
            _lay_out(folder, entry)
    except OSError as error:
        raise BadFrame(f"{path}: cannot be read as an archive: {error.strerror or error}") from error
    except (BadFrame, ConfigError, zstandard.ZstdError, ValueError) as error:
        raise BadFrame(f"{path}: not an archive of `headrace export`: {error}") from error
    return bundle


def _unpack(plain: BinaryIO, folder: Path, max_bytes: int) -> None:
    """Objects are named by the hash of their bytes, so nothing that an archive says is a path here."""
    while True:
        raw = plain.read(8)
        head = int.from_bytes(raw, "little")
        size, is_manifest = head & ~MANIFEST, head >= MANIFEST
        max_bytes -= size
        if max_bytes < 0 or (is_manifest and size > MAX_MANIFEST_BYTES):
            raise BadFrame(f"an object of {size} bytes, too many; --max-unpacked allows more in all")
        hasher, temporary, left = hashlib.sha256(), folder / "part", size
        with temporary.open("wb") as file:
            while left and (chunk := plain.read(min(left, READ_BYTES))):
                hasher.update(chunk)
                file.write(chunk)
                left -= len(chunk)
        if left or len(raw) < 8:
            raise BadFrame("it was cut short")
        temporary.rename(folder / (WHOLE if is_manifest else OBJECTS + hasher.hexdigest()))
        if is_manifest:
            if plain.read(1):
                raise BadFrame(f"data follows {WHOLE}")
            return


def _lay_out(folder: Path, entry: BundleObject) -> None:
    """Put an object below model/ or store/. Raises BadFrame for a key that is no name there."""
    try:
        name = PurePosixPath(check_key(entry.key))
    except ValueError as error:
        raise BadFrame(f"not a name below the archive's folder: {error}") from error
    is_model = entry.key.startswith(MODEL)
    if is_model and (len(name.parts) != 2 or name.suffix not in MODEL_SUFFIXES):
        raise BadFrame(f"{entry.key}: not a file of a model, expected model/*{', *'.join(MODEL_SUFFIXES)}")
    source, target = folder / "bundle" / OBJECTS / entry.sha256, folder / ("" if is_model else "store") / name
    if source.parent != folder / "bundle" / "objects" or not source.is_file():
        raise BadFrame(f"{entry.key}: its object {entry.sha256[:80]!r} is missing")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def restore_log(folder: Path, bundle: Bundle, app: str, store: Store, *, max_bytes: int = MAX_BYTES) -> Log:
    """The unpacked records as a log in memory. Raises BadFrame naming the fault."""
    bus = MemoryBus()
    log = Log(bus, app, store=store)
    for name, partitions in bundle.topics.items():
        try:
            topic = by_name(name)
            records: list[Record] = []
            for stored in recorded(DirectoryStore(folder / "bundle"), partitions[0]) if partitions else ():
                max_bytes -= len(stored.key) + len(stored.value)
                if max_bytes < 0:
                    raise ValueError("too many bytes; --max-unpacked allows more in all")
                records.append(Record(log.name(topic), 0, *msgspec.structs.astuple(stored)))
            bus.restore(log.name(topic), records)
        except ValueError as error:
            raise BadFrame(f"archive: {name}: {error}") from error
    return log
