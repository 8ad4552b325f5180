"""Production traffic has no version limit: it is admitted by how far the policy has moved, and told where it is not."""

import asyncio

import pytest

from schemas import Block, Drawn, topics
from tests.trainer.buffered_blocks import block, message
from tests.trainer.test_draw_waiting import run_of, usual
from trainer.buffer.pool import Draw
from trainer.config import LaneConfig
from trainer.loop.state import Run
from trainer.loop.supply import decide
from trainer.loop.waiting import DIVERGED, admitted

OLD = 3  # versions behind nothing could be in the usual lane
NOW = 1000


def live(number: int) -> Block:
    return block(f"l{number}.0", lane="live", num_members=1, version=OLD)


def with_live(bound: float = 0.0, **lanes: LaneConfig) -> Run:
    config = {"live": LaneConfig(weight=1.0, max_mean_abs_log_ratio=bound, min_sequences=1), **lanes}
    return run_of(live(0), live(1), version=NOW, lanes=config)


def drawn(run: Run) -> Draw:
    async def main() -> Draw:
        await run.log.create_topics(partitions=1, keep_ms=-1)
        return await admitted(run, decide(run.supply, run.position, now_s=0.0))

    return asyncio.run(main())


def distance() -> float:
    """Of these blocks under the scripted learner, to which every token is certain: mean of -logprob."""
    return float(-live(0).experiences[0].logprobs.mean())


def test_an_answer_of_any_age_is_trained_under_the_default_settings() -> None:
    draw = drawn(with_live())
    assert {one.group for one in draw.taken} == {"l0.0", "l1.0"} and not draw.dropped


def test_a_group_within_the_bound_is_trained_and_one_beyond_it_is_dropped_and_told() -> None:
    assert len(drawn(with_live(bound=distance() * 1.01)).taken) == 2
    run = with_live(bound=distance() * 0.99)
    draw = drawn(run)
    assert draw.wait and not draw.taken
    assert {reason for _, reason in draw.dropped} == {DIVERGED}
    assert run.supply.intake.buffer.num_groups("live") == 0

    async def told() -> list[Drawn]:
        return [one.value async for one in run.log.read_all(topics.PROGRESS) if isinstance(one.value, Drawn)]

    (record,) = asyncio.run(told())
    assert record.dropped == {"l0.0": DIVERGED, "l1.0": DIVERGED}


@pytest.mark.parametrize("bound", [0.0, distance() * 0.99, distance() * 1.01])
def test_an_answer_that_is_revised_while_it_is_weighed_is_neither_trained_nor_dropped(bound: float) -> None:
    """People change their minds while a thread compares: the older revision is gone, the newer one is drawn later."""
    run = with_live(bound=bound)

    async def main() -> Draw:
        await run.log.create_topics(partitions=1, keep_ms=-1)
        first = decide(run.supply, run.position, now_s=0.0)
        weighing = asyncio.create_task(admitted(run, first))
        if bound:
            await asyncio.sleep(0)  # it has begun, and waits for the learner's thread
        newer = block("l0.0", lane="live", num_members=1, version=OLD, revision=1)
        assert run.supply.intake.take_block(message(newer, 2), newer) == ""
        return await weighing

    draw = asyncio.run(main())
    held = {(one.group, one.revision) for one in run.supply.intake.buffer.candidates("live")}
    assert ("l0.0", 1) in held and "l0.0" not in {
        one.group for one in (*draw.taken, *(gone for gone, _ in draw.dropped))
    }
    assert all(run.supply.intake.buffer.holds(one) for one in draw.taken)


def test_the_paced_lane_is_held_by_its_versions_and_never_asked() -> None:
    run = run_of(usual(0), usual(1), lanes={"usual": LaneConfig(max_mean_abs_log_ratio=1e-9)})
    assert len(drawn(run).taken) == 2
