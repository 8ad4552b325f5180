"""A checkpoint is stored beside the next step, and the version that falls due with it comes out after it."""

import asyncio
import threading

import pytest

from infra.store.memory import MemoryStore
from schemas import Batch
from schemas.errors import StoreError
from tests.trainer.memory_run import filled_log, journal, published, train
from trainer.batch.batch import PackedBatch
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal import checkpoint
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner

CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=3, max_steps=6)
THIRD = "checkpoints/t/000000000003-"  # the checkpoint after three steps, which three more follow


class CountingLearner(ScriptedLearner):
    """Says when it takes its fourth step."""

    steps = 0
    fourth = threading.Event()

    def step(self, batch: PackedBatch, **how: object) -> StepStats:  # type: ignore[override]
        self.steps += 1
        if self.steps == 4:
            self.fourth.set()
        return super().step(batch, **how)  # type: ignore[arg-type]


class SlowStore(MemoryStore):
    """Stores the third checkpoint's state only once the step after it is taken. failing: or not at all."""

    def __init__(self, learner: CountingLearner, *, failing: bool = False) -> None:
        super().__init__()
        self.puts: list[str] = []
        self._learner = learner
        self._failing = failing

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(THIRD) and "/state-" in key:
            assert self._learner.fourth.wait(60), "the step waits for the upload"
            if self._failing:
                raise StoreError(f"put {key}: no space")
        super().put(key, data)
        self.puts.append(key)


def learner() -> CountingLearner:
    found = CountingLearner()
    found.fourth = threading.Event()
    return found


def test_the_next_step_is_taken_while_a_checkpoint_is_being_stored() -> None:
    async def main() -> None:
        one = learner()
        store = SlowStore(one)
        log = await filled_log(store)
        await train(log, store, one, CONFIG)
        batches = [record for record in await journal(log) if isinstance(record, Batch)]
        assert [batch.step for batch in batches] == [*range(6)]
        assert [batch.version for batch in batches] == [*range(6)], "a batch names the version of the weights it meets"
        assert [event.version for event in await published(log)] == [*range(7)]
        assert [event.step for event in await published(log)] == [-1, *range(6)]

    asyncio.run(main())


def test_a_version_comes_out_after_the_checkpoint_that_falls_due_with_it() -> None:
    async def main() -> None:
        one = learner()
        store = SlowStore(one)
        await train(await filled_log(store), store, one, CONFIG)
        (written,) = [
            at for at, key in enumerate(store.puts) if key.startswith(THIRD) and key.endswith("manifest.json")
        ]
        (out,) = [at for at, key in enumerate(store.puts) if key.endswith("manifests/3.json")]
        assert written < out

    asyncio.run(main())


def test_a_failed_upload_ends_the_trainer_and_the_older_checkpoint_is_where_the_next_goes_on() -> None:
    async def main() -> None:
        one = learner()
        store = SlowStore(one, failing=True)
        log = await filled_log(store)
        with pytest.raises(ExceptionGroup) as failed:
            await train(log, store, one, CONFIG)
        assert failed.group_contains(StoreError, match="no space")
        found = checkpoint.load_newest(store, "t")
        assert found is not None and found.position.step == -1
        assert [event.version for event in await published(log)] == [0, 1, 2]
        again, whole, alone = learner(), learner(), MemoryStore()
        again.fourth.set()
        store._failing, store._learner = False, again
        await train(log, store, again, CONFIG)
        await train(await filled_log(alone), alone, whole, CONFIG)
        assert again.tensors() == whole.tensors()
        assert [event.version for event in await published(log)] == [*range(7)]

    asyncio.run(main())
