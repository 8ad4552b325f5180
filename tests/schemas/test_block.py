"""Blocks: header edits that leave sections alone, members from many frames, and bulk that is checked on first use."""

import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from record_samples import group_block

from schemas import BadFrame, Block, Experience, Message, Score, Span, decode, encode, make_experience
from schemas.bulk import MAX_MESSAGES, MAX_READ_BYTES, MAX_SECTION_BYTES, Bulk, LogprobValues, TokenValues
from schemas.experience import MAX_MEMBERS, encoder
from schemas.journal import Ranges
from schemas.wire.block import split_blocks


def decoded(data: bytes) -> Block:
    block = decode(data)
    assert isinstance(block, Block)
    return block


def parts(frame: bytes) -> tuple[list[Any], bytes]:
    """Header as plain values, and the section lengths and bodies."""
    end = 8 + int.from_bytes(frame[4:8], "little")
    return msgspec.msgpack.decode(frame[8:end]), frame[end:]


def assembled(header: Any, tail: bytes) -> bytes:
    body = msgspec.msgpack.encode(header)
    return b"HR\x03\x00" + struct.pack("<I", len(body)) + body + tail


def tail_of(*raws: bytes) -> bytes:
    bodies = [zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw) for raw in raws]
    return struct.pack(f"<{len(bodies)}I", *map(len, bodies)) + b"".join(bodies)


def raw_sections(tail: bytes, count: int) -> list[bytes]:
    lengths = struct.unpack_from(f"<{count}I", tail)
    position, raws = 4 * count, []
    for length in lengths:
        raws.append(zstandard.ZstdDecompressor().decompress(tail[position : position + length]))
        position += length
    return raws


def with_extra(frame: bytes, name: str = "teacher") -> bytes:
    """The frame as a newer headrace writes it: with a section, and a last field, that this one does not know."""
    (columns, members, ranges), tail = parts(frame)
    raws = raw_sections(tail, 3)
    extra = np.arange(2 * len(members), dtype="<f8").tobytes()
    for index, (member, own) in enumerate(zip(members, ranges, strict=True)):
        member.append({"mood": "new"})
        own.append([2 * index, 2 * index + 2])
    return assembled([[*columns, [name, 8, 2 * len(members)]], members, ranges], tail_of(*raws, extra))


def field(name: str) -> int:
    return Experience.__struct_fields__.index(name)


def test_an_edit_of_the_header_leaves_the_sections_as_they_are() -> None:
    frame = encode(group_block(8))
    block = decoded(frame)
    edited = encode(Block(tuple(replace(member, reward=0.5, advantage=-1.0) for member in block.experiences)))
    assert parts(edited)[1] == parts(frame)[1]
    assert [member.reward for member in decoded(edited).experiences] == [0.5] * 8
    assert encode(decoded(frame)) == frame


def test_header_consumers_never_decompress() -> None:
    frame = encode(group_block(4))
    header, tail = parts(frame)
    broken = assembled(header, tail[:12] + bytes(len(tail) - 12))
    block = decoded(broken)
    assert [member.num_sampled for member in block.experiences] == [5] * 4
    assert encode(block) == broken
    with pytest.raises(BadFrame, match="tokens"):
        block.validate()


def test_members_of_different_frames_share_a_block() -> None:
    one, two, fresh = (group_block(size) for size in (3, 4, 5))
    mixed = (*decoded(encode(one)).experiences[:2], *decoded(encode(two)).experiences[1:], *fresh.experiences[2:])
    expected = (*one.experiences[:2], *two.experiences[1:], *fresh.experiences[2:])
    result = decoded(encode(Block(mixed)))
    result.validate()
    assert result.experiences == expected


def test_an_unknown_section_passes_through_an_edit_and_a_rebuild() -> None:
    frame = with_extra(encode(group_block(3)))
    block = decoded(frame)
    block.validate()
    edited = encode(Block(tuple(replace(member, reward=1.0) for member in block.experiences)))
    assert parts(edited)[1] == parts(frame)[1]
    rebuilt = decoded(encode(Block((block.experiences[2], *group_block(5).experiences[:2]))))
    carried = [member.held().extra_sections() for member in rebuilt.experiences]
    assert carried[0] == {"teacher": (8, np.array([4.0, 5.0]).tobytes())}
    assert carried[1] == {"teacher": (8, b"")}


