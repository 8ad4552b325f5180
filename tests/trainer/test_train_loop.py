"""The trainer on an in-memory log: what survives a kill at any moment, and what a newer lease does."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from infra.bus.log import Log
from infra.bus.memory import MemoryBus
from infra.config import Floor, Pacing
from infra.metrics import Metrics
from infra.store_directory import DirectoryStore
from schemas import Batch, Block, Drawn, Message, PolicyEvent, Rollback, Skip, Span, make_experience, topics
from schemas.errors import FencedOut
from trainer import checkpoint
from trainer.assemble import step_seed
from trainer.config import LaneConfig, TrainerConfig, WarmupConfig
from trainer.journal import read_journal, take_lease
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

STEPS = 12
FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=2, straggler_s=0.01))
CONFIG = TrainerConfig(
    lanes={"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1, max_uses=100, optional=True)},
    warmup=WarmupConfig(every=2, stop_at=0.5, max_steps=8, min_experiences=4, batch=4),
    checkpoint_every=3,
    max_steps=STEPS,
)


def block(sequence: int, lane: str = "usual", **header: object) -> Block:
    group = f"{lane}-{sequence}.0"
    span = Span(2, 4, 10_000) if lane == "usual" else Span(2, 4, -1, ratio=False)
    return Block(
        tuple(
            make_experience(
                tokens=[1, 2, 3 + sequence % 7, episode], logprobs=[-0.5, -0.25], messages=(Message(role="user", content="q"),),
                id=f"{group}.0-{episode}-0", group=group, episode=episode, group_size=2, spans=(span,), lane=lane,
                sequence=sequence if lane == "usual" else -1, reward=float(episode), advantage=float(episode) - 0.5, **header,
            )
            for episode in range(2)
        )
    )  # fmt: skip


async def filled_log(store: DirectoryStore) -> Log:
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    for number in range(4):
        await log.publish(topics.BUFFER, block(number, "expert"))
    await log.publish(topics.BUFFER, block(9, "expert", meta={"split": "validation"}))
    for sequence in range(2 * STEPS):
        await log.publish(topics.BUFFER, block(sequence))
    return log


async def train(log: Log, store: DirectoryStore, learner: ScriptedLearner) -> None:
    await run_trainer(
        FLOOR, CONFIG, log=log, store=store, learner=learner, metrics=Metrics("train"), stop=asyncio.Event(), seed=3
    )


async def journal(log: Log) -> list[object]:
    return [message.value async for message in log.read_all(topics.BATCHES)]


async def published(log: Log) -> list[PolicyEvent]:
    events = [message.value async for message in log.read_all(topics.POLICIES)]
    return [event for event in events if isinstance(event, PolicyEvent) and event.event == "published"]


async def unkilled(folder: Path) -> tuple[dict[str, object], list[object], list[int]]:
    store = DirectoryStore(folder)
    log = await filled_log(store)
    learner = ScriptedLearner()
    await train(log, store, learner)
    return learner.tensors(), await journal(log), [event.version for event in await published(log)]


def items_of(records: list[object]) -> dict[int, object]:
    return {record.step: record.items for record in records if isinstance(record, Batch)}


def test_a_run_trains_everything_once_and_publishes_every_version(tmp_path: Path) -> None:
    _, records, versions = asyncio.run(unkilled(tmp_path))
    batches = [record for record in records if isinstance(record, Batch)]
    trained = [item.id for batch in batches if batch.phase == "train" for item in batch.items if item.lane == "usual"]
    assert sorted(trained) == sorted(f"usual-{s}.0.0-{e}-0" for s in range(2 * STEPS) for e in range(2))
    assert versions == list(range(STEPS + 2))  # the model folder, the warm-up, then one per step
    assert not any(
        "validation" in item.id or item.id.startswith("expert-9") for batch in batches for item in batch.items
    )


class Killed(Exception):
    """The process died here."""


class KillingBus(MemoryBus):
    """A bus whose process dies at the n-th send: before it (even n) or after it was stored (odd n)."""

    def __init__(self) -> None:
        super().__init__()
        self.sends = 0
        self.kill_at = -1

    async def send(self, *args, **kwargs):
        self.sends += 1
        if self.sends == self.kill_at and self.kill_at % 2 == 0:
            raise Killed
        position = await super().send(*args, **kwargs)
        if self.sends == self.kill_at:
            raise Killed
        return position


async def ends(run: Awaitable[None]) -> bool:
    """Whether the trainer came to its end; False where it was killed."""
    try:
        await run
    except Killed:
        return False
    except BaseExceptionGroup as errors:
        if errors.subgroup(Killed) is None:
            raise
        return False
    return True


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8])
def test_a_trainer_killed_at_any_send_ends_with_the_same_weights_and_batches(tmp_path: Path, every: int) -> None:
    async def main() -> None:
        expected, records, versions = await unkilled(tmp_path / "whole")
        store = DirectoryStore(tmp_path / "killed")
        log = await filled_log(store)
        bus = KillingBus()
        bus.__dict__.update({**log.bus.__dict__, "sends": 0, "kill_at": -1})
        log = Log(bus, "t", store=store)
        for kill in range(200):
            learner = ScriptedLearner()
            bus.sends, bus.kill_at = 0, 3 + kill * every % 23 + kill // 4
            if await ends(train(log, store, learner)):
                break
        else:
            raise AssertionError("the run never ended")
        assert kill > 3, "nothing was killed"
        assert learner.tensors() == expected
        assert items_of(await journal(log)) == items_of(records)
        assert sorted({event.version for event in await published(log)}) == versions

    asyncio.run(main())


def test_a_newer_lease_ends_the_older_trainer(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        log = Log(MemoryBus(), "t", store=store)
        await log.create_topics(partitions=2, keep_ms=-1)
        running = asyncio.create_task(train(log, store, ScriptedLearner()))
        async for message in log.read_all(topics.POLICIES, until_end=False):
            if isinstance(message.value, PolicyEvent) and message.value.event == "published":
                break
        await take_lease(log, policy="main", run="t", owner="newer")
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(10):
                await running
        assert caught.group_contains(FencedOut)

    asyncio.run(main())


def test_an_overtaken_lease_cannot_read_the_journal_as_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t")
        await log.create_topics(partitions=1, keep_ms=-1)
        old = await take_lease(log, policy="main", run="t", owner="old")
        await take_lease(log, policy="main", run="t", owner="new")
        with pytest.raises(FencedOut):
            await read_journal(log, old)

    asyncio.run(main())


def test_a_step_that_is_not_finite_is_skipped_recorded_and_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        log = await filled_log(store)
        await train(log, store, ScriptedLearner(fail_at=(step_seed(3, 12),)))
        records = await journal(log)
        assert [record.step for record in records if isinstance(record, Skip)] == [12]
        manifests = {event.version: event for event in await published(log)}
        assert len(manifests) == STEPS + 2

    asyncio.run(main())


def test_repeated_skips_restore_the_last_good_policy_as_a_higher_version(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        log = await filled_log(store)
        failing = tuple(step_seed(3, step) for step in (15, 16, 17))
        await train(log, store, ScriptedLearner(fail_at=failing))
        rollbacks = [record for record in await journal(log) if isinstance(record, Rollback)]
        assert len(rollbacks) == 1 and rollbacks[0].to_step == 17
        assert rollbacks[0].version > rollbacks[0].restored_version

    asyncio.run(main())


def test_groups_past_the_bound_are_dropped_with_a_reason_and_told_to_the_master(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        log = await filled_log(store)
        old = block(500)
        stale = Block(tuple(one.with_bulk(spans=(Span(2, 4, 0),)) for one in old.experiences))
        running = asyncio.create_task(train(log, store, ScriptedLearner()))
        told: dict[str, str] = {}
        async with asyncio.timeout(20):
            async for message in log.read_all(topics.PROGRESS, until_end=False):
                if isinstance(message.value, Drawn):
                    if message.value.version == 4:
                        await log.publish(topics.BUFFER, stale)
                    told |= message.value.dropped
                    if told:
                        break
        await running
        assert told == {old.group: "stale"}

    asyncio.run(main())


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        log = await filled_log(store)
        learner = ScriptedLearner()
        await train(log, store, learner)
        steps = checkpoint.steps(store, "t")
        newest = checkpoint.load(store, "t", steps[-1])
        key = f"checkpoints/t/{steps[-1] + 1:012d}/state.safetensors"
        store.put(key, store.get(key)[:-1])
        older = checkpoint.load_newest(store, "t")
        assert older is not None and older.position.step < newest.position.step
        again = ScriptedLearner()
        await train(log, store, again)
        assert again.tensors() == learner.tensors()

    asyncio.run(main())
