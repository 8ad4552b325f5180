"""Where a resume begins, and in which order what it relies on is written."""

import asyncio
import functools
import itertools

import msgspec
import pytest

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from schemas import Fence, PolicyEvent, Rollback, Saved, Skip, topics
from schemas.errors import OffsetOutOfRange
from tests.trainer.memory_run import (
    CONFIG,
    STEPS,
    KillingBus,
    KillingStore,
    filled_log,
    journal,
    published,
    train,
    train_through_kills,
)
from trainer.batch.assemble import step_seed
from trainer.buffer.buffer import Uses
from trainer.journal.checkpoint import Checkpoint, Position, places, remove, save
from trainer.journal.journal import Lease
from trainer.learners.scripted import ScriptedLearner
from trainer.replay.resume import find_start


def test_a_checkpoint_of_steps_that_were_rolled_back_later_is_passed_over() -> None:
    async def main() -> None:
        log, store = Log(MemoryBus(), "t"), MemoryStore()
        await log.create_topics(partitions=1, keep_ms=-1)
        await log.publish(topics.BATCHES, Fence(run="r", token=1))
        for step in (3, 5):
            weights = {"weights": Tensor("F32", (1,), bytes(4))}
            save(store, "r", Checkpoint(Position(step=step, journal_next=1), weights, Uses(), ()), token=1)
        lease = Lease(run="r", token=1, owner="")
        state, _ = await find_start(log, store, lease)
        assert state is not None and state.position.step == 5
        back = Rollback(run="r", token=1, from_step=4, to_step=6, restored_version=3, version=7, reason="alarm")
        await log.publish(topics.BATCHES, back)
        state, found = await find_start(log, store, lease)
        assert state is not None and state.position.step == 3 and found.entries == (back,)

    asyncio.run(main())


def test_a_checkpoint_is_told_and_written_before_its_version_is_published() -> None:
    async def main() -> None:
        tick = itertools.count()
        store = MemoryStore()
        log = await filled_log(store, MemoryBus(lambda: next(tick)))
        await train(log, store, ScriptedLearner())
        saved = {
            one.value.version: one.timestamp_ms
            async for one in log.read_all(topics.BATCHES)
            if isinstance(one.value, Saved)
        }
        published = {
            one.value.version: one.timestamp_ms
            async for one in log.read_all(topics.POLICIES)
            if isinstance(one.value, PolicyEvent) and one.value.event == "published"
        }
        assert len(saved) > 3 and all(time < published[version] for version, time in saved.items())

    asyncio.run(main())


@pytest.mark.parametrize("send", range(2, 40))
def test_skips_in_a_row_are_counted_across_a_death_between_them(send: int) -> None:
    async def main() -> None:
        config = msgspec.structs.replace(CONFIG, checkpoint_every=1, warmup=None, max_steps=8)
        failing = tuple(step_seed(3, step) for step in (3, 4, 5))
        bus, store = KillingBus(), KillingStore()
        log = await filled_log(store, bus)
        learner = functools.partial(ScriptedLearner, fail_at=failing)
        _, died = await train_through_kills(bus, store, learner, [(send, -1)], log, config)
        assert died == 1
        records = await journal(log)
        assert {one.step for one in records if isinstance(one, Skip)} == {3, 4}
        assert [one.to_step for one in records if isinstance(one, Rollback)] == [5]

    asyncio.run(main())


@pytest.mark.parametrize("topic", [topics.BUFFER, topics.BATCHES], ids=lambda topic: topic.name)
def test_a_resume_whose_segment_was_deleted_says_so_and_overwrites_nothing(topic: topics.Topic) -> None:
    async def main() -> None:
        store = MemoryStore()
        log = await filled_log(store)
        await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=STEPS // 2))
        name = log.name(topic)
        remove(store, "t", [places(store, "t")[-1]])  # so that what follows the one before is asked of the log
        (at, end), *_ = (await log.bus.end_offsets(name)).items()
        await log.bus.delete_records(at, end)
        before, count = {key: store.get(key) for key in store.keys("")}, len(await published(log))
        with pytest.raises(OffsetOutOfRange, match=rf"t\.{topic.name}/0: offset \d+ is not kept"):
            await train(log, store, ScriptedLearner())
        assert {key: store.get(key) for key in store.keys("")} == before and len(await published(log)) == count

    asyncio.run(main())
