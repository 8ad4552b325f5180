"""The draw: issue order, the staleness bound, and what is worth waiting for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.buffer.draw import draw_least_used, shuffled
from trainer.buffer.pool import Candidate, Draw, draw_in_order, missing, pool_of, unfit, worth_waiting_for


def group(sequence: int, version: int = 0, **more: int) -> Candidate:
    return Candidate(
        group=f"t.{sequence}", lane="usual", offset=more.pop("offset", sequence), num_experiences=4, sequence=sequence,
        min_version=version, max_version=more.pop("max_version", version), **more,
    )  # fmt: skip


def test_groups_are_drawn_in_issue_order_whatever_the_order_of_arrival() -> None:
    arrived = [group(3, offset=0), group(1, offset=1), group(2, offset=2)]
    draw = draw_in_order(arrived, num_groups=2, version=0, max_staleness=2)
    assert [one.sequence for one in draw.taken] == [1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 10)), unique_by=lambda pair: pair[0]),
    st.integers(0, 12), st.integers(0, 3), st.integers(1, 8),
)  # fmt: skip
def test_no_group_wholly_older_than_the_bound_is_ever_drawn(pairs, version, bound, wanted) -> None:
    draw = draw_in_order(
        [group(sequence, at) for sequence, at in pairs], num_groups=wanted, version=version, max_staleness=bound
    )
    assert all(version - one.min_version <= bound for one in draw.taken)
    assert {one.sequence for one, _ in draw.dropped} == {s for s, at in pairs if version - at > bound}
    assert {reason for _, reason in draw.dropped} <= {"stale"}
    assert draw.wait == (len(pairs) - len(draw.dropped) < wanted)


def test_too_few_groups_wait() -> None:
    assert draw_in_order([group(0)], num_groups=2, version=0, max_staleness=2).wait


def test_a_missing_group_about_to_pass_the_bound_is_waited_for() -> None:
    arrived = [group(0, 5), group(2, 5), group(3, 5)]
    absent = missing([0, 2, 3], closed=(), floor=0)
    assert absent == [1]
    hold = worth_waiting_for(absent, arrived, version=7, max_staleness=2, given_up={})
    assert hold == 1
    assert draw_in_order(arrived, num_groups=2, version=7, max_staleness=2, hold_for=hold).wait
    assert draw_in_order(arrived[:1], num_groups=1, version=7, max_staleness=2, hold_for=hold).taken == (arrived[0],)


def test_a_missing_group_with_time_left_holds_nobody_up() -> None:
    assert worth_waiting_for([1], [group(2, 5)], version=6, max_staleness=2, given_up={}) is None


def test_a_group_waited_for_long_enough_is_given_up() -> None:
    assert worth_waiting_for([1], [group(2, 5)], version=7, max_staleness=2, given_up={1: 0.0}) is None


def test_closed_groups_are_not_missing() -> None:
    assert missing([0, 3], closed=(1,), floor=0) == [2]


def test_spread_draw_takes_the_least_used_first_and_depends_on_the_seed_alone() -> None:
    lane = [Candidate(group=f"e.{at}", lane="expert", offset=at, num_experiences=4, uses=at % 2) for at in range(10)]
    draw = draw_least_used(pool_of(lane), num_experiences=12, max_uses=9, seed=1)
    assert len(draw.taken) == 3 and all(one.uses == 0 for one in draw.taken)
    assert draw == draw_least_used(pool_of(reversed(lane)), num_experiences=12, max_uses=9, seed=1)
    assert draw != draw_least_used(pool_of(lane), num_experiences=12, max_uses=9, seed=2)


def test_spread_draw_respects_max_uses() -> None:
    lane = [Candidate(group="e.0", lane="expert", offset=0, num_experiences=4, uses=2)]
    assert draw_least_used(pool_of(lane), num_experiences=4, max_uses=2, seed=0).wait


def test_a_group_of_which_nothing_else_is_known_is_unused_nobodys_and_fit() -> None:
    assert Candidate(group="g", lane="usual", offset=3, num_experiences=4) == Candidate(
        group="g", lane="usual", offset=3, num_experiences=4, sequence=-1, revision=0, min_version=-1, priority=1.0,
        uses=0, has_ratio=True, digest=b"", is_pair=False, weight=1.0, key_id="", retrained=0, num_tokens=0, tenant="",
        subject="", has_signal=True, max_version=-1,
    )  # fmt: skip
    assert Draw() == Draw(taken=(), dropped=(), wait=False, held_back=0)


def test_what_a_lanes_loss_cannot_learn_from_is_named_with_one_reason() -> None:
    plain, bare, pair, bare_pair = (
        Candidate(group="g", lane="human", offset=at, num_experiences=2, has_ratio=not at % 2, is_pair=at > 1)
        for at in range(4)
    )
    every = (plain, bare, pair, bare_pair)
    assert unfit(every, ratio=False, pairs=False) == []
    assert unfit(every, ratio=True, pairs=False) == [(bare, "no ratio"), (bare_pair, "no ratio")]
    assert unfit(every, ratio=False, pairs=True) == [(plain, "not a pair"), (bare, "not a pair")]
    assert unfit(every, ratio=True, pairs=True) == [
        (plain, "not a pair"), (bare, "not a pair"), (bare_pair, "no ratio")
    ]  # fmt: skip


def test_groups_nobody_issued_are_drawn_first_in_the_order_of_their_arrival() -> None:
    arrived = [group(4, offset=0), group(-1, offset=7), group(-1, offset=2)]
    draw = draw_in_order(arrived, num_groups=3, version=0, max_staleness=2)
    assert [one.offset for one in draw.taken] == [2, 7, 0]


def test_nothing_is_drawn_past_a_group_worth_waiting_for_and_up_to_it_everything() -> None:
    arrived = [group(0), group(1), group(2)]
    for wanted, waits in ((1, False), (2, False), (3, True)):
        assert draw_in_order(arrived, num_groups=wanted, version=0, max_staleness=2, hold_for=1).wait == waits


def test_where_nothing_arrived_nothing_is_missing() -> None:
    assert missing([], closed=(), floor=0) == []
    assert missing([2], closed=(), floor=1) == [1], "counted from the floor up to the newest, both told apart"


def test_the_next_in_issue_order_stands_for_a_missing_group_and_nobody_else() -> None:
    bound = {"version": 7, "max_staleness": 2, "given_up": {}}
    assert worth_waiting_for([1], [group(3, 7), group(2, 5), group(0, 7)], **bound) == 1
    assert worth_waiting_for([1], [group(3, 5), group(2, 7), group(0, 5)], **bound) is None
    assert worth_waiting_for([4], [group(3, 5)], **bound) is None, "nothing was issued after it"
    assert worth_waiting_for([1, 4], [group(2, 7), group(5, 5)], **bound) == 4
    assert worth_waiting_for([4], [group(5, 4)], **bound) is None, "its first tokens are too old already"
    assert worth_waiting_for([1, 3], [group(2, 5), group(4, 5)], version=7, max_staleness=2, given_up={1: 0.0}) == 3


def test_the_seed_gives_the_same_order_in_every_release() -> None:
    lane = [Candidate(group=f"e.{at}", lane="expert", offset=at, num_experiences=1) for at in range(10)]
    draw = draw_least_used(pool_of(lane), num_experiences=10, max_uses=1, seed=7)
    assert [one.offset for one in draw.taken] == [8, 1, 0, 9, 4, 7, 2, 5, 6, 3]
    assert draw.wait is False and draw.held_back == 0


def test_where_a_group_comes_in_an_even_draw_does_not_hang_on_the_others_or_on_its_neighbours() -> None:
    place_N = shuffled(3, np.arange(4000, dtype=np.uint64))
    assert place_N[:2].tolist() == [15976294287046788795, 13971077478960230293], "a replay draws what the run drew"
    assert np.array_equal(shuffled(3, np.arange(1000, 1010, dtype=np.uint64)), place_N[1000:1010])
    assert len(set(place_N.tolist())) == 4000 and not set(place_N.tolist()) & set(
        shuffled(4, np.arange(4000, dtype=np.uint64)).tolist()
    )
    unit_N = place_N / 2.0**64
    assert abs(unit_N.mean() - 0.5) < 0.02 and abs(np.corrcoef(unit_N[1:], unit_N[:-1])[0, 1]) < 0.06  # 4 deviations


def test_a_group_is_drawn_as_long_as_one_of_its_tokens_is_young_enough_and_a_pair_only_as_a_whole() -> None:
    long = group(0, 1, max_version=7)
    pair = group(1, 1, max_version=7, is_pair=True)
    draw = draw_in_order([long, pair], num_groups=1, version=9, max_staleness=2)
    assert draw.taken == (long,) and draw.dropped == ((pair, "stale"),)
    assert draw_in_order([long], num_groups=1, version=10, max_staleness=2).dropped == ((long, "stale"),)
