"""A trainer killed at any write to the store, and what the master is told after it: nothing is forgotten on the way."""

import asyncio
from pathlib import Path

import pytest

from infra.log.log import Log
from infra.store.directory import DirectoryStore
from infra.store.store import Pieces
from schemas import Batch, Drawn, ids, topics
from tests.trainer.memory_run import Killed, KillingBus, ends, filled_log, journal, published, train
from tests.trainer.test_train_loop import items_of, unkilled
from trainer.journal import checkpoint
from trainer.learners.scripted import ScriptedLearner


class KillingStore(DirectoryStore):
    """Dies at the n-th put: before it (even n) or after it was stored (odd n)."""

    puts = 0
    kill_at = -1

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        self.puts += 1
        if self.puts == self.kill_at and self.kill_at % 2 == 0:
            raise Killed
        super().put_pieces(key, pieces)
        if self.puts == self.kill_at:
            raise Killed


async def drawn(log: Log) -> set[str]:
    """Groups the master was told of."""
    messages = [message.value async for message in log.read_all(topics.PROGRESS)]
    return {group for one in messages if isinstance(one, Drawn) for group in one.groups}


def usual_groups(records: list[object]) -> set[str]:
    return {ids.group_of(item.id) for items in items_of(records).values() for item in items if item.lane == "usual"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("every", [2, 7, 1, 3, 4])
def test_a_trainer_killed_at_any_put_ends_with_the_same_weights_and_batches(tmp_path: Path, every: int) -> None:
    async def main() -> None:
        expected, records, versions = await unkilled(tmp_path / "whole")
        store = KillingStore(tmp_path / "killed")
        log = await filled_log(store)
        for kill in range(300):
            learner = ScriptedLearner()
            store.puts, store.kill_at = 0, 1 + kill * every % 11 + kill // 5
            if await ends(train(log, store, learner)):
                break
        else:
            raise AssertionError("the run never ended")
        assert kill > 3, "nothing was killed"
        assert learner.tensors() == expected
        assert items_of(await journal(log)) == items_of(records)
        assert sorted({event.version for event in await published(log)}) == versions
        steps = [record.step for record in await journal(log) if isinstance(record, Batch)]
        assert len(steps) == len(set(steps)), "a step was journaled again instead of being executed again"

    asyncio.run(main())


@pytest.mark.parametrize("kill_at", [2, 3, 4, 5])
def test_a_checkpoint_written_while_the_journal_is_executed_again_passes_over_nothing(
    tmp_path: Path, kill_at: int
) -> None:
    async def main() -> None:
        store = KillingStore(tmp_path)
        log = await filled_log(store)
        learner = ScriptedLearner()
        await train(log, store, learner)
        checkpoint.remove(store, "t", checkpoint.places(store, "t")[1:])
        store.puts, store.kill_at = 0, kill_at
        assert not await ends(train(log, store, ScriptedLearner()))
        store.kill_at = -1
        again = ScriptedLearner()
        await train(log, store, again)
        assert again.tensors() == learner.tensors()
        steps = [record.step for record in await journal(log) if isinstance(record, Batch)]
        assert len(steps) == len(set(steps)), "a step was journaled again instead of being executed again"

    asyncio.run(main())


@pytest.mark.parametrize("first", range(4, 56, 4))
def test_the_master_is_told_of_every_step_also_when_its_trainer_died_before_telling(tmp_path: Path, first: int) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        log = await filled_log(store)
        bus = KillingBus()
        bus.__dict__.update({**log.bus.__dict__, "sends": 0, "kill_at": first})
        log = Log(bus, "t", store=store)
        assert not await ends(train(log, store, ScriptedLearner()))
        bus.kill_at = -1
        await train(log, store, ScriptedLearner())
        assert await drawn(log) == usual_groups(await journal(log))

    asyncio.run(main())
