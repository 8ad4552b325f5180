"""What stays of a run: enough to resume, enough to replay the whole horizon, and never more than a bounded number."""

import asyncio
import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ledger.audit import audit
from infra.log.memory import MemoryBus
from infra.settings.config import Keep
from infra.store.memory import MemoryStore
from schemas import Batch, Fence, topics
from schemas.journal import effective
from tests.trainer.memory_run import CONFIG, FLOOR, STEPS, block, filled_log, journal, train
from trainer.config import SLOTS, LaneConfig
from trainer.journal.checkpoint import (
    CheckpointPlace,
    CheckpointTime,
    Manifest,
    Position,
    journal_begin,
    kept,
    load_newest,
    trim_below,
    uses_below,
)
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.saving import trim_journal


def pruned(gaps_ms: list[int], newest: int, keep_ms: int) -> tuple[list[CheckpointTime], list[CheckpointTime]]:
    """All checkpoints of a run that prunes after each, and those that are left at its end."""
    made: list[CheckpointTime] = []
    left: list[CheckpointTime] = []
    for step, gap in enumerate(gaps_ms):
        one = CheckpointTime(CheckpointPlace(step, 1), (made[-1].time_ms if made else 10**12) + gap)
        made.append(one)
        stay = kept([*left, one], newest=newest, keep_ms=keep_ms)
        left = [mark for mark in [*left, one] if mark.place in stay]
        assert len(left) <= newest + SLOTS + 2
    return made, left


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=80), st.integers(3, 6), st.integers(1, 100_000))
def test_the_newest_stay_and_everything_inside_the_horizon_can_be_replayed(
    gaps_ms: list[int], newest: int, keep_ms: int
) -> None:
    made, left = pruned(gaps_ms, newest, keep_ms)
    assert left[-newest:] == made[-newest:]
    begins_ms = made[-1].time_ms - keep_ms
    assert left[0].time_ms <= begins_ms or left[0] == made[0], "the first one inside could not be replayed"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=80))
def test_a_run_inside_its_horizon_can_be_replayed_from_its_first_step(gaps_ms: list[int]) -> None:
    made, left = pruned(gaps_ms, 3, 10**9)
    assert left[0] == made[0]


def test_checkpoints_thin_out_to_about_one_in_each_span_of_the_horizon() -> None:
    made, left = pruned([1000] * 1000, 3, 80_000)  # spans of 10 s
    inside = [one for one in left[:-3] if one.time_ms > made[-1].time_ms - 80_000]
    assert SLOTS - 2 <= len(inside) <= SLOTS + 1
    assert all(one.time_ms % 10_000 == 0 for one in inside)


def test_fewer_than_three_are_never_kept() -> None:
    with pytest.raises(ValueError, match="newest: got 2"):
        kept([], newest=2, keep_ms=1)


def manifest(step: int, oldest_offset: int) -> Manifest:
    return Manifest(position=Position(step=step), state="", size=0, sha256="", token=1, oldest_offset=oldest_offset)


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 1000), min_size=1), st.data())
def test_the_buffer_is_trimmed_to_what_the_neediest_kept_checkpoint_needs_and_never_above(
    needs: dict[int, int], data: st.DataObject
) -> None:
    manifests = [manifest(step, offset) for step, offset in needs.items()]
    stay = data.draw(st.sets(st.sampled_from([one.place for one in manifests]), min_size=1))
    below = trim_below(manifests, stay)
    assert all(below <= one.oldest_offset for one in manifests if one.place in stay)
    assert any(below == one.oldest_offset for one in manifests if one.place in stay)


def test_without_a_checkpoint_nothing_is_trimmed() -> None:
    assert trim_below([], []) == 0


def test_uses_reach_back_to_what_the_oldest_checkpoint_had_read_once_it_is_older_than_the_horizon() -> None:
    made = [
        Manifest(
            position=Position(step=step, buffer_next=10 * step),
            state="",
            size=0,
            sha256="",
            time_ms=10**12 + 1000 * step,
        )
        for step in range(4)
    ]
    stay = {one.place for one in made[2:]}
    assert uses_below(made, stay, keep_ms=1000) == 20
    assert uses_below(made, stay, keep_ms=1001) == 0, "what the oldest had read may be delivered again"
    assert uses_below([], set(), keep_ms=1000) == 0


