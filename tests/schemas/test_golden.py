"""Bytes that were released must be read for ever: golden frames of every record, one file each."""

from pathlib import Path
from typing import Any

import pytest
from record_samples import CONTROL_KINDS, example_of

from schemas import BatchItem, Block, Experience, Issued, Message, Score, Span, decode, encode
from schemas.sections import Column
from schemas.topics import Topic

GOLDEN = Path(__file__).parent / "golden"


def golden(kind: type[Any]) -> bytes:
    return bytes.fromhex((GOLDEN / f"{kind.__name__}.hex").read_text())


@pytest.mark.parametrize("kind", [*CONTROL_KINDS, Block], ids=lambda kind: kind.__name__)
def test_released_bytes_decode_to_the_docstring_example(kind: type[Any]) -> None:
    assert decode(golden(kind)) == example_of(kind)


@pytest.mark.parametrize("kind", CONTROL_KINDS, ids=lambda kind: kind.__name__)
def test_the_docstring_example_encodes_to_the_released_bytes(kind: type[Any]) -> None:
    assert encode(example_of(kind)) == golden(kind)


def test_a_block_of_released_bytes_encodes_to_them_again() -> None:
    # Not from the example: how zstd packs a section may change with its version, what it unpacks may not.
    assert encode(decode(golden(Block))) == golden(Block)


def test_a_fresh_block_has_the_released_header() -> None:
    length = 8 + int.from_bytes(golden(Block)[4:8], "little")
    assert encode(example_of(Block))[:length] == golden(Block)[:length]


@pytest.mark.parametrize("kind", [BatchItem, Column, Experience, Issued, Message, Score, Span, Topic])
def test_docstring_examples_of_parts_are_real(kind: type[Any]) -> None:
    if kind is Topic:
        assert Topic("buffer", ("Block",), key="group", partitions=1, retention="keep").name == "buffer"
    elif kind is Column:
        assert Column(name="tokens", width=4, items=176).items == 176
    else:
        assert isinstance(example_of(kind), kind)
