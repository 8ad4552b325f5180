"""A run in one file: all that a replay needs, to be replayed where there is neither the broker nor the store.

    tar + zstd   headrace.json                       format, app, run, and the settings that shape a step
                 model/…                             the model's own files
                 store/checkpoints/… store/blobs/…   the checkpoint it begins with, frames too large for the log
                 topics/<name>/<number>              records: u32 length · msgpack [offset, time, key, value]
                 headrace.end                        empty: the archive was not cut short

Guarantees: no address of a broker or store and no setting of another role is in it. Reading writes plain files below one
folder and nothing else: names that climb out, links, devices, anything oversized or truncated is one BadFrame that names
it. Below model/ only what `add_model` writes comes out. It names no code that its reader would run: see
`infra.cli.repeat.source`.
"""

import contextlib
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from infra.log.blobs import is_claim, read_claim
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.images import images_of
from infra.store.store import BLOBS, Store
from schemas import Block, decode
from schemas.errors import BadFrame, ConfigError, NotInStore
from schemas.topics import MAX_RECORD_BYTES, Topic, by_name
from schemas.wire.frame import is_sealed

FORMAT = 1
ABOUT = "headrace.json"
END = "headrace.end"
FOLDERS = ("model", "store", "topics")
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
PART_BYTES = 32 * 1024 * 1024
MAX_BYTES = 32 * 1024**3  # unpacked, unless the reader says otherwise: a few MB may unpack to hundreds of GB
MAX_ABOUT_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 1024 * 1024  # of everything between two members: a longer name is no name


class ArchiveHead(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive says of itself. settings: tables of the TOML. topics: those it holds.

    format: version of the archive's layout.
    """

    format: int = FORMAT
    settings: dict[str, Any]
    topics: tuple[str, ...]


class StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    """One record of the log as it lies in an archive.

    offset: in its partition. timestamp_ms: by the broker's clock. key, value: as stored.
    """

    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes


class Archive:
    """An archive being written; `close` makes it whole. sealed: records so far whose keys, which are in no archive, lie in the
    store's secrets.
    """

    def __init__(self, target: BinaryIO) -> None:
        self.sealed = 0
        self._target = target
        self._compressed = zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(target, closefd=False)
        self._tar = tarfile.open(  # noqa: SIM115 (close closes it)
            fileobj=cast("BinaryIO", self._compressed), mode="w|", format=tarfile.PAX_FORMAT
        )

    def add(self, name: str, data: bytes) -> None:
        """One file."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data))

    def add_model(self, folder: Path) -> None:
        """The files of a model folder that are weights, settings or vocabulary; never code. None without a folder."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_file() and path.suffix in MODEL_SUFFIXES:
                member = tarfile.TarInfo(f"model/{path.name}")
                member.size = path.stat().st_size
                with path.open("rb") as file:
                    self._tar.addfile(member, file)

    async def add_records(
        self, topic: Topic, records: AsyncIterator[Record], store: Store, *, images: bool = False
    ) -> int:
        """All records of a topic, and what they claim from the store, with `images` what they show too; how many."""
        part, number, count = bytearray(), 0, 0
        claimed: set[str] = set()
        async for record in records:
            frame = record.value
            if is_claim(frame):
                key = read_claim(frame).key
                frame = store.get(key)
                if key not in claimed:
                    claimed.add(key)
                    self.add(f"store/{key}", frame)
            self.sealed += is_sealed(frame)
            for key in shown_by(frame) - claimed if images else ():
                claimed.add(key)
                with contextlib.suppress(NotInStore):  # what showed it was dropped, or a replay will name it
                    self.add(f"store/{key}", store.get(key))
            body = msgspec.msgpack.encode(StoredRecord(record.offset, record.timestamp_ms, record.key, record.value))
            part += len(body).to_bytes(4, "little") + body
            count += 1
            if len(part) >= PART_BYTES:
                self.add(f"topics/{topic.name}/{number:06d}", bytes(part))
                part, number = bytearray(), number + 1
        if part or not number:
            self.add(f"topics/{topic.name}/{number:06d}", bytes(part))
        return count

    def close(self) -> int:
        """Write what ends an archive; its size in bytes."""
        self.add(END, b"")
        self._tar.close()
        self._compressed.close()  # type: ignore[no-untyped-call]
        return self._target.tell()


def shown_by(frame: bytes) -> set[str]:
    """Keys of the images that the experiences of a block show; what a sealed one shows cannot be seen here."""
    if is_sealed(frame):
        return set()
    record = decode(frame)
    members = record.experiences if isinstance(record, Block) else ()
    return {BLOBS + image.sha256 for one in members for image in images_of(one.messages)}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Archive]:
    """An archive that appears at `path` once closed, or not at all. Raises ConfigError where something is there."""
    if path.exists() or not path.parent.is_dir():
        raise ConfigError(
            f"{path}: {'is there already' if path.exists() else 'its folder is not there'}; name a new file"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("xb") as file:
            yield Archive(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


class _BoundedReader(io.RawIOBase):
    """A stream that gives no more than it was allowed to."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.left = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise BadFrame("a member's header is longer than any name")
        return data


def unpack(path: Path, folder: Path, *, max_bytes: int = MAX_BYTES) -> ArchiveHead:
    """Put the files of an archive below `folder`, which is empty. Raises BadFrame naming the file and what is wrong."""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
            _unpack(_BoundedReader(cast("BinaryIO", plain)), folder, max_bytes)
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=ArchiveHead)
    except OSError as error:
        raise BadFrame(f"{path}: cannot be read as an archive: {error.strerror or error}") from error
    except (BadFrame, tarfile.TarError, zstandard.ZstdError, EOFError, ValueError, msgspec.MsgspecError) as error:
        raise BadFrame(f"{path}: not an archive of `headrace export`: {error}") from error
    if about.format != FORMAT:
        raise BadFrame(f"{path}: got format {about.format}, expected {FORMAT}: this headrace is older, upgrade it")
    return about


