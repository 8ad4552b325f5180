"""The rows of a lane: columns hold the numbers of the candidates as they come and go, in memory bounded by what is held."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.buffer.pool import FIRST_ROWS, Candidate, LaneRows, Pool, lowest

CANDIDATES = st.builds(
    Candidate,
    group=st.just("l"),
    lane=st.just("live"),
    offset=st.integers(0, 2**40),
    num_experiences=st.integers(1, 4),
    num_tokens=st.integers(0, 5000),
    priority=st.floats(-0.5, 2.0),
    uses=st.integers(0, 3),
    tenant=st.sampled_from(["", "a", "b"]),
    subject=st.sampled_from(["", "u", "v", "w"]),
    has_ratio=st.booleans(),
    is_pair=st.booleans(),
    join=st.sampled_from(["", "", "j0", "j1", "j2"]),
)
LISTS = st.lists(CANDIDATES, max_size=60, unique_by=lambda one: one.offset)


@given(st.lists(st.integers(0, 9) | st.floats(0, 9), max_size=50), st.integers(1, 60))
def test_the_lowest_are_the_beginning_of_the_whole_order(ranks, num) -> None:
    rank_N = np.array(ranks, float)
    whole = np.argsort(rank_N, kind="stable")
    found = lowest(rank_N, num)
    assert len(found) >= min(num, len(ranks))
    assert np.array_equal(found, whole[: len(found)])


@given(LISTS, st.lists(st.tuples(st.integers(0, 59), st.booleans()), max_size=200))
def test_the_rows_of_a_lane_are_those_of_its_candidates_as_they_come_and_go(candidates, turns) -> None:
    rows, expected = LaneRows(), dict[int, Candidate]()
    for at, comes in turns:
        if at >= len(candidates):
            continue
        one = candidates[at]
        if comes:
            more = msgspec.structs.replace(one, uses=expected[one.offset].uses + 1 if one.offset in expected else 0)
            rows.put(more)
            expected[one.offset] = more
        elif one.offset in expected:
            assert rows.pop(one.offset) == expected.pop(one.offset)
        assert (one.offset in rows) == (one.offset in expected)
    assert list(rows) == list(rows.pool()) == list(expected.values()) and len(rows) == len(expected)
    assert_same_numbers(rows.pool(), list(expected.values()))


def test_the_memory_of_a_lane_is_that_of_what_it_holds_whatever_passed_through_it() -> None:
    rows = LaneRows()
    for at in range(10_000):
        rows.put(Candidate(group="g", lane="live", offset=at, num_experiences=1, tenant="t", subject=f"u{at}"))
        if at >= 100:
            rows.pop(at - 100)
    pool = rows.pool()
    assert len(pool) == 100 and len(pool.held) <= 200 + 2 * FIRST_ROWS
    assert len(pool.codes) <= len(pool.held) + 1, "users who have gone are forgotten with what they said"


def test_a_pool_is_as_it_was_when_it_was_asked_for() -> None:
    rows = LaneRows()
    for at in range(3):
        rows.put(Candidate(group=f"g{at}", lane="live", offset=at, num_experiences=1))
    before = rows.pool()
    rows.pop(1)
    rows.put(Candidate(group="new", lane="live", offset=9, num_experiences=1))
    assert [one.group for one in before] == ["g0", "g1", "g2"]
    assert [one.group for one in rows.pool()] == ["g0", "g2", "new"]


def assert_same_numbers(pool: Pool, expected: list[Candidate]) -> None:
    """The columns hold what the candidates say, and codes tell tenants and users apart."""
    for name in ("offset", "priority", "num_experiences", "num_tokens", "uses", "has_ratio", "is_pair"):
        assert pool.column(name).tolist() == [getattr(one, name) for one in expected]
    assert pool.column("tenant").tolist() == [pool.codes[one.tenant,] for one in expected]
    assert pool.column("user").tolist() == [pool.codes[one.tenant, one.subject] for one in expected]
    assert pool.column("is_joined").tolist() == [bool(one.join) for one in expected]
