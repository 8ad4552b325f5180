"""The block codec compared with msgspec (arrays as bytes, in one zstd frame): round trip, size, and the edit of a header.

A round trip goes from an engine's lists and text to bytes, and back to arrays and messages; both give back the same values.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard
from msgspec import structs

from schemas import Block, Message, Score, Span, decode, encode, make_experience
from tests.bench.measuring import turns
from tests.bench.report import Row, compared
from tests.bench.texts import RawAnswer, samples

SHAPES = ((1, 100, 200), (16, 6, 5), (16, 200, 500), (16, 1500, 500), (16, 500, 4000), (64, 2000, 2000))
WHY = "three zstd frames let a stage edit headers alone; they cost short blocks more"
Opened = list[tuple[Any, Any, tuple[Message, ...]]]


class PackedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An experience whose arrays are bytes."""

    header: dict[str, Any]
    tokens: bytes
    logprobs: bytes
    messages: tuple[Message, ...]


def run(rounds: int = 7, budget_s: float = 0.03, largest: int = 64) -> Iterator[Row]:
    """rounds: timed rounds per side. budget_s: CPU seconds per round. largest: maximum answers per group."""
    decoder = msgspec.msgpack.Decoder(list[PackedAnswer])
    for shape in (shape for shape in SHAPES if shape[0] <= largest):
        group = samples(*shape)
        frame, packed = pack_block(group), pack_peer(group)
        check_same(open_block(frame), open_peer(packed, decoder))
        spent = turns(
            {
                "ours": lambda: open_block(pack_block(group)),  # noqa: B023
                "peer": lambda: open_peer(pack_peer(group), decoder),  # noqa: B023
                "edit": lambda: edit_header(frame),  # noqa: B023
            },
            rounds,
            budget_s,
        )
        name = f"{shape[0]} x ({shape[1]} + {shape[2]})"
        ours_us, peer_us, edit_us = (1e6 * spent[each] for each in ("ours", "peer", "edit"))
        yield compared(f"{name}, round trip", "µs", ours_us, peer_us, 1.0, WHY)
        yield compared(f"{name}, size", "bytes", len(frame), len(packed), 1.05, WHY)
        yield compared(f"{name}, header edit", "µs", edit_us, peer_us, 20.0, WHY)


def header(sample: RawAnswer, episode: int, size: int) -> dict[str, Any]:
    start = len(sample.prompt)
    return {
        "id": sample.id, "group": "task-1.0", "episode": episode, "group_size": size,
        "spans": (Span(start, start + len(sample.response), 12),), "scores": (Score("exact", 1.0),),
        "stamps": ("validate@1", "dedupe@1", "filter@1"), "answer": "280",
    }  # fmt: skip


def pack_block(group: Sequence[RawAnswer]) -> bytes:
    members = [
        make_experience(
            tokens=sample.prompt + sample.response,
            logprobs=sample.logprobs,
            messages=sample.messages,
            **header(sample, episode, len(group)),
        )
        for episode, sample in enumerate(group)
    ]
    return encode(Block(tuple(members)))


def block_of(frame: bytes) -> Block:
    block = decode(frame)
    assert isinstance(block, Block)
    return block


def open_block(frame: bytes) -> Opened:
    return [(member.tokens, member.logprobs, member.messages) for member in block_of(frame).experiences]


def edit_header(frame: bytes) -> bytes:
    """Set a reward on every member."""
    return encode(Block(tuple([structs.replace(member, reward=1.0) for member in block_of(frame).experiences])))


def pack_peer(group: Sequence[RawAnswer]) -> bytes:
    members = [
        PackedAnswer(
            header(sample, episode, len(group)),
            np.array(sample.prompt + sample.response, np.uint32).tobytes(),
            np.array(sample.logprobs, np.float32).tobytes(),
            sample.messages,
        )
        for episode, sample in enumerate(group)
    ]
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(members))


def open_peer(data: bytes, decoder: "msgspec.msgpack.Decoder[list[PackedAnswer]]") -> Opened:
    members = decoder.decode(zstandard.ZstdDecompressor().decompress(data))
    return [
        (np.frombuffer(each.tokens, np.uint32), np.frombuffer(each.logprobs, np.float32), each.messages)
        for each in members
    ]


def check_same(ours: Opened, peer: Opened) -> None:
    """Raise AssertionError where the peer gives back other values."""
    for mine, other in zip(ours, peer, strict=True):
        assert np.array_equal(mine[0], other[0]) and np.array_equal(mine[1], other[1]) and mine[2] == other[2]