def test_redacting_text_keeps_unknown_sections_and_new_tokens_drop_them() -> None:
    member = decoded(with_extra(encode(group_block(2)))).experiences[1]
    redacted = member.with_bulk(messages=(Message("user", "[redacted]"),))
    assert redacted.messages == (Message("user", "[redacted]"),) and np.array_equal(redacted.tokens, member.tokens)
    assert "teacher" in decoded(encode(Block((redacted,)))).experiences[0].held().extra_sections()
    retold = member.with_bulk(tokens=[1, 2], logprobs=[-1.0], spans=(Span(1, 2, 3),))
    assert retold.num_tokens == 2 and not retold.held().extra_sections()
    assert decoded(encode(Block((retold,)))) == Block((retold,))


def test_a_block_is_one_group_of_1_to_256() -> None:
    member = group_block(1).experiences[0]
    for members in ((), (member,) * (MAX_MEMBERS + 1), (member, replace(member, group="other.0"))):
        with pytest.raises(ValueError):
            Block(members)
    assert len(decoded(encode(Block((member,) * MAX_MEMBERS))).experiences) == 256


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"reward": math.nan}, "reward"),
        ({"advantage": math.inf}, "advantage"),
        ({"priority": -math.inf}, "priority"),
        ({"reward": "high"}, "reward"),
        ({"scores": (Score("judge", math.nan),)}, "scores"),
        ({"scores": (Score("judge", 1.0, at=11),)}, "scores"),
        ({"spans": (Span(8, 12, 1),)}, "spans"),
        ({"spans": (Span(8, 11, 1), Span(6, 8, 1))}, "spans"),
        ({"spans": (Span(6, 9, 1), Span(8, 10, 1))}, "spans"),
        ({"spans": (Span(6, 6, 1),)}, "spans"),
        ({"spans": (Span(6, 8, 1),)}, "spans"),
        ({"num_tokens": 12}, "num_tokens"),
        ({"meta": {"a": [1]}}, "meta"),
        ({"meta": {"a": math.nan}}, "meta"),
        ({"meta": {"a": "x" * (16 << 20)}}, "less in meta"),
        ({"lane": "fast"}, "lane"),
        ({"id": ""}, "id"),
    ],
)
def test_a_header_that_could_not_be_read_is_never_written(change: dict[str, Any], named: str) -> None:
    for member in (group_block(1).experiences[0], decoded(encode(group_block(1))).experiences[0]):
        wrong = replace(member, **change)
        with pytest.raises(ValueError, match=named):
            encode(Block((wrong,)))
        with pytest.raises(ValueError, match=named):
            wrong.check_header()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", math.nan),
        ("advantage", math.inf),
        ("priority", -math.inf),
        ("scores", [["judge", math.nan]]),
        ("scores", [["judge", 1.0, 11]]),
        ("spans", [[8, 12, 1]]),
        ("spans", [[8, 11, 1], [6, 8, 1]]),
        ("spans", [[6, 11, -2]]),
        ("spans", [[6, 11, 1, math.nan]]),
        ("lane", "fast"),
        ("group_size", 0),
        ("id", ""),
        ("meta", {"a": [1]}),
    ],
)
def test_a_bad_header_field_is_named(name: str, value: object) -> None:
    (columns, members, ranges), tail = parts(encode(group_block(2)))
    members[1][field(name)] = value
    with pytest.raises(BadFrame, match=name):
        decode(assembled([columns, members, ranges], tail))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5])
def test_a_bad_logprob_names_its_experience_and_spares_its_neighbours(bad: float) -> None:
    block = group_block(3)
    victim = block.experiences[1]
    logprobs = victim.logprobs.copy()
    logprobs[2] = bad
    poisoned = replace(victim, bulk=Bulk.made(victim.tokens.copy(), logprobs, victim.messages, victim.id))
    frame = encode(Block((block.experiences[0], poisoned, block.experiences[2])))
    first, second, third = decoded(frame).experiences
    first.check_bulk()
    third.check_bulk()
    with pytest.raises(BadFrame, match=rf"{victim.id}: logprobs.* at 2"):
        second.check_bulk()
    with pytest.raises(BadFrame, match="logprobs"):
        _ = second.logprobs


