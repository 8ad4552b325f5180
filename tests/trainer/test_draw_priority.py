"""The draw by priority: exact chances, weights of mean 1, at any size of a step and under any share, and in the journal."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.settings.config import decode
from schemas import Batch
from schemas.errors import ConfigError
from tests.trainer.memory_run import CONFIG, journal, new_run, train
from trainer.buffer.draw import FAIR, NO_LIMITS, ShareLimits, blended, chances, draw_by_priority, find_room
from trainer.buffer.pool import Candidate, make_pool
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner


def lane_of(priorities: Iterable[float], num_experiences: int = 1) -> list[Candidate]:
    return [
        Candidate(group=f"l.{at}", lane="live", offset=at, num_experiences=num_experiences, priority=priority)
        for at, priority in enumerate(priorities)
    ]


def crowd(num: int, *, sizes: Sequence[int] = (1,), seed: int = 0) -> list[Candidate]:
    """Groups of which most have a low priority, one tenant has seven in ten, and longer ones have a higher priority."""
    random = np.random.default_rng(seed)
    priority = np.where(random.random(num) < 0.8, random.uniform(0.1, 0.2, num), random.uniform(0.3, 1.0, num))
    return [
        Candidate(
            group=f"l.{at}", lane="live", offset=at, num_experiences=int(random.choice(sizes)), priority=float(each),
            num_tokens=int(100 + 900 * each), tenant=str(random.choice(list("abcde"), p=[0.71, 0.1, 0.1, 0.05, 0.04])),
            subject=f"u{random.integers(0, num // 12 + 1)}",
        )
        for at, each in enumerate(priority.tolist())
    ]  # fmt: skip


def value(candidate: Candidate) -> float:
    return 0.1 + 0.5 * candidate.priority


@pytest.mark.parametrize(
    "limits", [NO_LIMITS, ShareLimits(tenant=0.5, subject=0.25), ShareLimits(tenant=0.34, subject=0.1)]
)
@pytest.mark.parametrize("wanted", [7, 16, 64])
def test_the_mean_weight_of_a_step_is_1_under_any_share(wanted: int, limits: ShareLimits) -> None:
    """The chances are exact; the mean of the weights is that of 300 draws."""
    order = make_pool(sorted(crowd(2000), key=lambda each: (each.tenant, each.subject)))
    chance_N, _ = chances(order, find_room(order, wanted, limits))
    assert chance_N.sum() == pytest.approx(wanted) and 0 < chance_N.min() <= chance_N.max() <= 1
    weights = [
        experience.weight
        for seed in range(300)
        for experience in draw_by_priority(order, num_experiences=wanted, max_uses=1, seed=seed, limits=limits).taken
    ]
    error = np.std(weights) / len(weights) ** 0.5
    assert abs(np.mean(weights) - 1) < 4 * error and error < 0.02
    assert max(weights) < 2 / FAIR


@pytest.mark.parametrize(("by_tokens", "sizes"), [(False, (1,)), (True, (1,)), (True, (1, 2, 3, 4)), (False, (8,))])
@pytest.mark.parametrize("percent", [2, 10, 50, 100])
def test_the_weighted_mean_of_a_draw_is_that_of_the_pool_at_any_share_of_it(percent, by_tokens, sizes) -> None:
    candidates = crowd(400, sizes=sizes)
    pool, unit = make_pool(candidates), (lambda each: each.num_tokens if by_tokens else each.num_experiences)
    expected = sum(unit(candidate) * value(candidate) for candidate in candidates) / sum(map(unit, candidates))
    wanted = sum(candidate.num_experiences for candidate in candidates) * percent // 100
    means = []
    for seed in range(300):
        taken = draw_by_priority(pool, num_experiences=wanted, max_uses=1, seed=seed, by_tokens=by_tokens).taken
        means.append(
            sum(candidate.weight * unit(candidate) * value(candidate) for candidate in taken) / sum(map(unit, taken))
        )
    error = float(np.std(means)) / len(means) ** 0.5
    assert abs(np.mean(means) - expected) < 4 * error + 1e-9 and error < 0.02


def test_within_a_share_the_weighted_mean_of_a_party_is_that_of_all_it_has() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate([random.uniform(0.1, 0.4, 300), random.uniform(0.3, 1.0, 40)])
    candidates = make_pool(
        Candidate(group=f"l.{at}", lane="live", offset=at, num_experiences=1, tenant="ab"[at >= 300], priority=priority)
        for at, priority in enumerate(values.tolist())
    )
    sums, counts = Counter[str](), Counter[str]()
    for seed in range(600):
        drawn = draw_by_priority(candidates, num_experiences=40, max_uses=1, seed=seed, limits=ShareLimits(tenant=0.5))
        for candidate in drawn.taken:
            sums[candidate.tenant] += candidate.weight * values[candidate.offset]
            counts[candidate.tenant] += 1
    assert counts["a"] == counts["b"]
    assert sums["a"] / counts["a"] == pytest.approx(values[:300].mean(), rel=0.02)
    assert sums["b"] / counts["b"] == pytest.approx(values[300:].mean(), rel=0.02)


@given(st.integers(0, 10**6), st.integers(1, 80), st.floats(0.05, 1), st.floats(0.05, 1), st.integers(1, 20))
def test_no_party_has_more_than_its_share_or_an_even_split_up_to_a_group(seed, wanted, tenant, subject, least) -> None:
    candidates, limits = crowd(120, sizes=(1, 2, 3), seed=seed % 50), ShareLimits(tenant, subject, least)
    draw = draw_by_priority(make_pool(candidates), num_experiences=wanted, max_uses=1, seed=seed, limits=limits)
    total = sum(candidate.num_experiences for candidate in draw.taken)
    if total <= least + 3:  # filled up past the shares
        return
    room = find_room(make_pool(candidates), wanted, limits)
    for share, party in ((tenant, lambda each: each.tenant), (subject, lambda each: (each.tenant, each.subject))):
        present = len({party(candidate) for candidate in candidates})
        sums = Counter[object]()
        for candidate in draw.taken:
            sums[party(candidate)] += candidate.num_experiences
        allowed = max(1, max(share, 1 / present) * (max(total, room.size) + 3))
        assert max(sums.values()) <= allowed + 3


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40).filter(lambda found: max(found) > 0))
def test_no_chance_is_below_a_share_of_an_even_draw_and_no_two_priorities_become_one(priorities) -> None:
    blend = blended(np.array(priorities))
    assert (blend >= FAIR * blend.mean() * (1 - 1e-9)).all()
    products = blended(np.array([0.1 * 0.1 * 0.1, 0.1 * 0.1, 0.1 * 0.5, 0.1]))
    assert (np.diff(products) / products[:-1] > 0.1).all(), "priorities that three processors lowered still differ"


@given(st.lists(st.floats(0, 2), max_size=40), st.integers(1, 60), st.integers(0, 10**6), st.floats(0, 1))
def test_a_draw_takes_whole_groups_once_and_as_many_as_there_are(priorities, wanted, seed, correction) -> None:
    lane = lane_of(priorities, num_experiences=2)
    draw = draw_by_priority(make_pool(lane), num_experiences=wanted, max_uses=1, seed=seed, correction=correction)
    names = [candidate.group for candidate in draw.taken]
    assert len(set(names)) == len(names) == min(len(lane), -(-wanted // 2)) and draw.wait == (not lane)
    assert draw == draw_by_priority(
        make_pool(lane), num_experiences=wanted, max_uses=1, seed=seed, correction=correction
    )
    if names and (correction == 0 or len(names) == len(lane)):
        assert [candidate.weight for candidate in draw.taken] == pytest.approx([1.0] * len(names)), (
            "all of it needs no weights"
        )


def test_the_paced_lane_is_drawn_in_issue_order_whatever_the_settings_say() -> None:
    with pytest.raises(ConfigError, match="issue order"):
        decode({"lanes": {"usual": {"draw": "priority"}}}, TrainerConfig, "bot.toml")


async def test_the_journal_holds_the_weights_of_the_draw() -> None:
    lanes = {**CONFIG.lanes, "expert": LaneConfig(loss="sft", weight=0.5, max_uses=100, draw="priority", optional=True)}
    config = msgspec.structs.replace(CONFIG, lanes=lanes)
    log, store = await new_run()
    await train(log, store, ScriptedLearner(), config)
    batches = [each for each in await journal(log) if isinstance(each, Batch) and each.phase == "train"]
    weights = {item.weight for batch in batches for item in batch.items if item.lane == "expert"}
    assert weights and {item.weight for batch in batches for item in batch.items if item.lane == "usual"} == {1.0}
