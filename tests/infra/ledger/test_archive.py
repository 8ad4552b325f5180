"""A run as one file: whole or not there, and read without trusting it."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.ledger.archive import ABOUT, END, Archive, ArchiveHead, restore_log, unpack, writing
from infra.log.blobs import deposit
from infra.log.bus import Record
from infra.store.images import image_named
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Block, Message, Span, encode, make_experience, topics
from schemas.errors import BadFrame, ConfigError

HELD = ArchiveHead(settings={"app": "t"}, topics=("buffer",))


def record(offset: int, value: bytes = b"HR") -> Record:
    return Record("t.buffer", 0, offset, 10**12 + offset, b"key", value)


async def stream(records: list[Record]) -> AsyncIterator[Record]:
    for one in records:
        yield one


def written(path: Path, records: list[Record], store: MemoryStore | None = None) -> Path:
    with writing(path) as archive:
        archive.add(ABOUT, msgspec.json.encode(HELD))
        asyncio.run(archive.add_records(topics.BUFFER, stream(records), store or MemoryStore()))
        archive.close()
    return path


def test_records_come_back_with_their_offsets_and_times(tmp_path: Path) -> None:
    records = [record(offset, bytes([offset])) for offset in range(7, 30)]
    about = unpack(written(tmp_path / "run", records), tmp_path / "out")
    log = restore_log(tmp_path / "out", about, "t", MemoryStore())

    async def main() -> list[Record]:
        reader = await log.assigned(topics.BUFFER, "beginning")
        return await reader.get_many(timeout_s=0.1)

    assert about == HELD and asyncio.run(main()) == records


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
        archive.add(ABOUT, msgspec.json.encode(HELD))
        archive.add_model(model)
        archive.close()
    unpack(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_an_archive_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        written(path, [record(0)])
    assert path.read_bytes() == before


def test_what_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), writing(tmp_path / "run") as archive:
        archive.add(ABOUT, b"{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_missing_is_named(tmp_path: Path) -> None:
    about = unpack(written(tmp_path / "run", [record(3), record(5)]), tmp_path / "out")
    with pytest.raises(BadFrame, match="got offset 5, expected 4"):
        restore_log(tmp_path / "out", about, "t", MemoryStore())


def test_a_record_that_is_cut_is_named(tmp_path: Path) -> None:
    about = unpack(written(tmp_path / "run", [record(3), record(4)]), tmp_path / "out")
    part = tmp_path / "out" / "topics" / "buffer" / "000000"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(BadFrame, match=r"topics/buffer: 000000: a record of .* does not fit"):
        restore_log(tmp_path / "out", about, "t", MemoryStore())


def foreign(path: Path, *members: tarfile.TarInfo, data: bytes = b"") -> Path:
    """An archive somebody else made."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(zstandard.compress(plain.getvalue()))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    one.type, one.linkname = kind, target
    return one


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (member("../outside"), "not a name below"),
        (member("model/../../outside"), "not a name below"),
        (member("/tmp/outside"), "not a name below"),
        (member("model/a\\b"), "not a name below"),
        (member("model/.hidden"), "not a name below"),
        (member("store//x"), "not a name below"),
        (member("model/link", tarfile.SYMTYPE, "/etc/passwd"), "plain files only"),
        (member("model/hard", tarfile.LNKTYPE, "model/config.json"), "plain files only"),
        (member("model/device", tarfile.CHRTYPE), "plain files only"),
        (member("model/pipe", tarfile.FIFOTYPE), "plain files only"),
        (member("model/sparse", tarfile.GNUTYPE_SPARSE), "plain files only"),
        (member("plugins/run.py"), "expected headrace.json"),
        (member("model"), "expected headrace.json"),
        (member("model/" + "n" * 2_000_000), "header is longer"),
        (member("model/evil.py"), "not a file of a model"),
        (member("model/pytorch_model.bin"), "not a file of a model"),
        (member("model/below/config.json"), "not a file of a model"),
    ],
    ids=lambda value: value.name[:20] if isinstance(value, tarfile.TarInfo) else "",
)
def test_a_member_that_is_no_plain_file_below_the_folder_is_refused(
    tmp_path: Path, odd: tarfile.TarInfo, words: str
) -> None:
    path = foreign(tmp_path / "run", member(ABOUT), odd)
    with pytest.raises(BadFrame, match=words) as caught:
        unpack(path, tmp_path / "out")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert {one.relative_to(tmp_path).as_posix() for one in tmp_path.rglob("*")} <= {"run", "out", f"out/{ABOUT}"}


def test_an_archive_larger_than_allowed_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = foreign(tmp_path / "run", member("model/config.json"), data=bytes(10_000_000))
    with pytest.raises(BadFrame, match="10000000 bytes, too many"):
        unpack(path, tmp_path / "out", max_bytes=1_000_000)
    assert not (tmp_path / "out").exists()


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFrame, match="File exists"):
        unpack(foreign(tmp_path / "run", member(ABOUT), member(ABOUT)), tmp_path / "out")


def test_an_archive_of_a_later_format_says_so(tmp_path: Path) -> None:
    data = msgspec.json.encode(msgspec.structs.replace(HELD, format=2))
    with pytest.raises(BadFrame, match="got format 2, expected 1"):
        unpack(foreign(tmp_path / "run", member(ABOUT), member(END), data=data), tmp_path / "out")


CUTS: list[Callable[[bytes, int], bytes]] = [
    lambda data, at: data[:at],
    lambda data, at: data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :],
    lambda data, at: data[at:],
]


def test_an_archive_cut_between_two_files_is_not_taken_for_a_smaller_one(tmp_path: Path) -> None:
    with pytest.raises(BadFrame, match="cut short"):
        unpack(foreign(tmp_path / "run", member(ABOUT), data=msgspec.json.encode(HELD)), tmp_path / "out")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damage_anywhere_is_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    path = written(folder / "run", [record(offset, bytes(offset)) for offset in range(40)])
    whole = path.read_bytes()
    damage = data.draw(st.sampled_from(CUTS))(whole, data.draw(st.integers(1, len(whole) - 1)))
    path.write_bytes(damage)
    try:
        about = unpack(path, folder / "out")
        restore_log(folder / "out", about, "t", MemoryStore())
    except BadFrame:
        return
    assert about == HELD, "what passes is what was written"


def test_archive_of_nothing_is_still_one(tmp_path: Path) -> None:
    target = io.BytesIO()
    archive = Archive(target)
    archive.add(ABOUT, msgspec.json.encode(HELD))
    assert archive.close() == len(target.getvalue()) > 0


def test_an_archive_holds_what_its_experiences_show(tmp_path: Path) -> None:
    store, data = MemoryStore(), b"\x89PNG of a kind"
    image, gone = image_named(data), image_named(b"gone")
    store.put(BLOBS + image.sha256, data)
    shown = Message(role="user", content="count", images=(image, gone))
    member = make_experience(
        tokens=[1, 2], logprobs=[-1.0], messages=(shown,), id="a.0.0-0-0", group="a.0", episode=0, group_size=1,
        spans=(Span(1, 2, 0),),
    )  # fmt: skip
    records = stream([record(0, encode(Block((member,)))), record(1, encode(Block((member,))))])
    with writing(tmp_path / "run") as archive:
        archive.add(ABOUT, msgspec.json.encode(HELD))
        asyncio.run(archive.add_records(topics.BUFFER, records, store, images=True))
        archive.close()
    unpack(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "store" / BLOBS / image.sha256).read_bytes() == data
    assert not (tmp_path / "out" / "store" / BLOBS / gone.sha256).exists()
