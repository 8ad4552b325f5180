"""The draw: issue order, the staleness bound, and what is worth waiting for."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_pack import check_faithful
from trainer_samples import make_item, num_positions

from schemas import Block, Join, Span, encode, ids, make_experience
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import Buffer
from trainer.buffer.draw import (
    MAX_AWAITED,
    NO_LIMITS,
    ShareLimits,
    draw_least_used,
    find_joins,
    find_room,
    parted,
    shuffled,
    united,
)
from trainer.buffer.draw import fill as fill_pool
from trainer.buffer.pool import Candidate, Draw, draw_in_order, make_pool, missing, worth_waiting_for
from trainer.config import LaneConfig
from trainer.loop.supply import drawn_from, split_fit
from trainer.losses.loss import open_objective


def group(sequence: int, version: int = 0, **more: int) -> Candidate:
    return Candidate(
        group=f"t.{sequence}", lane="usual", offset=more.pop("offset", sequence), num_experiences=4, sequence=sequence,
        min_version=version, max_version=more.pop("max_version", version), **more,
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 10)), unique_by=lambda pair: pair[0]),
    st.integers(0, 12), st.integers(0, 3), st.integers(1, 8),
)  # fmt: skip
def test_no_group_wholly_older_than_the_bound_is_ever_drawn(pairs, version, bound, wanted) -> None:
    draw = draw_in_order(
        [group(sequence, at) for sequence, at in pairs], num_groups=wanted, version=version, max_staleness=bound
    )
    assert all(version - candidate.min_version <= bound for candidate in draw.taken)
    assert {each.sequence for each, _ in draw.dropped} == {s for s, at in pairs if version - at > bound}
    assert {reason for _, reason in draw.dropped} <= {"stale"}
    assert draw.wait == (len(pairs) - len(draw.dropped) < wanted)


def test_a_missing_group_about_to_pass_the_bound_is_waited_for() -> None:
    arrived = [group(0, 5), group(2, 5), group(3, 5)]
    absent = missing([0, 2, 3], closed=(), floor=0)
    assert absent == [1]
    (hold,) = worth_waiting_for(absent, arrived, version=7, max_staleness=2)
    assert hold == 1
    assert draw_in_order(arrived, num_groups=2, version=7, max_staleness=2, hold_for=hold).wait
    assert draw_in_order(arrived[:1], num_groups=1, version=7, max_staleness=2, hold_for=hold).taken == (arrived[0],)


def test_spread_draw_takes_the_least_used_first_and_depends_on_the_seed_alone() -> None:
    lane = [Candidate(group=f"e.{at}", lane="expert", offset=at, num_experiences=4, uses=at % 2) for at in range(10)]
    draw = draw_least_used(make_pool(lane), num_experiences=12, max_uses=9, seed=1)
    assert len(draw.taken) == 3 and all(candidate.uses == 0 for candidate in draw.taken)
    assert draw == draw_least_used(make_pool(reversed(lane)), num_experiences=12, max_uses=9, seed=1)
    assert draw != draw_least_used(make_pool(lane), num_experiences=12, max_uses=9, seed=2)


def test_what_a_lanes_loss_cannot_learn_from_is_named_with_one_reason() -> None:
    plain, bare, pair, bare_pair = (
        Candidate(group="g", lane="human", offset=at, num_experiences=2, has_ratio=not at % 2, is_pair=at > 1)
        for at in range(4)
    )
    every, sft = make_pool((plain, bare, pair, bare_pair)), open_objective(LaneConfig(loss="sft"))
    assert split_fit(sft, every) == (every, [])
    assert split_fit(replace(sft, ratio=True), every)[1] == [(bare, "no ratio"), (bare_pair, "no ratio")]
    assert split_fit(replace(sft, mean="pairs"), every)[1] == [(plain, "not a pair"), (bare, "not a pair")]
    assert split_fit(replace(sft, ratio=True, mean="pairs"), every)[1] == [
        (plain, "not a pair"), (bare, "not a pair"), (bare_pair, "no ratio")
    ]  # fmt: skip
    taught = make_pool((plain, replace(plain, is_taught=True)))
    assert split_fit(replace(sft, teacher=True), taught)[1] == [(plain, "no teacher")]


def test_nothing_is_drawn_past_a_group_worth_waiting_for_and_up_to_it_everything() -> None:
    arrived = [group(0), group(1), group(2)]
    for wanted, waits in ((1, False), (2, False), (3, True)):
        assert draw_in_order(arrived, num_groups=wanted, version=0, max_staleness=2, hold_for=1).wait == waits


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
    held = make_pool(candidates)
    taken, held_back = fill_pool(held, find_room(held, wanted, limits))
    return Filled(tuple(taken), held_back)


def drawn(candidates: list[Candidate], wanted: int, limits: ShareLimits) -> Counter[str]:
    return Counter(candidates[place].tenant for place in fill(candidates, wanted, limits).taken)


def test_but_it_is_filled_up_to_the_least_a_step_takes() -> None:
    assert drawn(pool(a=90, b=3), 32, ShareLimits(tenant=0.5, least=20)) == {"a": 17, "b": 3}


def test_data_of_nobody_in_particular_is_not_limited() -> None:
    candidates = [one(at, subject="" if at < 30 else "u") for at in range(60)]
    taken = [candidates[place].subject for place in fill(candidates[::-1], 20, ShareLimits(subject=0.25)).taken]
    assert taken.count("u") == 10, "an even split between him and the others"
    assert drawn(pool(**{"": 30, "b": 1}), 20, ShareLimits(tenant=0.5))[""] >= 19


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


TURNS = 20
ASKED, ANSWERED = 30, 10  # tokens of a question and of an answer


def session(name: str | None, turns: int = TURNS, *, seed: int = 0) -> list[TrainItem]:
    """Turns that each go on from all that was said before; name: of their join."""
    tokens = np.random.default_rng(seed).integers(0, 1000, turns * (ASKED + ANSWERED)).tolist()
    found = []
    for number in range(turns):
        stop = (number + 1) * (ASKED + ANSWERED)
        span = Span(stop - ANSWERED, stop, version=3 + number // 7)
        found.append(make_item(tokens[:stop], [span], group=f"s{seed}.{number}", advantage=0.1 * number, lane="live"))
    if name is None:
        return found
    return [joined(each, Join(name, turns - 1 - at)) for at, each in enumerate(found)]


def joined(each: TrainItem, join: Join) -> TrainItem:
    return replace(each, experience=replace(each.experience, join=join))


def computed_per_token(items: list[TrainItem], max_tokens: int) -> float:
    """Positions that the learner computes for each token of the session."""
    return num_positions(pack(items, max_tokens=max_tokens)) / max(item.experience.num_tokens for item in items)


@pytest.mark.parametrize("max_tokens", [100_000, 512, 100])
def test_a_session_of_20_turns_is_computed_once_whatever_room_there_is(max_tokens: int) -> None:
    assert computed_per_token(session("s0.0"), max_tokens) == pytest.approx(1.0, abs=0.01)
    assert computed_per_token(session(None), max_tokens) >= 10.0


@pytest.mark.parametrize("max_tokens", [100_000, 512, 100])
def test_every_answer_of_a_join_is_trained_once_with_its_own_numbers_and_its_own_prompt(max_tokens: int) -> None:
    items = [*session("s0.0"), *session("s1.0", 3, seed=1), *session(None, 3, seed=2)]
    batch = pack(items, max_tokens=max_tokens)
    check_faithful(items, batch)
    assert batch.num_tokens == 26 * ANSWERED and batch.num_sequences == batch.lane_sequences["live"] == 26


def test_branches_of_a_session_share_what_they_have_in_common() -> None:
    """A turn asked twice, and history that was rewritten after the first question."""
    base = session("s0.0", 3)
    again = make_item(
        [*base[1].experience.tokens[:50].tolist(), *range(2000, 2030)], [Span(70, 80, 3)], group="s0.7", lane="live"
    )
    other = make_item(
        [*base[0].experience.tokens[:20].tolist(), *range(3000, 3030)], [Span(40, 50, 3)], group="s0.8", lane="live"
    )
    items = [*base, joined(again, Join("s0.0", 1)), joined(other, Join("s0.0", 0))]
    batch = pack(items, max_tokens=1000)
    check_faithful(items, batch)
    assert num_positions(batch) == (120 - 1) + (30 - 1) + (30 - 1)


def turn(number: int, join: Join | None, *, session: int = 0, revision: int = 0) -> Block:
    group = f"s{session}.{number}"
    return Block((make_experience(
        tokens=[1, 2, 3, number], logprobs=[-0.5], messages=(), spans=(Span(3, 4, 3),), id=ids.experience_id(group, 0, 0),
        group=group, episode=0, group_size=1, lane="live", join=join, revision=revision, advantage=1.0, tenant=f"t{session}",
    ),))  # fmt: skip


def filled(*blocks: Block, max_uses: int = 1) -> Buffer:
    buffer = Buffer({"live": max_uses})
    for offset, block in enumerate(blocks):
        assert buffer.add(offset, encode(block), block) == ""
    return buffer


def numbers(candidates: object) -> list[str]:
    return [candidate.group for candidate in candidates]  # type: ignore[attr-defined]


def test_a_join_is_drawn_once_all_of_it_is_here() -> None:
    buffer = filled(turn(0, Join("s0.0", 2)), turn(1, Join("s0.0", 1)), turn(5, None, session=1))
    assert numbers(buffer.drawable("live")) == ["s1.5"] and buffer.num_groups("live") == 3
    last = turn(2, Join("s0.0", 0))
    buffer.add(3, encode(last), last)
    assert numbers(buffer.drawable("live")) == ["s0.0", "s0.1", "s1.5", "s0.2"]


def test_a_join_is_whole_also_where_its_last_turn_is_refused_or_cannot_be_read() -> None:
    buffer = Buffer({"live": 1}, max_tokens=3)
    for offset, each in enumerate([turn(0, Join("s0.0", 1)), turn(1, Join("s0.0", 0))]):
        assert buffer.add(offset, encode(each), each) == "longer than the context"
    buffer = filled(turn(0, Join("s0.0", 1)))
    assert not buffer.drawable("live")
    buffer.await_no_more()
    assert numbers(buffer.drawable("live")) == ["s0.0"]


def test_a_turn_that_comes_again_after_the_last_of_its_join_keeps_none_of_them_waiting() -> None:
    first, last = turn(0, Join("s0.0", 1)), turn(1, Join("s0.0", 0))
    buffer = filled(first, last)
    assert buffer.add(9, encode(first), first) == "duplicate"
    assert numbers(buffer.drawable("live")) == ["s0.0", "s0.1"]


def test_what_is_awaited_is_bounded() -> None:
    buffer = filled(*(turn(0, Join(f"s{at}.0", 1), session=at) for at in range(MAX_AWAITED + 3)))
    assert numbers(buffer.drawable("live")) == ["s0.0", "s1.0", "s2.0"]


def test_a_revision_is_drawn_with_what_is_left_of_its_join() -> None:
    buffer = filled(turn(0, Join("s0.0", 1)), turn(1, Join("s0.0", 0)), turn(0, Join("s0.0", 0), revision=1))
    joins = find_joins(buffer.drawable("live"))
    (unit,) = united(buffer.drawable("live"), joins)
    assert unit.num_experiences == 2
    assert sorted(numbers(parted(Draw(taken=(unit,)), joins).taken)) == ["s0.0", "s0.1"]


def candidates(joins: int, turns: int, alone: int) -> list[Candidate]:
    found = [
        Candidate(group=f"s{join}.{at}", lane="live", offset=100 * at + join, num_experiences=1, join=f"s{join}.0",
                  num_tokens=5, priority=1.0 + at, tenant=f"t{join % 2}")
        for join in range(joins) for at in range(turns)
    ]  # fmt: skip
    return found + [
        Candidate(group=f"a{at}.0", lane="live", offset=9000 + at, num_experiences=1, num_tokens=5)
        for at in range(alone)
    ]


@pytest.mark.parametrize("draw", ["least-used", "priority"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_no_draw_parts_a_join_and_all_of_its_turns_weigh_alike(draw: str, share: float) -> None:
    lane = LaneConfig(weight=1.0, draw=draw, tenant_share=share)  # type: ignore[arg-type]
    held = make_pool(candidates(6, 5, 10))
    for seed in range(20):
        found = drawn_from(held, lane, num_experiences=12, seed=seed)
        taken: dict[str, set[float]] = {}
        count: dict[str, int] = {}
        for candidate in found.taken:
            name = candidate.join or candidate.group
            taken.setdefault(name, set()).add(candidate.weight)
            count[name] = count.get(name, 0) + 1
        assert all(count[name] == 5 for name in taken if name.startswith("s")) and len(found.taken) >= 12
        assert all(len(weights) == 1 for weights in taken.values())
        assert len({candidate.offset for candidate in found.taken}) == len(found.taken)
