"""Bytes that were released must be read for ever: golden frames of every record, one file each."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from record_samples import CONTROL_KINDS, example_of

from schemas import (
    Block,
    Image,
    Message,
    Task,
    decode,
    encode,
)

GOLDEN = Path(__file__).parent / "golden"


def golden(kind: type[Any]) -> bytes:
    return bytes.fromhex((GOLDEN / f"{kind.__name__}.hex").read_text())


def golden_block(name: str = "Block-3") -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_released_bytes_decode_to_their_record(kind: type[Any]) -> None:
    assert decode(golden(kind)) == example_of(kind)


def test_a_released_block_decodes_to_its_record() -> None:
    assert decode(golden_block()) == example_of(Block)


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_the_record_encodes_to_the_released_bytes(kind: type[Any]) -> None:
    assert encode(example_of(kind)) == golden(kind)


def test_a_block_of_released_bytes_encodes_to_them_again() -> None:
    # Not from the example: how zstd packs a section may change with its version, what it unpacks may not.
    assert encode(decode(golden_block())) == golden_block()


def test_a_fresh_block_has_the_released_header() -> None:
    length = 8 + int.from_bytes(golden_block()[4:8], "little")
    assert encode(example_of(Block))[:length] == golden_block()[:length]


def test_a_message_with_images_is_read_by_those_who_know_none_and_the_other_way_round() -> None:
    image = Image(sha256="9f" * 32, size=312)
    task = Task(id="count-1", messages=(Message(role="user", content="count", images=(image,)),), answer="2")
    assert decode(encode(task)) == task
    plain = Task(id="count-1", messages=(Message(role="user", content="count"),), answer="2")
    assert b"images" not in encode(plain) and decode(encode(plain)) == plain
    elsewhere = replace(task.messages[0], images=(replace(image, sha256="../x"),))
    with pytest.raises(ValueError, match="sha256"):
        encode(replace(task, messages=(elsewhere,)))
