"""How much of a batch one tenant or user may make up: never more where others could, and nobody is starved."""

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.buffer.draw import (
    NO_LIMITS,
    ShareLimits,
    draw_by_priority,
    draw_least_used,
    find_room,
    is_open,
)
from trainer.buffer.draw import fill as fill_pool
from trainer.buffer.pool import Candidate, pool_of


def one(at: int, tenant: str = "", subject: str = "", size: int = 1, priority: float = 1.0) -> Candidate:
    return Candidate(
        group=f"l.{at}", lane="live", offset=at, num_experiences=size, tenant=tenant, subject=subject, priority=priority
    )


def pool(**counts: int) -> list[Candidate]:
    names = [name for name, count in counts.items() for _ in range(count)]
    return [one(at, tenant=name) for at, name in enumerate(names)]


class Filled(NamedTuple):
    taken: tuple[int, ...]
    held_back: int = 0


def fill(candidates: list[Candidate], wanted: int, limits: ShareLimits = NO_LIMITS) -> Filled:
    held = pool_of(candidates)
    taken, held_back = fill_pool(held, find_room(held, wanted, limits))
    return Filled(tuple(taken), held_back)


def drawn(candidates: list[Candidate], wanted: int, limits: ShareLimits) -> Counter[str]:
    return Counter(candidates[place].tenant for place in fill(candidates, wanted, limits).taken)


def test_without_limits_groups_are_taken_in_order() -> None:
    assert fill(pool(a=5), 3).taken == (0, 1, 2)
    assert fill([one(0, size=4), one(1, size=4)], 5).taken == (0, 1)


def test_a_tenant_alone_is_not_held_back() -> None:
    assert drawn(pool(a=9), 6, ShareLimits(tenant=0.1)) == {"a": 6}


def test_a_tenant_has_its_share_of_a_batch_and_the_rest_waits() -> None:
    filled = fill(pool(a=90, b=40), 32, ShareLimits(tenant=0.5))
    assert drawn(pool(a=90, b=40), 32, ShareLimits(tenant=0.5)) == {"a": 16, "b": 16}
    assert filled.held_back == 74


def test_an_even_split_is_always_allowed() -> None:
    assert drawn(pool(a=20, b=20), 10, ShareLimits(tenant=0.1)) == {"a": 5, "b": 5}


def test_a_batch_is_smaller_where_others_have_little() -> None:
    assert drawn(pool(a=90, b=3), 32, ShareLimits(tenant=0.5)) == {"a": 3, "b": 3}


def test_but_it_is_filled_up_to_the_least_a_step_takes() -> None:
    assert drawn(pool(a=90, b=3), 32, ShareLimits(tenant=0.5, least=20)) == {"a": 17, "b": 3}


def test_data_of_nobody_in_particular_is_not_limited() -> None:
    candidates = [one(at, subject="" if at < 30 else "u") for at in range(60)]
    taken = [candidates[place].subject for place in fill(candidates[::-1], 20, ShareLimits(subject=0.25)).taken]
    assert taken.count("u") == 10, "an even split between him and the others"
    assert drawn(pool(**{"": 30, "b": 1}), 20, ShareLimits(tenant=0.5))[""] >= 19


def test_users_are_limited_within_their_tenant_too() -> None:
    candidates = [one(at, "a", "heavy" if at < 50 else f"u{at}") for at in range(60)]
    filled = fill(candidates, 10, ShareLimits(tenant=0.5, subject=0.2))
    subjects = Counter(candidates[place].subject for place in filled.taken)
    assert subjects["heavy"] == 2 and sum(subjects.values()) == 10


PARTIES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["u", "v", "w", ""]), st.integers(1, 3)), max_size=60
)


@given(PARTIES, st.integers(1, 50), st.floats(0.05, 1), st.floats(0.05, 1), st.integers(1, 20))
def test_nobody_has_more_than_the_share_or_an_even_split_up_to_a_group(parties, wanted, tenant, subject, least) -> None:
    candidates = [one(at, *who, size=size) for at, (*who, size) in enumerate(parties)]
    filled = fill(candidates, wanted, ShareLimits(tenant, subject, least))
    assert len(set(filled.taken)) == len(filled.taken) and list(filled.taken) == sorted(filled.taken)
    if not candidates:
        return
    assert filled.taken, "something is drawn wherever something is there"
    taken = [candidates[place] for place in filled.taken]
    total = sum(member.num_experiences for member in taken)
    if total <= least + 2:  # filled up to `least` from whoever has them
        return
    tenants, users = {who for who, _, _ in parties}, {(who, user) for who, user, _ in parties}
    for key, share, present in (
        (lambda member: member.tenant, tenant, tenants),
        (lambda member: (member.tenant, member.subject) if member.subject else "", subject, users),
    ):
        sums: Counter[object] = Counter()
        for member in taken:
            sums[key(member)] += member.num_experiences
        allowed = max(1, max(share, 1 / len(present)) * (total + 3))
        assert all(count <= allowed + 3 for who, count in sums.items() if who), (sums, total)


