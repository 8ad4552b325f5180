"""Bytes that were released must be read for ever: golden frames of every record, one file each."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from record_samples import CONTROL_KINDS, example_of

from schemas import (
    BatchItem,
    Block,
    Edit,
    Experience,
    Image,
    Issued,
    Join,
    Message,
    Progress,
    Score,
    Span,
    Stretch,
    Task,
    decode,
    encode,
)
from schemas.bulk.sections import Column
from schemas.topics import Topic

GOLDEN = Path(__file__).parent / "golden"
# Before and since spans say how old keys and values are.
BLOCK_FORMATS = ("Block-3-1", "Block-3")


def golden(kind: type[Any]) -> bytes:
    return bytes.fromhex((GOLDEN / f"{kind.__name__}.hex").read_text())


def golden_block(name: str = BLOCK_FORMATS[-1]) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_released_bytes_decode_to_the_docstring_example(kind: type[Any]) -> None:
    assert decode(golden(kind)) == example_of(kind)


def test_a_progress_of_before_it_had_more_fields_than_a_short_map_still_decodes() -> None:
    assert decode(bytes.fromhex((GOLDEN / "Progress-1.hex").read_text())) == example_of(Progress)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_of_every_released_format_decode_to_the_docstring_example(name: str) -> None:
    assert decode(golden_block(name)) == example_of(Block)


def test_a_span_of_before_it_said_so_has_keys_and_values_of_its_own_version() -> None:
    (before,) = decode(golden_block("Block-3-1")).experiences  # type: ignore[union-attr]
    assert [span.kv for span in before.spans] == [-1]
    spans = tuple(replace(span, version=13, kv=12) for span in before.spans)
    assert decode(encode(Block((replace(before, spans=spans),)))).experiences[0].spans == spans  # type: ignore[union-attr]


def test_a_reader_of_before_reads_a_span_that_says_how_old_its_keys_and_values_are() -> None:
    class Before(msgspec.Struct, array_like=True, frozen=True):
        start: int
        stop: int
        version: int
        temperature: float = 1.0
        ratio: bool = True

    now = msgspec.msgpack.encode(Span(6, 11, 13, kv=12))
    assert msgspec.msgpack.decode(now, type=Before) == Before(6, 11, 13)


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_the_docstring_example_encodes_to_the_released_bytes(kind: type[Any]) -> None:
    assert encode(example_of(kind)) == golden(kind)


def test_a_block_of_released_bytes_encodes_to_them_again() -> None:
    # Not from the example: how zstd packs a section may change with its version, what it unpacks may not.
    assert encode(decode(golden_block())) == golden_block()


def test_a_fresh_block_has_the_released_header() -> None:
    length = 8 + int.from_bytes(golden_block()[4:8], "little")
    assert encode(example_of(Block))[:length] == golden_block()[:length]


@pytest.mark.parametrize(
    "kind", [BatchItem, Column, Edit, Experience, Image, Issued, Join, Message, Score, Span, Stretch, Topic]
)
def test_docstring_examples_of_parts_are_real(kind: type[Any]) -> None:
    if kind is Topic:
        assert Topic("buffer", ("Block",), key="group", partitions=1, retention="keep").name == "buffer"
    elif kind is Column:
        assert Column(name="tokens", width=4, items=176).items == 176
    else:
        assert isinstance(example_of(kind), kind)


def test_a_message_with_images_is_read_by_those_who_know_none_and_the_other_way_round() -> None:
    image = Image(sha256="9f" * 32, size=312)
    task = Task(id="count-1", messages=(Message(role="user", content="count", images=(image,)),), answer="2")
    assert decode(encode(task)) == task
    plain = Task(id="count-1", messages=(Message(role="user", content="count"),), answer="2")
    assert b"images" not in encode(plain) and decode(encode(plain)) == plain
    elsewhere = replace(task.messages[0], images=(replace(image, sha256="../x"),))
    with pytest.raises(ValueError, match="sha256"):
        encode(replace(task, messages=(elsewhere,)))
