"""A run as one file and an app as a backup: whole or not there, read without trusting it, and in which order it is copied."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.ledger.archive import MANIFEST, restore_log, unpack, writing
from infra.ledger.backup import copy_all, open_backup, placed, put_keys, require_empty
from infra.ledger.bundle import (
    MAX_PART_BYTES,
    Bundle,
    PartitionRange,
    StoredRecord,
    StoreWriter,
    checked,
    listed,
    recorded,
)
from infra.log.blobs import deposit
from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.images import image_named
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS, Store
from schemas import Block, Fence, Message, PolicyEvent, Span, decode, encode, make_experience, topics
from schemas.errors import BadFrame, ConfigError, OffsetOutOfRange
from tests.trainer.memory_run import filled_log

SETTINGS = {"app": "t"}


def record(offset: int, value: bytes = b"HR") -> Record:
    return Record("t.buffer", 0, offset, 10**12 + offset, b"key", value)


def written(path: Path, records: list[Record], store: MemoryStore | None = None, *, images: bool = False) -> Path:
    bus, store = MemoryBus(), store or MemoryStore()
    bus.restore("t.buffer", records)
    begin = records[0].offset if records else 0

    async def main() -> None:
        with writing(path) as archive:
            held = await archive.add_topic(Log(bus, "t", store=store), topics.BUFFER, begin, store, images=images)
            archive.finish(Bundle(app="t", settings=SETTINGS, topics={"buffer": (held,)}))

    asyncio.run(main())
    return path


def test_records_come_back_with_their_offsets_and_times(tmp_path: Path) -> None:
    records = [record(offset, bytes([offset])) for offset in range(7, 30)]
    bundle = unpack(written(tmp_path / "run", records), tmp_path / "out")
    log = restore_log(tmp_path / "out", bundle, "t", MemoryStore())

    async def main() -> list[Record]:
        reader = await log.assigned(topics.BUFFER, "beginning")
        return await reader.get_many(timeout_s=0.1)

    assert bundle.settings == SETTINGS and asyncio.run(main()) == records


async def test_an_export_ends_at_a_hole_in_a_topic_and_names_its_offset(tmp_path: Path) -> None:
    class Compacted(Log):
        async def chunks(self, *args: Any, **kwargs: Any) -> AsyncGenerator[list[Record], None]:
            async for records in super().chunks(*args, **kwargs):
                yield [one for one in records if one.offset != 2]

    bus, store = MemoryBus(), MemoryStore()
    bus.restore("t.buffer", [record(at) for at in range(4)])
    missing = "buffer: offset 2 is missing, the next record is 3"
    with pytest.raises(OffsetOutOfRange, match=missing), writing(tmp_path / "run") as archive:
        await archive.add_topic(Compacted(bus, "t", store=store), topics.BUFFER, 1, store)


def test_what_the_records_claim_from_the_store_goes_along_once(tmp_path: Path) -> None:
    store = MemoryStore()
    claim = deposit(store, b"large")
    unpack(written(tmp_path / "run", [record(0, claim), record(1, claim)], store), tmp_path / "out")
    (blob,) = (tmp_path / "out" / "store" / "blobs").iterdir()
    assert blob.read_bytes() == b"large"


def test_only_weights_settings_and_vocabulary_of_a_model_go_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "modeling.py", "pytorch_model.bin", ".token"):
        (model / name).write_bytes(b"{}")
    with writing(tmp_path / "run") as archive:
        archive.add_model(model)
        archive.finish(Bundle(app="t"))
    unpack(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_an_archive_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        written(path, [record(0)])
    assert path.read_bytes() == before


def test_what_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), writing(tmp_path / "run"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def parted(place: MemoryStore, *plain: bytes) -> PartitionRange:
    """A partition whose parts hold these bytes."""
    writer = StoreWriter(place)
    return PartitionRange(0, 9, tuple(writer.keep(zstandard.compress(data)) for data in plain))


def packed(offset: int, value: bytes = b"") -> bytes:
    body = msgspec.msgpack.encode(StoredRecord(offset, 1, b"", value))
    return len(body).to_bytes(4, "little") + body


LARGE = packed(0, bytes(15 * 1024 * 1024))


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (packed(3)[:-1], "a record of .* ends after"),
        (b"\x01\x00", "ends after"),
        (b"\xff\xff\xff\xff", "a record does not fit"),
        (b"\x01\x00\x00\x00\x07", "part .*: Expected"),
        (LARGE * (MAX_PART_BYTES // len(LARGE) + 1), f"unpacks to more than {MAX_PART_BYTES} bytes"),
    ],
    ids=["cut", "cut head", "huge", "not a record", "bomb"],
)
def test_a_part_that_does_not_hold_is_refused_with_its_name(plain: bytes, words: str) -> None:
    place = MemoryStore()
    with pytest.raises(BadFrame, match=words):
        list(recorded(place, parted(place, plain)))


def foreign(path: Path, *objects: bytes, manifest: Bundle | None = None, behind: bytes = b"") -> Path:
    """An archive that somebody else made."""
    plain = b"".join(len(data).to_bytes(8, "little") + data for data in objects)
    if manifest is not None:
        data = msgspec.json.encode(manifest)
        plain += (len(data) + MANIFEST).to_bytes(8, "little") + data
    path.write_bytes(zstandard.compress(plain + behind))
    return path


@pytest.mark.parametrize(
    "key",
    ["../outside", "/tmp/outside", "model/../../outside", "model/a\\b", "model/.hidden", "blobs//x", "model/evil.py",
     "model/pytorch_model.bin", "model/below/config.json"],
)  # fmt: skip
def test_an_object_whose_key_is_no_name_below_the_folder_is_refused(tmp_path: Path, key: str) -> None:
    with writing(tmp_path / "run") as archive:
        archive.add(key, b"{}")
        archive.finish(Bundle(app="t"))
    with pytest.raises(BadFrame, match=r"not a name below|not a file of a model"):
        unpack(tmp_path / "run", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bundle"}


def test_an_archive_larger_than_allowed_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = foreign(tmp_path / "run", bytes(10_000_000))
    with pytest.raises(BadFrame, match="10000000 bytes, too many"):
        unpack(path, tmp_path / "out", max_bytes=1_000_000)
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file()) == 0


CUTS: list[Callable[[bytes, int], bytes]] = [
    lambda data, at: data[:at],
    lambda data, at: data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :],
    lambda data, at: data[at:],
]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damage_anywhere_is_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    path = written(folder / "run", [record(offset, bytes(offset)) for offset in range(40)])
    whole = path.read_bytes()
    path.write_bytes(data.draw(st.sampled_from(CUTS))(whole, data.draw(st.integers(1, len(whole) - 1))))
    try:
        bundle = unpack(path, folder / "out")
        restore_log(folder / "out", bundle, "t", MemoryStore())
    except BadFrame:
        return
    assert bundle.settings == SETTINGS, "what passes is what was written"


def test_an_archive_holds_what_its_experiences_show(tmp_path: Path) -> None:
    store, data = MemoryStore(), b"\x89PNG of a kind"
    image, gone = image_named(data), image_named(b"gone")
    store.put(BLOBS + image.sha256, data)
    shown = Message(role="user", content="count", images=(image, gone))
    member = make_experience(
        tokens=[1, 2], logprobs=[-1.0], messages=(shown,), id="a.0.0-0-0", group="a.0", episode=0, group_size=1,
        spans=(Span(1, 2, 0),),
    )  # fmt: skip
    records = [record(at, encode(Block((member,)))) for at in range(2)]
    unpack(written(tmp_path / "run", records, store, images=True), tmp_path / "out")
    assert (tmp_path / "out" / "store" / BLOBS / image.sha256).read_bytes() == data
    assert not (tmp_path / "out" / "store" / BLOBS / gone.sha256).exists()


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
    records = [message.record async for message in log.scan(topics.BUFFER)]
    assert (buffer.begin, buffer.end) == (3, records[-1].offset + 1)
    assert list(recorded(place, buffer)) == [
        StoredRecord(one.offset, one.timestamp_ms, one.key, one.value, one.headers) for one in records
    ]


async def test_a_backup_that_was_not_finished_is_refused_and_its_place_is_not_used_again() -> None:
    store, place = MemoryStore(), MemoryStore()
    await copy_all(await filled_log(store), store, StoreWriter(place, silent), {})
    with pytest.raises(ConfigError, match="was not finished"):
        open_backup(place, "t")
    with pytest.raises(ConfigError, match="choose another place"):
        StoreWriter(place, silent)


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
        await require_empty(await filled_log(MemoryStore()), store)
    store.put("keys/u/1", b"secret")
    empty = Log(MemoryBus(), "t")
    await require_empty(empty, store)
    store.put("blobs/a", b"a")
    with pytest.raises(ConfigError, match="it has blobs/a"):
        await require_empty(empty, store)


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
    assert list(placed(iter(records), PartitionRange(10, 17))) == [a, a, a, b, b, b, b]
