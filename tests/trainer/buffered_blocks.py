"""Blocks of `buffer` as tests of the trainer write them."""

from collections.abc import Sequence

from infra.log.bus import Record
from infra.log.log import LogMessage
from schemas import Block, Lane, Span, encode, ids, make_experience


def block(
    group: str = "a.0",
    *,
    num_members: int = 2,
    lane: Lane = "usual",
    sequence: int = -1,
    version: int = 3,
    ratio: bool = True,
    **header: object,
) -> Block:
    """A group of answers of two tokens each."""
    return Block(
        tuple(
            make_experience(
                tokens=[1, 2, 3, episode], logprobs=[-0.5, -0.25], messages=(), spans=(Span(2, 4, version, 1.0, ratio),),
                id=ids.experience_id(group, 0, episode), group=group, episode=episode, group_size=num_members, lane=lane,
                sequence=sequence, **header,
            )
            for episode in range(num_members)
        )
    )  # fmt: skip


def message(block: Block, offset: int) -> LogMessage:
    """The block as it was read at `offset`."""
    return LogMessage(Record("t.buffer", 0, offset, 0, b"", encode(block)), value=block)


def mixed(lanes: Sequence[Lane]) -> Block:
    """A block whose members say different lanes."""
    return Block(tuple(block(lane=lane, num_members=len(lanes)).experiences[at] for at, lane in enumerate(lanes)))
