"""The draw by priority: in proportion, weighed back, from headers alone, and in the journal."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.settings.config import decode
from infra.store.memory import MemoryStore
from schemas import Batch
from schemas.errors import BadFrame, ConfigError
from tests.trainer.buffered_blocks import block
from tests.trainer.memory_run import CONFIG, filled_log, journal, train
from trainer.buffer.buffer import Buffer
from trainer.buffer.draw import Candidate
from trainer.buffer.draw_priority import FAIR, blended, draw_by_priority, inverse_chances
from trainer.buffer.pool import pool_of as pooled
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner


def lane_of(priorities: Iterable[float], num_experiences: int = 1) -> list[Candidate]:
    return [
        Candidate(group=f"l.{at}", lane="live", offset=at, num_experiences=num_experiences, priority=priority)
        for at, priority in enumerate(priorities)
    ]


class PriorityGroups(NamedTuple):
    """Groups whose value, and whose length tenfold, goes with their priority."""

    priority: np.ndarray
    value: np.ndarray
    tokens: np.ndarray
    size: np.ndarray

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(
                group=f"l.{at}", lane="live", offset=at, num_experiences=size, priority=priority, num_tokens=tokens
            )
            for at, (size, priority, tokens) in enumerate(
                zip(self.size.tolist(), self.priority.tolist(), self.tokens.tolist(), strict=True)
            )
        ]


def pool_of(num: int, seed: int = 0, sizes: int = 1) -> PriorityGroups:
    """Most of low priority; the mean value is about 0.2."""
    random = np.random.default_rng(seed)
    low, high = random.uniform(0.1, 0.2, num), random.uniform(0.3, 1.0, num)
    priority = np.where(random.random(num) < 0.8, low, high)
    tokens = np.round(100 * (1 + 9 * (priority - 0.1) / 0.9)).astype(int)
    size = random.integers(1, sizes + 1, num)
    return PriorityGroups(priority, 0.5 * priority + 0.1 * random.random(num), tokens * size, size)


def biases(pool: PriorityGroups, wanted: int, units: np.ndarray, runs: int) -> tuple[float, float]:
    """Relative bias of the weighted mean of what is drawn, in a loss that divides by what was drawn; its standard error."""
    random, priority = np.random.default_rng(1), blended(pool.priority)
    first = min(
        len(priority), wanted + int(pool.size.max()) + 1
    )  # no key behind those says anything about what is drawn
    found = []
    for _ in range(0, runs, 4000):
        key = priority / (1.0 - random.random((4000, len(priority))))
        order = np.argpartition(-key, first - 1, axis=-1)[:, :first]
        order = np.take_along_axis(order, np.argsort(-np.take_along_axis(key, order, -1), axis=-1), -1)
        size, unit = pool.size[order], units[order]
        inverse = inverse_chances(np.take_along_axis(key, order, -1), priority[order], size, wanted)
        drawn = np.cumsum(size, axis=-1) - size < wanted
        weight = inverse * (unit * drawn).sum(-1, keepdims=True) / units.sum()
        found.append((weight * unit * pool.value[order] * drawn).sum(-1) / (unit * drawn).sum(-1))
    means = np.concatenate(found) * units.sum() / (units * pool.value).sum()
    return float(means.mean()) - 1, float(means.std()) / len(means) ** 0.5


@pytest.mark.parametrize(("counted", "sizes"), [("experiences", 1), ("tokens", 1), ("tokens", 4)])
@pytest.mark.parametrize("percent", [10, 100, 1, 5, 25, 50])
def test_the_weighted_mean_of_a_draw_is_that_of_the_pool_at_any_share_of_it(percent, counted, sizes) -> None:
    pool = pool_of(400, sizes=sizes)
    units = pool.tokens if counted == "tokens" else pool.size
    wanted = round(pool.size.sum() * percent / 100)
    bias, error = biases(pool, wanted, units, runs={1: 64_000, 5: 12_000}.get(percent, 8_000))
    assert error < 0.003 and abs(bias) < 0.01, (bias, error)


@given(st.integers(0, 10**6), st.integers(1, 200), st.booleans(), st.floats(0.1, 1.0))
def test_the_weights_of_a_draw_are_those_whose_mean_was_measured(seed, wanted, by_tokens, correction) -> None:
    pool = pool_of(50, seed, sizes=4)
    draw = draw_by_priority(
        pooled(pool.candidates()),
        num_experiences=wanted,
        max_uses=1,
        seed=seed,
        correction=correction,
        by_tokens=by_tokens,
    )
    key = blended(pool.priority) / (1.0 - np.random.default_rng(seed).random(50))
    order = np.argsort(-key)
    assert [one.offset for one in draw.taken] == order[: len(draw.taken)].tolist()
    inverse = inverse_chances(key[order], blended(pool.priority)[order], pool.size[order], wanted)
    units = (pool.tokens if by_tokens else pool.size)[order]
    expected = (inverse * units[: len(draw.taken)].sum() / units.sum()) ** correction
    assert [one.weight for one in draw.taken] == pytest.approx(expected[: len(draw.taken)].tolist())


def streamed(pool: PriorityGroups, lane: LaneConfig, *, waiting: int, come: int, drawn: int) -> float:
    """Relative bias of the weighted mean, in tokens, of all that is trained of a stream that begins with so many."""
    candidates, value = pool.candidates(), pool.value
    here, rest = candidates[:waiting], candidates[waiting:]
    weighted = total = 0.0
    for step in range(len(rest) // come):
        draw = draw_by_priority(
            pooled(here),
            num_experiences=drawn,
            max_uses=lane.max_uses,
            seed=step,
            correction=lane.exponent,
            by_tokens=True,
        )
        weighted += sum(one.weight * one.num_tokens * value[one.offset] for one in draw.taken)
        total += sum(one.weight * one.num_tokens for one in draw.taken)
        gone = {one.offset for one in draw.taken}
        here = [one for one in here if one.offset not in gone] + rest[step * come : (step + 1) * come]
    return float(weighted / total / ((pool.tokens * value).sum() / pool.tokens.sum()) - 1)


def test_where_each_group_is_trained_once_the_mean_of_what_is_trained_is_that_of_all_that_came() -> None:
    lane = LaneConfig(draw="priority", max_uses=1)
    assert abs(streamed(pool_of(20_000), lane, waiting=400, come=40, drawn=40)) < 0.01
    assert abs(streamed(pool_of(20_000), lane, waiting=0, come=40, drawn=80)) < 0.01, "the trainer is the faster one"


def test_weights_for_the_pool_turn_priority_into_its_opposite_where_all_is_drawn_in_the_end() -> None:
    """Why they are not the default there: what waits in a steady state is what was passed over."""
    lane = LaneConfig(draw="priority", max_uses=1, correction=1.0)
    assert streamed(pool_of(20_000), lane, waiting=400, come=40, drawn=40) < -0.2


def test_without_weights_a_lane_that_is_never_drawn_out_leans_to_high_priorities() -> None:
    """Why the default is another where groups are drawn often."""
    assert streamed(pool_of(8_000), LaneConfig(draw="priority"), waiting=400, come=80, drawn=20) > 0.1
    assert LaneConfig(draw="priority", max_uses=4).exponent == 1.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40).filter(lambda found: max(found) > 0))
def test_no_chance_is_below_a_share_of_an_even_draw_and_no_two_priorities_become_one(priorities) -> None:
    chances = blended(np.array(priorities))
    assert (chances >= FAIR * chances.mean() * (1 - 1e-9)).all()
    products = blended(np.array([0.1 * 0.1 * 0.1, 0.1 * 0.1, 0.1 * 0.5, 0.1]))
    assert (np.diff(products) / products[:-1] > 0.1).all(), "what three processors think little of still differs"
    assert blended(np.array([0.002, 0.001])).tolist() == pytest.approx((blended(np.array([2.0, 1.0])) / 1000).tolist())


def test_the_first_drawn_come_in_proportion_to_their_chances() -> None:
    priorities = [1.0, 0.5, 0.25, 0.0]
    first: Counter[str] = Counter()
    for seed in range(1500):
        (one,) = draw_by_priority(pooled(lane_of(priorities)), num_experiences=1, max_uses=1, seed=seed).taken
        first[one.group] += 1
    assert first["l.0"] > first["l.1"] > first["l.2"] > first["l.3"] > 0, first


def test_a_weight_is_seldom_above_twice_what_the_even_share_allows() -> None:
    lane = lane_of([0.001] * 300 + [1.0] * 100)
    weights = [
        one.weight
        for seed in range(200)
        for one in draw_by_priority(pooled(lane), num_experiences=40, max_uses=1, seed=seed).taken
    ]
    assert np.mean(np.array(weights) > 2 / FAIR) < 0.001


@given(st.lists(st.floats(0, 2), max_size=40), st.integers(1, 60), st.integers(0, 10**6), st.floats(0, 1))
def test_a_draw_takes_whole_groups_once_and_as_many_as_there_are(priorities, wanted, seed, correction) -> None:
    lane = lane_of(priorities, num_experiences=2)
    draw = draw_by_priority(pooled(lane), num_experiences=wanted, max_uses=1, seed=seed, correction=correction)
    names = [one.group for one in draw.taken]
    assert len(set(names)) == len(names) == min(len(lane), -(-wanted // 2)) and draw.wait == (not lane)
    assert draw == draw_by_priority(pooled(lane), num_experiences=wanted, max_uses=1, seed=seed, correction=correction)
    if names and (correction == 0 or len(names) == len(lane)):
        assert [one.weight for one in draw.taken] == pytest.approx([1.0] * len(names)), "all of it needs no weights"


def test_used_up_groups_are_not_drawn() -> None:
    lane = [msgspec.structs.replace(one, uses=at % 2) for at, one in enumerate(lane_of([1.0] * 6))]
    draw = draw_by_priority(pooled(lane), num_experiences=6, max_uses=1, seed=0)
    assert {one.offset for one in draw.taken} == {0, 2, 4}
    assert draw_by_priority(pooled(lane[1::2]), num_experiences=1, max_uses=1, seed=0).wait


def test_nothing_is_decoded_but_what_was_drawn() -> None:
    """No frame of this buffer can be decoded: drawing does not notice, looking at what was drawn does."""
    buffer = Buffer({"live": 1})
    for offset in range(50):
        assert buffer.add(offset, b"no frame", block(f"l{offset}.0", lane="live", num_members=2)) == ""
    draw = draw_by_priority(buffer.pool("live"), num_experiences=20, max_uses=1, seed=3)
    assert len(draw.taken) == 10
    with pytest.raises(BadFrame):
        buffer.look_at(draw.taken)


def test_the_paced_lane_is_drawn_in_issue_order_whatever_the_settings_say() -> None:
    with pytest.raises(ConfigError, match="issue order"):
        decode({"lanes": {"usual": {"draw": "priority"}}}, TrainerConfig, "bot.toml")


def test_the_journal_holds_the_weights_of_the_draw() -> None:
    lanes = {**CONFIG.lanes, "expert": LaneConfig(loss="sft", weight=0.5, max_uses=100, draw="priority", optional=True)}
    config = msgspec.structs.replace(CONFIG, lanes=lanes)

    async def run() -> list[object]:
        store = MemoryStore()
        log = await filled_log(store)
        await train(log, store, ScriptedLearner(), config)
        return await journal(log)

    batches = [one for one in asyncio.run(run()) if isinstance(one, Batch) and one.phase == "train"]
    weights = {item.weight for one in batches for item in one.items if item.lane == "expert"}
    assert weights and {item.weight for one in batches for item in one.items if item.lane == "usual"} == {1.0}


def test_priorities_that_say_nothing_draw_evenly_and_negative_ones_are_none() -> None:
    assert blended(np.zeros(3)).tolist() == [1.0, 1.0, 1.0] == blended(np.array([-1.0, -2.0, -3.0])).tolist()
    assert blended(np.array([1.0, -1.0])).tolist() == pytest.approx([0.9 + 0.05, 0.05]) and FAIR == 0.1


def test_a_chance_is_told_by_the_key_at_which_the_others_alone_reach_the_number() -> None:
    """Keys 8, 4, 2, 1 of groups of 1: where two are drawn, one of them had to be above the third key, 2."""
    key, priority, size = np.array([8.0, 4.0, 2.0, 1.0]), np.array([1.0, 1.0, 1.0, 0.25]), np.ones(4, np.int64)
    assert inverse_chances(key, priority, size, 2).tolist() == [2.0, 2.0, 2.0, 8.0]
    assert inverse_chances(key, priority, size, 3).tolist() == [1.0, 1.0, 1.0, 4.0]
    assert inverse_chances(key, priority, size, 4).tolist() == [1.0, 1.0, 1.0, 1.0], "all are drawn, surely"
    sizes = np.array([1, 2, 1, 1])
    assert inverse_chances(key, priority, sizes, 2).tolist() == [4.0, 2.0, 4.0, 16.0]


def test_weights_are_on_and_of_experiences_where_nothing_is_said() -> None:
    pool = pool_of(50)
    given = {"num_experiences": 9, "max_uses": 1, "seed": 4}
    plain = draw_by_priority(pooled(pool.candidates()), **given)
    assert plain == draw_by_priority(pooled(pool.candidates()), **given, correction=1.0, by_tokens=False)
    assert plain != draw_by_priority(pooled(pool.candidates()), **given, correction=1.0, by_tokens=True)
    bare = draw_by_priority(pooled(pool.candidates()), **given, correction=0.0)
    assert {one.weight for one in bare.taken} == {1.0} != {one.weight for one in plain.taken}
    assert bare.wait is False and [one.offset for one in bare.taken] == [one.offset for one in plain.taken]


def test_groups_without_tokens_divide_nothing_by_nothing() -> None:
    draw = draw_by_priority(pooled(lane_of([1.0, 0.5])), num_experiences=1, max_uses=1, seed=0, by_tokens=True)
    assert [one.weight for one in draw.taken] == [0.0]
    (alone,) = draw_by_priority(pooled(lane_of([1.0])), num_experiences=1, max_uses=1, seed=0).taken
    assert alone.weight == 1.0


def test_the_seed_draws_the_same_by_priority_in_every_release() -> None:
    draw = draw_by_priority(pooled(lane_of([0.5, 1.0, 0.25, 0.75])), num_experiences=2, max_uses=1, seed=7)
    assert [(one.offset, round(one.weight, 6)) for one in draw.taken] == [(1, 0.66581), (0, 1.250423)]
