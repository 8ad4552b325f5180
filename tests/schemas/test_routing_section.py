"""The experts of an experience's tokens on the wire: what comes back, what is refused, what it costs."""

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_samples import experiences, group_block

from schemas import BadFrame, Block, Message, Span, decode, encode
from schemas.bulk import MAX_SECTION_BYTES
from schemas.experience import MAX_MEMBERS
from schemas.wire import routing as wire
from schemas.wire.block import split_blocks
from schemas.wire.routing import PROMPT_SECTION, SECTION, with_routing
from tests.schemas.test_golden import golden_block


def routed(seed: int, num: int, *, layers: int = 2, k: int = 2, experts: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, experts, (num, layers, k))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(experiences("a.0", (1, 2, 3)), st.data())
def test_every_routing_survives_the_wire(one, data) -> None:
    layers, k, highest = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([3, 255, 256, 32_767]))
    )
    num = data.draw(st.integers(1, one.num_tokens))
    known = np.array(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    expected = np.where(known[:, None, None], routed(num, num, layers=layers, k=k, experts=highest + 1), -1)
    if known.any():
        expected[int(known.argmax()), 0, 0] = highest
    made = with_routing(one, expected)
    for found in (made, *decode(encode(Block((made,)))).experiences):
        got = wire.routing(found)
        if not known.any():
            assert got is None
            continue
        assert got.dtype == np.int16 and got.shape == (one.num_tokens, layers, k)
        assert np.array_equal(got[:num], expected) and (got[num:] == wire.ABSENT).all()
    assert np.array_equal(made.tokens, one.tokens)


def test_released_bytes_of_a_routed_block_are_read_and_written_again() -> None:
    frame = golden_block("Block-routing")
    block = decode(frame)
    assert encode(block) == frame
    for seed, one in enumerate(block.experiences):
        assert np.array_equal(wire.routing(one)[:10], expected_of_golden(seed))
        assert (wire.routing(one)[10] == wire.ABSENT).all()


def expected_of_golden(seed: int) -> np.ndarray:
    """Three layers, two experts of 300: members share the routing of their prompt of six tokens."""
    rows = np.arange(10 * 3 * 2).reshape(10, 3, 2) % 300 + 200
    rows[6:] += seed
    return rows


def test_the_routing_goes_where_the_tokens_change_and_stays_where_the_text_does() -> None:
    one = with_routing(group_block(1).experiences[0], routed(0, 10))
    assert wire.routing(one.with_bulk(messages=(Message("user", "[redacted]"),))) is not None
    assert wire.routing(one.with_bulk(tokens=[1, 2], logprobs=[-1.0], spans=(Span(1, 2, 3),))) is None


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((12, 2, 2), int),
        np.zeros((0, 2, 2), int),
        np.zeros((5, 2, 0), int),
        np.zeros((5, 2), int),
        np.zeros((5, 2, 2)),
        np.full((5, 2, 2), 32_768),
        np.array([[[0, 1], [-1, -1]]]),
    ],
)
def test_a_routing_that_does_not_fit_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="routing: got"):
        with_routing(group_block(1).experiences[0], bad)


@pytest.mark.parametrize("name", [PROMPT_SECTION, SECTION])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: raw[:3],
        lambda raw: raw[:3] + b"\3" + raw[4:],
        lambda raw: b"\0\0" + raw[2:],
        lambda raw: b"\xff\xff\xff\x01",
        lambda raw: b"\xff\xff\xff\x01" + raw[4:],
        lambda raw: b"\1\0\4\1" + raw[4:],  # as many experts, otherwise shaped than the other section says
        lambda raw: raw[:3] + b"\2" + raw[4:5] + b"\xff" * 2 * (len(raw) - 5),
    ],
)
def test_a_damaged_routing_is_a_bad_frame_that_names_the_experience(name, spoil) -> None:
    one = with_routing(group_block(1).experiences[0], routed(0, 10))
    sections = one.held().extra_sections()
    one.held().extras = {**sections, name: (1, spoil(sections[name][1]))}
    with pytest.raises(BadFrame, match=r"experience add-3745\.2\.0-0-0: routing"):
        wire.routing(decode(encode(Block((one,)))).experiences[0])


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(st.binary(max_size=30), st.binary(max_size=30)),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
)
def test_any_bytes_are_a_routing_or_a_bad_frame(raws, head, headed) -> None:
    one = group_block(1).experiences[0].with_bulk()
    start = struct.pack("<HBB", *head) if headed else b""
    one.held().extras = {name: (1, start + raw) for name, raw in zip((PROMPT_SECTION, SECTION), raws, strict=True)}
    try:
        found = wire.routing(one)
    except BadFrame:
        return
    assert found is None or (found.shape[0] == one.num_tokens and found.min() >= -1)


def test_members_whose_sections_are_together_too_large_go_in_several_blocks() -> None:
    size = MAX_SECTION_BYTES // 3
    members = list(group_block(8).experiences)
    for at, one in enumerate(members[1:], start=1):
        one.held().extras = {"routing": (1, bytes([at]) * size)}
    blocks = split_blocks(members)
    assert [len(block.experiences) for block in blocks] == [4, 3, 1]
    again = [one for block in blocks for one in decode(encode(block)).experiences]
    assert [one.held().extra_sizes().get("routing", 0) for one in again] == [0] + [size] * 7
    assert [len(block.experiences) for block in split_blocks(again)] == [4, 3, 1]
    assert [len(block.experiences) for block in split_blocks(members[:1] * (MAX_MEMBERS + 1))] == [MAX_MEMBERS, 1]
