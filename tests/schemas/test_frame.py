"""One encoder, one bounded decoder: what they promise for any record and for any bytes."""

import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from record_samples import CONTROL_KINDS, blocks, controls, example_of, group_block

from schemas import (
    BadFrame,
    Block,
    Feedback,
    Image,
    Message,
    Progress,
    Task,
    Tick,
    UnknownMajor,
    decode,
    encode,
    kafka_headers,
)
from tests.schemas.fuzz_frames import use

FRAMES = [encode(example_of(kind)) for kind in CONTROL_KINDS] + [encode(group_block(3)), encode(group_block(1))]
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(controls())
def test_every_control_record_survives_the_wire(record: Any) -> None:
    assert decode(encode(record)) == record


@quick
@given(blocks())
def test_every_block_survives_the_wire(block: Block) -> None:
    decoded = decode(encode(block))
    assert isinstance(decoded, Block)
    decoded.validate()
    assert decoded == block


@quick
@given(st.binary(max_size=300), st.sampled_from([b"", b"HR\x01\x00", b"HR\x03\x00", b"HR\x01\x80"]))
def test_arbitrary_bytes_raise_only_the_two_errors(data: bytes, start: bytes) -> None:
    with contextlib.suppress(BadFrame, UnknownMajor):
        use(start + data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FRAMES), st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4))
def test_altered_frames_raise_only_the_two_errors(frame: bytes, changes: list[tuple[float, int]]) -> None:
    altered = bytearray(frame)
    for place, value in changes:
        altered[int(place * len(altered))] = value
    with contextlib.suppress(BadFrame, UnknownMajor):
        use(bytes(altered))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: f"{len(frame)}")
def test_truncated_and_extended_frames_are_bad(frame: bytes) -> None:
    for data in (*(frame[:length] for length in range(len(frame))), frame + b"\x00"):
        with pytest.raises(BadFrame):
            use(data)


@pytest.mark.parametrize("flags", [b"\x80", b"\x81", b"\x00"])
def test_a_newer_format_stops_the_reader_whatever_its_flags(flags: bytes) -> None:
    frame = encode(Tick(partition=3, due_ms=5))
    with pytest.raises(UnknownMajor, match="upgrade"):
        decode(frame[:2] + b"\x05" + flags + frame[4:])


@pytest.mark.parametrize("bit", range(7))
def test_an_unknown_flag_of_a_known_format_is_damage_and_stops_nobody(bit: int) -> None:
    for frame in FRAMES:
        with pytest.raises(BadFrame, match="flags"):
            decode(frame[:3] + bytes([frame[3] ^ 1 << bit]) + frame[4:])


@pytest.mark.full
def test_two_hundred_thousand_altered_frames_raise_only_the_two_errors_in_bounded_memory() -> None:
    """In a process of its own, so that its memory is the decoder's."""
    command = [sys.executable, "-m", "tests.schemas.fuzz_frames", "--count", "200000", "--seed", "4"]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads(found.stdout)
    assert report["frames"] == 200_000 and not report["errors"]
    assert report["peak_rss_mb"] < 256
    assert min(report[kind] for kind in ("valid", "BadFrame", "UnknownMajor")) > 1000, "all ways through were taken"


def control_frame(body: bytes) -> bytes:
    return b"HR\x01\x80" + struct.pack("<I", len(body)) + body