def test_runs_that_do_not_add_up_or_leave_the_section_are_bad_at_first_use() -> None:
    (columns, members, ranges), tail = parts(encode(group_block(2)))
    for column, runs in ((0, [0, 10]), (0, [0, 500]), (0, [9, 6]), (0, [0]), (1, [0, 4]), (2, [0, 4000]), (2, [1, 9])):
        changed = [list(own) for own in ranges]
        changed[1][column] = runs
        block = decoded(assembled([columns, members, changed], tail))
        block.experiences[0].check_bulk()
        with pytest.raises(BadFrame, match=r"tokens|logprobs|text"):
            block.validate()


def test_overlapping_runs_cannot_multiply_a_small_section() -> None:
    (columns, members, ranges), tail = parts(encode(group_block(2)))
    raws = raw_sections(tail, 3)
    text = encoder.encode([Message("user", "x" * 4_000_000)])
    columns[2] = ["text", 1, len(text)]
    for own in ranges:
        own[2] = [0, len(text)] * 500
    block = decoded(assembled([columns, members, ranges], tail_of(raws[0], raws[1], text)))
    with pytest.raises(BadFrame, match="text"):
        for own in block.experiences:
            sections = own.held().sections
            assert sections is not None
            sections.cut(2, own.held().ranges[2])


@pytest.mark.parametrize(
    "columns",
    [
        [["tokens", 4, 16], ["logprobs", 4, 10]],
        [["logprobs", 4, 10], ["tokens", 4, 16], ["text", 1, 9]],
        [["tokens", 8, 16], ["logprobs", 4, 10], ["text", 1, 9]],
        [["tokens", 4, 1 << 24], ["logprobs", 4, 10], ["text", 1, 9]],
        [["tokens", 4, 16], ["logprobs", 4, 10], ["text", 1, 9], ["text", 1, 9]],
        [[f"s{index}", 1, 0] for index in range(17)],
        [],
    ],
)
def test_a_wrong_section_table_is_a_bad_frame(columns: list[Any]) -> None:
    (_, members, ranges), tail = parts(encode(group_block(2)))
    for matching in (tail, tail_of(*[b"" for _ in columns])):
        with pytest.raises(BadFrame):
            decode(assembled([columns, members, ranges], matching))


