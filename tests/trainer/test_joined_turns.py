"""Turns of a session that were closed together: drawn together, computed once, each trained as it would be alone."""

import numpy as np
import pytest
from msgspec.structs import replace
from test_pack import check_faithful
from trainer_samples import make_item, num_positions

from schemas import Block, Join, Span, encode, ids, make_experience
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import Buffer
from trainer.buffer.draw import MAX_AWAITED, joins_of, parted, united
from trainer.buffer.pool import Candidate, Draw, pool_of
from trainer.config import LaneConfig
from trainer.loop.supply import drawn_from

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
    return [joined(one, Join(name, turns - 1 - at)) for at, one in enumerate(found)]


def joined(one: TrainItem, join: Join) -> TrainItem:
    return replace(one, experience=replace(one.experience, join=join))


def computed_per_token(items: list[TrainItem], max_tokens: int) -> float:
    """Positions that the learner computes for each token of the session."""
    return num_positions(pack(items, max_tokens=max_tokens)) / max(one.experience.num_tokens for one in items)


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


def test_turns_of_logs_written_before_there_were_joins_are_laid_out_as_they_were() -> None:
    """What lies where decides sums, and sums decide bits: a replay must lay out the same."""
    strangers = [
        replace(one, experience=replace(one.experience, group=f"task-{at}.0"))
        for at, one in enumerate(session(None, 4))
    ]
    layouts = [pack(items, max_tokens=400).microbatches for items in (session(None, 4), strangers)]
    for old, expected in zip(*layouts, strict=True):
        for name in ("tokens_BT", "positions_BT", "reach_BT", "predecessor_N", "target_N", "sequence_N"):
            assert np.array_equal(getattr(old, name), getattr(expected, name)), name


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
    return [one.group for one in candidates]  # type: ignore[attr-defined]


def test_a_join_is_drawn_once_all_of_it_is_here() -> None:
    buffer = filled(turn(0, Join("s0.0", 2)), turn(1, Join("s0.0", 1)), turn(5, None, session=1))
    assert numbers(buffer.drawable("live")) == ["s1.5"] and buffer.num_groups("live") == 3
    last = turn(2, Join("s0.0", 0))
    buffer.add(3, encode(last), last)
    assert numbers(buffer.drawable("live")) == ["s0.0", "s0.1", "s1.5", "s0.2"]


def test_a_join_is_whole_also_where_its_last_turn_is_refused_or_cannot_be_read() -> None:
    buffer = Buffer({"live": 1}, max_tokens=3)
    for offset, one in enumerate([turn(0, Join("s0.0", 1)), turn(1, Join("s0.0", 0))]):
        assert buffer.add(offset, encode(one), one) == "longer than the context"
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
    joins = joins_of(buffer.drawable("live"))
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
    held = pool_of(candidates(6, 5, 10))
    for seed in range(20):
        found = drawn_from(held, lane, num_experiences=12, seed=seed)
        taken: dict[str, set[float]] = {}
        count: dict[str, int] = {}
        for one in found.taken:
            name = one.join or one.group
            taken.setdefault(name, set()).add(one.weight)
            count[name] = count.get(name, 0) + 1
        assert all(count[name] == 5 for name in taken if name.startswith("s")) and len(found.taken) >= 12
        assert all(len(weights) == 1 for weights in taken.values())
        assert len({one.offset for one in found.taken}) == len(found.taken)


def test_without_joins_the_draw_is_what_it_was() -> None:
    held = pool_of(candidates(0, 0, 30))
    joins = joins_of(held)
    assert united(held, joins) is held
    draw = Draw(taken=tuple(held.chosen(slice(3))))
    assert parted(draw, joins) is draw