def _unpack(plain: _BoundedReader, folder: Path, max_bytes: int) -> None:
    plain.left = MAX_HEADER_BYTES
    name = ""
    with tarfile.open(fileobj=cast("BinaryIO", plain), mode="r|") as tar:
        while (member := tar.next()) is not None:
            target = folder.joinpath(*checked_name(member).parts)
            max_bytes -= member.size
            if max_bytes < 0 or (member.name == ABOUT and member.size > MAX_ABOUT_BYTES):
                raise BadFrame(f"{member.name}: {member.size} bytes, too many; --max-unpacked allows more in all")
            plain.left += member.size
            source = tar.extractfile(member)
            assert source is not None, "checked to be a plain file"
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                while chunk := source.read(1024 * 1024):
                    file.write(chunk)
            if target.stat().st_size != member.size:
                raise BadFrame(f"{member.name}: ends after {target.stat().st_size} of {member.size} bytes")
            plain.left = MAX_HEADER_BYTES
            name = member.name
    if name != END:
        raise BadFrame(f"it ends without {END}: it was cut short")


def checked_name(member: tarfile.TarInfo) -> PurePosixPath:
    """Where a member goes. Raises BadFrame for a member that is not a plain file with a name of ours."""
    name = PurePosixPath(member.name)
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise BadFrame(f"{member.name}: a link, folder or device, expected plain files only")
    odd = not member.name.isprintable() or "\\" in member.name or any(part.startswith(".") for part in name.parts)
    if name.is_absolute() or odd or str(name) != member.name:
        raise BadFrame(f"{member.name!r}: not a name below the archive's folder")
    if member.name not in (ABOUT, END) and (name.parts[0] not in FOLDERS or len(name.parts) < 2):
        raise BadFrame(f"{member.name}: expected {ABOUT}, or a file in {', '.join(FOLDERS)}")
    if name.parts[0] == "model" and (len(name.parts) > 2 or name.suffix not in MODEL_SUFFIXES):
        raise BadFrame(f"{member.name}: not a file of a model, expected model/*{', *'.join(MODEL_SUFFIXES)}")
    return name


def restore_log(folder: Path, about: ArchiveHead, app: str, store: Store) -> Log:
    """The unpacked records as a log in memory. Raises BadFrame naming what does not hold."""
    bus = MemoryBus()
    log = Log(bus, app, store=store)
    for name in about.topics:
        try:
            topic = by_name(name)
            bus.restore(log.name(topic), list(_records(folder / "topics" / topic.name, log.name(topic))))
        except ValueError as error:
            raise BadFrame(f"archive: topics/{name}: {error}") from error
    return log


def _records(folder: Path, topic: str) -> Iterator[Record]:
    for path in sorted(folder.glob("*")):
        data = memoryview(path.read_bytes())
        at = 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            body = data[at + 4 : at + 4 + length]
            if length > 2 * MAX_RECORD_BYTES or len(body) != length:
                raise ValueError(f"{path.name}: a record of {length} bytes at {at} does not fit")
            one = msgspec.msgpack.decode(body, type=StoredRecord)
            yield Record(topic, 0, one.offset, one.timestamp_ms, one.key, one.value)
            at += 4 + length