def test_text_that_is_not_messages_is_bad_at_first_use() -> None:
    (columns, members, ranges), tail = parts(encode(group_block(1)))
    raws = raw_sections(tail, 3)
    for text in (b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x91\x82\xa4role\xa1a\xa7content\xa2\xff\xfe", b"\x90\x90"):
        columns[2], ranges[0][2] = ["text", 1, len(text)], [0, len(text)]
        block = decoded(assembled([columns, members, ranges], tail_of(raws[0], raws[1], text)))
        with pytest.raises(BadFrame, match="text"):
            block.validate()


@pytest.mark.parametrize(
    ("tokens", "logprobs", "named"),
    [
        ([1, -1], [0.0], "tokens"),
        ([1, 2**32], [0.0], "tokens"),
        ([1, 2.5], [0.0], "tokens"),
        ([1, "1"], [0.0], "tokens"),
        ([1, None], [0.0], "tokens"),
        (np.array([1, -1]), [0.0], "tokens"),
        (np.array([1, 2**40]), [0.0], "tokens"),
        (np.array([1.0, 2.0]), [0.0], "tokens"),
        ([1, 2], [0.0, 0.0], "logprobs"),
        ([1, 2], [], "logprobs"),
        ([1, 2], [math.nan], "logprobs"),
        ([1, 2], [0.1], "logprobs"),
        ([1, 2], [-1e39], "logprobs"),
        ([1, 2], np.array([-1]), "logprobs"),
        ([1], [0.0], "spans"),
    ],
)
def test_bulk_that_does_not_fit_is_refused_where_it_is_made(tokens: Any, logprobs: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"a.0.0-0-0: {named}"):
        make_experience(
            id="a.0.0-0-0", group="a.0", episode=0, group_size=1, spans=(Span(1, 2, 0),), messages=(), tokens=tokens,
            logprobs=logprobs,
        )  # fmt: skip


def test_half_a_character_in_a_message_keeps_no_record_from_the_log() -> None:
    member = group_block(1).experiences[0]
    halved = member.with_bulk(
        messages=(Message("user", "a\ud800b"), Message("tool", "\ud83d\ude00"), Message("user", "c"))
    )
    read = decoded(encode(Block((halved,)))).experiences[0]
    assert [message.content for message in read.messages] == ["a\ufffdb", "\U0001f600", "c"]


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


PAIRS = st.lists(st.tuples(st.integers(-3, 30), st.integers(-3, 8)).map(lambda one: (one[0], one[0] + one[1])))


@given(PAIRS)
def test_ranges_hold_what_was_added_and_as_few_as_there_are(pairs: list[tuple[int, int]]) -> None:
    held, plain = Ranges(), set[int]()
    for first, last in pairs:
        held.add(first, last)
        plain |= set(range(first, last + 1))
    assert [number for number in range(-10, 50) if number in held] == sorted(plain)
    assert len(held) == sum(1 for number in plain if number - 1 not in plain)


def made(tokens: TokenValues, logprobs: LogprobValues, *, prompt: int = 1, episode: int = 0) -> Experience:
    return make_experience(
        id=f"t-1.0-{episode}-0", group="t-1.0", episode=episode, group_size=8,
        spans=(Span(prompt, prompt + len(logprobs), 0),), tokens=tokens, logprobs=logprobs, messages=(),
    )  # fmt: skip


def members_of(block: Block) -> tuple[Experience, ...]:
    """Those of the block that its bytes say."""
    back = decode(bytes(encode(block)))
    assert isinstance(back, Block)
    return back.experiences


def test_arrays_of_an_experience_are_copies_and_read_only() -> None:
    tokens: npt.NDArray[np.uint32] = np.arange(8, dtype=np.uint32)[::-2]  # not in one piece
    logprobs: npt.NDArray[np.float32] = np.full(3, -0.5, np.float32)
    one, two = made(tokens, logprobs), made([1] * 1025, [-0.5] * 1024, episode=1)
    tokens[0], logprobs[0] = 9, -9.0
    assert [*one.tokens] == [7, 5, 3, 1] and [*one.logprobs] == [-0.5] * 3
    members = members_of(Block((one, two)))
    assert [*members[0].tokens] == [7, 5, 3, 1] and members[1] == two
    for member in (one, two, *members):
        assert not member.tokens.flags.writeable and not member.logprobs.flags.writeable


def test_members_whose_sections_are_together_too_large_go_in_several_blocks() -> None:
    size = MAX_SECTION_BYTES // 3
    members = list(group_block(8).experiences)
    for at, one in enumerate(members[1:], start=1):
        one.held().extras = {"more": (1, bytes([at]) * size)}
    blocks = split_blocks(members)
    assert [len(block.experiences) for block in blocks] == [4, 3, 1]
    again = [one for block in blocks for one in decode(encode(block)).experiences]
    assert [one.held().sizes().get("more", 0) for one in again] == [0] + [size] * 7
    assert [len(block.experiences) for block in split_blocks(again)] == [4, 3, 1]
    assert [len(block.experiences) for block in split_blocks(members[:1] * (MAX_MEMBERS + 1))] == [MAX_MEMBERS, 1]


@pytest.mark.parametrize(
    ("members", "counts"),
    [
        (lambda: [made([0] * 1_500_001, [-0.5] * 1_500_000, episode=at) for at in range(3)], [2, 1]),
        (lambda: [made([0] * 1_500_001, [-0.5], prompt=1_500_000, episode=at) for at in range(3)], [3]),
        (
            lambda: [made([0, 0], [-0.5]).with_bulk(messages=(Message("user", text * 6_000_000),)) for text in "abbc"],
            [3, 1],
        ),
        (lambda: [replace(made([0, 0], [-0.5], episode=at), meta={"a": "x" * 6_000_000}) for at in range(3)], [2, 1]),
    ],
)
def test_members_of_different_frames_share_a_block_as_far_as_it_holds_what_differs(
    members: Callable[[], list[Experience]], counts: list[int]
) -> None:
    came = [members_of(Block((member,)))[0] for member in members()]
    blocks = split_blocks(came)
    assert [len(block.experiences) for block in blocks] == counts
    assert [member for block in blocks for member in members_of(block)] == came