def test_what_was_trained_before_the_first_checkpoint_and_is_delivered_after_it_is_not_trained_again() -> None:
    expert = LaneConfig(loss="sft", weight=0.5, max_uses=1, optional=True)
    lanes = {"usual": LaneConfig(weight=0.5), "expert": expert}
    config = msgspec.structs.replace(CONFIG, lanes=lanes, warmup=None, checkpoint_every=1)

    async def trained() -> Counter[tuple[str, int]]:
        store = MemoryStore()
        log = await filled_log(store)
        await train(log, store, ScriptedLearner(), msgspec.structs.replace(config, max_steps=6))
        for number in range(4):  # by a worker that died before it could say that it had sent them
            await log.publish(topics.BUFFER, block(number, "expert"))
        await train(log, store, ScriptedLearner(), config)
        batches = [entry for entry in await journal(log) if isinstance(entry, Batch)]
        return Counter((item.id, item.use) for batch in batches for item in batch.items if item.lane == "expert")

    times = asyncio.run(trained())
    assert len(times) == 8 and set(times.values()) == {1}


def test_a_checkpoint_remembers_the_uses_of_its_horizon_and_not_of_the_whole_run() -> None:
    async def remembered(keep: str) -> int:
        tick, store = itertools.count(step=1000), MemoryStore()
        log = await filled_log(store, MemoryBus(lambda: next(tick)))
        config = msgspec.structs.replace(CONFIG, checkpoint_every=1)
        await train(log, store, ScriptedLearner(), config, msgspec.structs.replace(FLOOR, keep=Keep(replay=keep)))
        found = load_newest(store, "t")
        assert found is not None and found.position.step >= STEPS
        return len(found.uses)

    whole = asyncio.run(remembered("30d"))
    assert whole >= 2 * STEPS
    assert asyncio.run(remembered("10s")) < whole / 2


def test_the_journal_reaches_back_to_the_newest_checkpoint_older_than_the_horizon() -> None:
    made = [
        Manifest(
            position=Position(step=step, journal_next=10 * step, journal_token=7),
            state="",
            size=0,
            sha256="",
            time_ms=10**12 + 1000 * step,
        )
        for step in range(1, 5)
    ]
    stay = {one.place for one in made[1:]}
    assert journal_begin(made, stay, keep_ms=2000) == (19, 7)
    assert journal_begin(made, stay, keep_ms=2001) == (0, -1), "another run may have written inside the horizon"
    assert journal_begin([], set(), keep_ms=1000) == (0, -1)


def test_the_journal_is_bounded_by_the_horizon_and_resume_and_audit_go_on_from_what_is_kept() -> None:
    config = msgspec.structs.replace(CONFIG, checkpoint_every=1)
    floor = msgspec.structs.replace(FLOOR, keep=Keep(replay="10s"))

    async def main() -> None:
        tick, store = itertools.count(step=1000), MemoryStore()
        log = await filled_log(store, MemoryBus(lambda: next(tick)))
        await train(log, store, ScriptedLearner(), msgspec.structs.replace(config, max_steps=STEPS - 2), floor)
        (first,), _ = (list(bound.values()) for bound in await log.bounds(topics.BATCHES))
        assert first > 10, "the journal grows with the life of the run"
        kept_records = await journal(log)
        entries, token = effective([one for one in kept_records if not isinstance(one, Fence)], "t")
        assert token == entries[0].token, "the first record kept says which lease was in force"
        before = load_newest(store, "t")
        await train(log, store, ScriptedLearner(), config, floor)  # resumes from what is kept
        after = load_newest(store, "t")
        assert before is not None and after is not None and after.position.step > before.position.step
        account = await audit(log, "t")
        assert account.is_clean

    asyncio.run(main())


def test_a_journal_is_not_trimmed_to_a_record_of_a_trainer_that_was_overtaken() -> None:
    async def begins(token: int) -> int:
        log = await filled_log(MemoryStore())
        for number in range(6):
            await log.publish(topics.BATCHES, Fence(run="t", token=token if number == 4 else 9))
        trimmed = await trim_journal(log, "t", 4, 9)
        assert trimmed == (token >= 9)
        return (await log.bounds(topics.BATCHES))[0][0]

    assert asyncio.run(begins(9)) == 4
    assert asyncio.run(begins(8)) == 0
