"""The draw by priority: in proportion, weighed back, from headers alone, and in the journal."""

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bench.draw import run as run_bench
from infra.config import decode
from infra.store_memory import MemoryStore
from schemas import Batch
from schemas.errors import BadFrame, ConfigError
from tests.trainer.buffered_blocks import block
from tests.trainer.memory_run import CONFIG, filled_log, journal, train
from trainer.buffer import Buffer
from trainer.config import LaneConfig, TrainerConfig
from trainer.draw import Candidate
from trainer.draw_priority import FLOOR, draw_by_priority
from trainer.learners.scripted import ScriptedLearner


def lane_of(priorities: list[float], num_experiences: int = 1) -> list[Candidate]:
    return [
        Candidate(group=f"l.{at}", lane="live", offset=at, num_experiences=num_experiences, priority=priority)
        for at, priority in enumerate(priorities)
    ]


def test_groups_come_in_proportion_to_their_priority() -> None:
    lane = lane_of([1.0, 0.5, 0.25, 0.0, 7.0])
    first: Counter[str] = Counter()
    for seed in range(4000):
        (one,) = draw_by_priority(lane, num_experiences=1, max_uses=1, seed=seed).taken
        first[one.group] += 1
    total = 1.0 + 0.5 + 0.25 + FLOOR + 1.0
    for group, share in {"l.0": 1.0, "l.1": 0.5, "l.2": 0.25, "l.3": FLOOR, "l.4": 1.0}.items():
        assert first[group] / 4000 == pytest.approx(share / total, abs=0.03), first


def test_the_weights_undo_what_priority_did_to_the_mean() -> None:
    """Of a lane where priority and value go together, the weighted mean of what is drawn is the lane's own mean."""
    lane = lane_of([0.1] * 4000 + [1.0] * 1000)
    values = [0.0] * 4000 + [1.0] * 1000
    weighted = plain = total = 0.0
    for seed in range(20):
        for one in draw_by_priority(lane, num_experiences=200, max_uses=1, seed=seed).taken:
            weighted += one.weight * values[one.offset]
            plain += values[one.offset]
            total += one.weight
    assert plain / 4000 > 0.6 and weighted / total == pytest.approx(0.2, abs=0.02)


@given(st.lists(st.floats(0, 2), max_size=40), st.integers(1, 60), st.integers(0, 10**6), st.floats(0, 1))
def test_a_draw_takes_whole_groups_once_and_as_many_as_there_are(priorities, wanted, seed, correction) -> None:
    lane = lane_of(priorities, num_experiences=2)
    draw = draw_by_priority(lane, num_experiences=wanted, max_uses=1, seed=seed, correction=correction)
    names = [one.group for one in draw.taken]
    assert len(set(names)) == len(names) == min(len(lane), -(-wanted // 2)) and draw.wait == (not lane)
    assert draw == draw_by_priority(lane, num_experiences=wanted, max_uses=1, seed=seed, correction=correction)
    if names:
        assert sum(one.weight for one in draw.taken) / len(names) == pytest.approx(1.0)


def test_used_up_groups_are_not_drawn() -> None:
    lane = [msgspec.structs.replace(one, uses=at % 2) for at, one in enumerate(lane_of([1.0] * 6))]
    draw = draw_by_priority(lane, num_experiences=6, max_uses=1, seed=0)
    assert {one.offset for one in draw.taken} == {0, 2, 4}
    assert draw_by_priority(lane[1::2], num_experiences=1, max_uses=1, seed=0).wait


def test_nothing_is_decoded_but_what_was_drawn() -> None:
    """No frame of this buffer can be decoded: drawing does not notice, looking at what was drawn does."""
    buffer = Buffer({"live": 1})
    for offset in range(50):
        assert buffer.add(offset, b"no frame", block(f"l{offset}.0", lane="live", num_members=2)) == ""
    draw = draw_by_priority(buffer.candidates("live"), num_experiences=20, max_uses=1, seed=3)
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


def test_the_benchmark_draws_what_it_says() -> None:
    figures = run_bench(num_experiences=640, num_drawn=10, rounds=2)
    assert figures["groups_drawn"] == 10 and figures["groups_of_16_draw_ms_p50"] >= 0