def test_fields_of_a_newer_headrace_are_ignored() -> None:
    body = msgspec.msgpack.encode({"kind": "tick", "partition": 3, "due_ms": 5, "mood": ["new", {"deep": 1}]})
    assert decode(control_frame(body)) == Tick(partition=3, due_ms=5)


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa4kind\xa4none",
        msgspec.msgpack.encode({"kind": "tick", "partition": -1, "due_ms": 5}),
        msgspec.msgpack.encode({"kind": "feedback", "ref": "a", "id": "b", "value": float("nan")}),
        msgspec.msgpack.encode({"kind": "feedback", "ref": "", "id": "b"}),
        b"\x82\xa4kind\xa4task\xa8messages\xdd\xff\xff\xff\xff",
        b"\x82\xa4kind\xa4task\xa2id\xa2\xff\xfe",
        b"\x82\xa4kind\xa4tick\xa1x" + b"\x91" * 100_000,
        b"\x82\xa4kind\xa4tick\xa1x" + b"\xc7\x08\xff" + b"\xff" * 8,
    ],
)
def test_hostile_control_bodies_are_bad_frames(body: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(control_frame(body))


def test_our_own_misuse_is_a_value_error() -> None:
    for record in (
        Feedback(ref="a", id="b", value=float("inf")),
        Feedback(ref="a", id="b", value="high"),  # type: ignore[arg-type]
        Task(id="t", messages=(), meta={"a": object()}),  # type: ignore[dict-item]
        Task(id="t", messages=(), meta={"a": "\ud800"}),
        Tick(partition=1, due_ms=2**70),
        Task(id="t", messages=(), meta={"a": "x" * (16 << 20)}),
    ):
        with pytest.raises(ValueError):
            encode(record)


def test_measurements_may_be_infinite() -> None:
    record = Progress(role="train", instance="train-0", gauges={"max_w": float("inf")})
    assert decode(encode(record)) == record


def test_headers_answer_for_a_record_without_its_value() -> None:
    headers = dict(kafka_headers(group_block(2)))
    assert headers == {
        "schema": b"1",
        "kind": b"block",
        "id": b"add-3745.2.0-0-0",
        "group": b"add-3745.2",
        "min_version": b"12",
        "max_version": b"12",
    }
    hostile = Task(id="t", messages=(), meta={"traceparent": "x" * 100_000, "group": "b.0"})
    assert dict(kafka_headers(hostile)) == {"schema": b"1", "kind": b"task", "id": b"t"}, "the user's meta is no header"
    said = Feedback(ref="hr-add-3745.2.0-7-0", id="ticket-81", value=0.8, source="csat")
    assert dict(kafka_headers(said))["group"] == b"add-3745.2"
    assert "group" not in dict(kafka_headers(msgspec.structs.replace(said, ref="order 81")))
    for kind in CONTROL_KINDS:
        headers = dict(kafka_headers(example_of(kind)))
        assert headers["schema"] == b"1" and headers["kind"].decode().isidentifier()


def test_a_decompression_bomb_is_refused_by_its_declared_size() -> None:
    bomb = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(bytes(1 << 30))
    frame = encode(group_block(1))
    header_length = int.from_bytes(frame[4:8], "little")
    lengths = struct.unpack_from("<3I", frame, 8 + header_length)
    table = struct.pack("<3I", len(bomb), *lengths[1:])
    start = 8 + header_length + 12
    block = decode(frame[: 8 + header_length] + table + bomb + frame[start + lengths[0] :])
    assert isinstance(block, Block)
    with pytest.raises(BadFrame, match="1073741824"):
        block.validate()


GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_released_bytes_decode_to_their_record_which_encodes_to_them(kind: type[Any]) -> None:
    assert decode(golden(kind.__name__)) == example_of(kind)
    assert encode(example_of(kind)) == golden(kind.__name__)


def test_a_released_block_decodes_to_its_record_and_encodes_to_its_bytes_again() -> None:
    released = golden("Block-3")
    assert decode(released) == example_of(Block)
    # Not from the example: how zstd packs a section may change with its version, what it unpacks may not.
    assert encode(decode(released)) == released
    length = 8 + int.from_bytes(released[4:8], "little")
    assert encode(example_of(Block))[:length] == released[:length]


def test_a_message_with_images_is_read_by_those_who_know_none_and_the_other_way_round() -> None:
    image = Image(sha256="9f" * 32, size=312)
    task = Task(id="count-1", messages=(Message(role="user", content="count", images=(image,)),), answer="2")
    assert decode(encode(task)) == task
    plain = Task(id="count-1", messages=(Message(role="user", content="count"),), answer="2")
    assert b"images" not in encode(plain) and decode(encode(plain)) == plain
    elsewhere = replace(task.messages[0], images=(replace(image, sha256="../x"),))
    with pytest.raises(ValueError, match="sha256"):
        encode(replace(task, messages=(elsewhere,)))
