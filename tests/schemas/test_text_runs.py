"""Runs of text in a frame: however they repeat or overlap, what they cost is bounded."""

import msgspec
import pytest
from record_samples import group_block
from test_block import assembled, decoded, parts, raw_sections, tail_of

from schemas import BadFrame, encode
from schemas.bulk.bulk import MAX_MESSAGES
from schemas.bulk.sections import MAX_READ_BYTES


def test_a_run_of_messages_taken_again_and_again_costs_no_more_than_an_experience_may_hold() -> None:
    """One run of 16,384 short messages, named 1,024 times by each of 64 members: 1 GB of references."""
    text = msgspec.msgpack.encode([{"role": "", "content": ""}] * MAX_MESSAGES)
    (columns, members, ranges), tail = parts(encode(group_block(64)))
    raws = raw_sections(tail, 3)
    columns[2] = ["text", 1, len(text)]
    for runs in ranges:
        runs[2] = [0, len(text)] * 1024
    frame = assembled([columns, members, ranges], tail_of(raws[0], raws[1], text))
    block = decoded(frame)
    for experience in block.experiences:
        with pytest.raises(BadFrame, match="over 16384 messages"):
            assert experience.messages
    sections = block.experiences[0].held().sections
    assert sections is not None and sections.read_bytes == len(text), "decoded once"


def test_runs_that_overlap_are_decoded_up_to_a_bound() -> None:
    """Lists of one message in which an unknown field holds the next list: each is a run of its own."""
    text, runs_back = b"x" * (MAX_READ_BYTES // 8), []
    for _ in range(20):
        text = b"\x91\x83\xa4role\xa0\xa7content\xa0\xa1x\xc6" + len(text).to_bytes(4, "big") + text
        runs_back.append(len(text))
    (columns, members, ranges), tail = parts(encode(group_block(20)))
    raws = raw_sections(tail, 3)
    columns[2] = ["text", 1, len(text)]
    for runs, back in zip(ranges, runs_back, strict=True):
        runs[2] = [len(text) - back, len(text)]
    block = decoded(assembled([columns, members, ranges], tail_of(raws[0], raws[1], text)))
    read = [experience for experience in block.experiences[:7] if experience.messages]
    assert len(read) == 7
    with pytest.raises(BadFrame, match="are read in all"):
        assert block.experiences[8].messages