@pytest.mark.parametrize("draw", [draw_least_used, draw_by_priority])
def test_the_same_seed_draws_the_same_within_the_shares(draw) -> None:
    candidates = pool(a=90, b=40)
    first = draw(pool_of(candidates), num_experiences=20, max_uses=1, seed=5, limits=ShareLimits(tenant=0.5))
    assert first == draw(pool_of(candidates), num_experiences=20, max_uses=1, seed=5, limits=ShareLimits(tenant=0.5))
    assert Counter(member.tenant for member in first.taken)["a"] == 10


def test_groups_without_tokens_have_a_weight_where_the_mean_is_over_tokens() -> None:
    candidates = pool_of(pool(a=60, b=4))
    drawn = draw_by_priority(
        candidates, num_experiences=20, max_uses=1, seed=1, limits=ShareLimits(tenant=0.5), by_tokens=True
    ).taken
    assert len(drawn) == 8 and {member.weight for member in drawn} == {0.0}, "nothing of them is in the mean"


@pytest.mark.parametrize("draw", [draw_least_used, draw_by_priority])
def test_a_draw_counts_what_a_share_held_back(draw) -> None:
    limits = ShareLimits(tenant=0.5)
    held = [
        draw(pool_of(pool(a=9, b=2)), num_experiences=8, max_uses=1, seed=at, limits=limits).held_back
        for at in range(20)
    ]
    assert 0 < max(held) <= 7


def test_a_share_matters_only_where_two_have_something() -> None:
    mixed, users = [one(0, "a", "u"), one(1, "b", "u")], [one(0, "a", "u"), one(1, "a", "v")]
    for candidates, limits, expected in (
        (mixed, ShareLimits(tenant=0.9), False),
        (mixed, ShareLimits(subject=0.9), False),
        (users, ShareLimits(tenant=0.9), True),
        (users, ShareLimits(subject=0.9), False),
        (mixed, ShareLimits(), True),
        (mixed[:1], ShareLimits(0.1, 0.1), True),
        ([], ShareLimits(0.1, 0.1), True),
    ):
        assert is_open(pool_of(candidates), limits) is expected


def test_one_whole_group_may_be_above_the_share() -> None:
    order = [one(0, "a", size=9), one(1, "a"), one(2, "b", size=5), one(3, "b", size=5)]
    filled = fill(order, 10, ShareLimits(tenant=0.5))
    assert filled.taken == (0, 2) and filled.held_back == 1
    assert fill([one(0, "a", size=4), one(1, "a"), one(2, "b", size=5)], 10, ShareLimits(tenant=0.5)).taken == (0, 1, 2)


def test_what_fills_a_batch_up_to_the_least_is_the_oldest_of_what_waited_in_order() -> None:
    order = [one(at, "a", size=2) for at in range(5)] + [one(5, "b", size=2)]
    filled = fill(order, 12, ShareLimits(tenant=0.5, least=7))
    assert filled.taken == (0, 1, 2, 5) and filled.held_back == 4
    assert fill(order, 12, ShareLimits(tenant=0.5, least=4)).taken == (0, 5)


def test_a_batch_within_the_shares_is_filled_up_to_the_least_where_whole_groups_do_not_fit() -> None:
    order = [one(at, tenant, size=3) for at, tenant in enumerate("aabb")]
    for least, taken in ((6, (0, 2)), (7, (0, 1, 2)), (10, (0, 1, 2, 3))):
        assert fill(order, 10, ShareLimits(tenant=0.5, least=least)).taken == taken


def test_whole_groups_of_a_party_without_a_limit_may_be_more_than_the_batch() -> None:
    tenant = [one(0, "a", "u", size=3), one(1, "a", "v", size=3)]
    assert fill(tenant, 4, ShareLimits(subject=0.5)) == Filled((0, 1))
    user = [one(0, "", "u", size=3), one(1, "", "u", size=3), one(2, "b")]
    assert fill(user, 4, ShareLimits(tenant=0.5)) == Filled((0, 1))


def test_where_more_tenants_wait_than_a_batch_has_experiences_each_has_one_at_most() -> None:
    assert drawn(pool(a=2, b=1, c=1, d=1, e=1), 3, ShareLimits(tenant=0.1)) == {"a": 1, "b": 1, "c": 1}


def test_a_user_without_a_name_is_not_limited_within_a_tenant() -> None:
    order = [one(at, "a") for at in range(8)] + [one(8, "a", "u"), one(9, "a", "u")]
    assert fill(order, 8, ShareLimits(subject=0.25)).taken == tuple(range(8))


def test_users_of_one_name_at_two_tenants_are_two() -> None:
    order = [one(0, "a", "u"), one(1, "b", "u"), one(2, "a", "v"), one(3, "b", "v")]
    assert fill(order, 4, ShareLimits(subject=0.25)).taken == (0, 1, 2, 3)


def test_a_batch_within_the_shares_stays_smaller_where_whole_groups_do_not_fit() -> None:
    order = [one(at, tenant, size=3) for at, tenant in enumerate("aabb")]
    filled = fill(order, 10, ShareLimits(tenant=0.5))
    assert filled == Filled((0, 2), 6)
