"""The trainer on an in-memory log: what survives a kill at any moment, and what a newer lease does."""

import asyncio
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.tensors import Tensor
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import Batch, Block, Closure, Drawn, Fence, PolicyEvent, Rollback, Saved, Skip, Span, encode, ids, topics
from schemas.errors import OffsetOutOfRange
from tests.role import role_of
from tests.trainer.memory_run import (
    CONFIG,
    FLOOR,
    STEPS,
    KillingBus,
    KillingStore,
    PutsThatKill,
    block,
    ends,
    filled_log,
    journal,
    new_run,
    published,
    train,
    train_through_kills,
)
from trainer.batch.assemble import step_seed
from trainer.buffer.buffer import Uses
from trainer.buffer.intake import Intake
from trainer.config import LaneConfig, TrainerConfig, WarmupConfig
from trainer.journal import checkpoint
from trainer.journal.checkpoint import Checkpoint, Position, places, remove, save
from trainer.journal.journal import Lease, take_lease
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.report import TrainerReport
from trainer.loop.saving import write_checkpoint
from trainer.loop.state import Run
from trainer.replay.resume import find_start, resume

DEMONSTRATIONS = 5  # of a filled log, before its groups


async def unkilled(folder: Path) -> tuple[dict[str, object], list[object], list[int]]:
    store = DirectoryStore(folder)
    log = await filled_log(store)
    learner = ScriptedLearner()
    await train(log, store, learner)
    return learner.tensors(), await journal(log), [event.version for event in await published(log)]


def journaled_items(records: list[object]) -> dict[int, object]:
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


async def test_what_is_longer_than_the_context_is_told_and_all_else_is_trained(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    log = await filled_log(store)
    short = block(0, "expert").experiences[0]
    spans = (Span(2, 5, -1, ratio=False),)
    long = short.with_bulk(tokens=[1, 2, 3, 4, 5], logprobs=[0.0, 0.0, 0.0], spans=spans)
    long = msgspec.structs.replace(long, id="long.0.0-0-0", group="long.0", group_size=1)
    await log.publish(topics.BUFFER, Block((long,)))
    await train(log, store, ScriptedLearner(), max_tokens=4)
    assert await told_dropped(log) == {"long.0": "longer than the context"}
    trained = {item.id for entry in await journal(log) if isinstance(entry, Batch) for item in entry.items}
    assert len([name for name in trained if name.startswith("usual-")]) == 4 * STEPS and "long.0.0-0-0" not in trained


async def check_killed(folder: Path, log: Log, store: Store, arm: Callable[[int], None], *, kills: int) -> None:
    """Train until a start ends by itself; weights, batches and versions are those of a run without a kill. arm: sets when the
    start of this number dies. kills: most starts.
    """
    expected, records, versions = await unkilled(folder / "whole")
    for kill in range(kills):
        learner = ScriptedLearner()
        arm(kill)
        if await ends(train(log, store, learner)):
            break
    else:
        raise AssertionError("the run never ended")
    assert kill > 3, "nothing was killed"
    assert learner.tensors() == expected
    assert journaled_items(await journal(log)) == journaled_items(records)
    assert sorted({event.version for event in await published(log)}) == versions
    assert all(event.parent == event.version - 1 for event in await published(log))


@pytest.mark.parametrize("every", [3, 8, 1, 2, 5])
async def test_a_trainer_killed_at_any_send_ends_with_the_same_weights_and_batches(tmp_path: Path, every: int) -> None:
    store = DirectoryStore(tmp_path / "killed")
    log = await filled_log(store)
    bus = KillingBus()
    bus.__dict__.update({**log.bus.__dict__, "sends": 0, "kill_at": -1})
    log = Log(bus, "t", store=store)

    def arm(kill: int) -> None:
        bus.sends, bus.kill_at = 0, 3 + kill * every % 23 + kill // 4

    await check_killed(tmp_path, log, store, arm, kills=200)


async def test_groups_past_the_bound_are_dropped_with_a_reason_and_told_to_the_master(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    log = await filled_log(store)
    old = block(500)
    stale = Block(tuple(experience.with_bulk(spans=(Span(2, 4, 0),)) for experience in old.experiences))
    running = asyncio.create_task(train(log, store, ScriptedLearner()))
    told: dict[str, str] = {}
    async with asyncio.timeout(20):
        async for message in log.tail(topics.PROGRESS, "beginning"):
            if isinstance(message.value, Drawn):
                if message.value.version == 4:
                    await log.publish(topics.BUFFER, stale)
                told |= message.value.dropped
                if told:
                    break
    await running
    assert told == {old.group: "stale"}


async def test_a_checkpoint_of_steps_that_were_rolled_back_later_is_passed_over() -> None:
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


async def test_a_checkpoint_is_told_and_written_before_its_version_is_published() -> None:
    tick = itertools.count()
    store = MemoryStore()
    log = await filled_log(store, MemoryBus(lambda: next(tick)))
    await train(log, store, ScriptedLearner())
    saved = {
        each.value.version: each.timestamp_ms
        async for each in log.scan(topics.BATCHES)
        if isinstance(each.value, Saved)
    }
    published = {
        each.value.version: each.timestamp_ms
        async for each in log.scan(topics.POLICIES)
        if isinstance(each.value, PolicyEvent) and each.value.event == "published"
    }
    assert len(saved) > 3 and all(time < published[version] for version, time in saved.items())


@pytest.mark.parametrize("send", range(2, 40))
async def test_skips_in_a_row_are_counted_across_a_death_between_them(send: int) -> None:
    config = msgspec.structs.replace(CONFIG, checkpoint_every=1, warmup=None, max_steps=8)
    failing = tuple(step_seed(3, step) for step in (3, 4, 5))
    bus, store = KillingBus(), KillingStore()
    log = await filled_log(store, bus)
    learner = functools.partial(ScriptedLearner, fail_at=failing)
    _, died = await train_through_kills(bus, store, learner, [(send, -1)], log, config)
    assert died == 1
    records = await journal(log)
    assert {record.step for record in records if isinstance(record, Skip)} == {3, 4}
    assert [record.to_step for record in records if isinstance(record, Rollback)] == [5]


async def test_a_rollback_in_the_warm_up_publishes_nothing_before_its_end() -> None:
    log, store = await new_run()
    learner = ScriptedLearner(fail_at=(step_seed(3, 1), step_seed(3, 2)))
    await train(log, store, learner, msgspec.structs.replace(CONFIG, max_skips=2))
    records = await journal(log)
    assert [record.version for record in records if isinstance(record, Rollback)] == [0]
    first = min(record.step for record in records if isinstance(record, Batch) and record.phase == "train")
    assert [(event.version, event.step) for event in await published(log)][:2] == [(0, -1), (1, first - 1)]


@pytest.mark.parametrize("topic", [topics.BUFFER, topics.BATCHES], ids=lambda topic: topic.name)
async def test_a_resume_whose_segment_was_deleted_says_so_and_overwrites_nothing(topic: topics.Topic) -> None:
    log, store = await new_run()
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=STEPS // 2))
    name = log.name(topic)
    remove(store, "t", [places(store, "t")[-1]])  # so that what follows the one before is asked of the log
    (at, end), *_ = (await log.bus.end_offsets(name)).items()
    await log.bus.delete_records(at, end)
    before, count = {key: store.get(key) for key in store.keys("")}, len(await published(log))
    with pytest.raises(OffsetOutOfRange, match=rf"t\.{topic.name}/0: offset \d+ is not kept"):
        await train(log, store, ScriptedLearner())
    assert {key: store.get(key) for key in store.keys("")} == before and len(await published(log)) == count


async def test_a_trainer_starts_where_retention_took_closures_that_it_had_not_read() -> None:
    log, store = await new_run()
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=STEPS // 2))
    told = await log.publish(topics.PROGRESS, Drawn(token=0, step=0, version=0, groups=()))
    await log.bus.delete_records(Partition(log.name(topics.PROGRESS), 0), told.offset + 1)
    before = len(await published(log))
    await train(log, store, ScriptedLearner())
    assert len(await published(log)) == before + STEPS // 2


async def started(log: Log, store: Store, config: TrainerConfig = CONFIG) -> Run:
    role, lease = role_of("train", FLOOR, log, store), await take_lease(log, policy="main", run="t", owner="train/1")
    return await resume(role, config, lease, ScriptedLearner(), seed=3, report=TrainerReport(role.metrics, "t"))


async def test_a_restart_waits_for_no_group_that_was_closed_or_dropped_before_its_checkpoint() -> None:
    log, store = await new_run()

    def arrive(intake: Intake, *numbers: int) -> None:
        for number in numbers:
            assert intake.keep(DEMONSTRATIONS + number, encode(block(number)), block(number), b"") == ""

    run = await started(log, store)
    arrive(run.supply.intake, 0, 1, 3)
    run.supply.intake.buffer.discard(DEMONSTRATIONS + 1, "usual")
    run.supply.intake.take_closure(Closure(group="usual-2.0", sequence=2, outcome="dropped"))
    await write_checkpoint(run, 0)
    again = (await started(log, store)).supply.intake
    arrive(again, 5)
    assert again.absent() == [4]


async def test_a_restart_in_the_warm_up_counts_the_demonstrations_that_were_used_up_before_its_checkpoint() -> None:
    log, store = await new_run()
    lanes = CONFIG.lanes | {"expert": LaneConfig(loss="sft", optional=True)}
    config = msgspec.structs.replace(CONFIG, lanes=lanes)
    run = await started(log, store, config)
    buffer = run.supply.intake.buffer
    for number in range(4):
        buffer.add(number, encode(block(number, "expert")), block(number, "expert"))
    buffer.take(buffer.candidates("expert")[:3])
    await write_checkpoint(run, 0)
    assert (await started(log, store, config)).supply.intake.buffer.num_heard("expert") == buffer.num_heard("expert")


def test_a_warm_up_on_a_lane_that_is_not_trained_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup.lane: got expert, expected a lane of \[trainer.lanes\] \(usual\)"):
        TrainerConfig(warmup=WarmupConfig())


async def test_a_warm_up_drops_what_its_loss_cannot_learn_from() -> None:
    log, store = await new_run()
    lanes = CONFIG.lanes | {"expert": LaneConfig(optional=True)}
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, lanes=lanes))
    assert await told_dropped(log) == {f"expert-{number}.0": "no ratio" for number in range(4)}
    assert {entry.phase for entry in await journal(log) if isinstance(entry, Batch)} == {"train"}


async def told_dropped(log: Log) -> dict[str, str]:
    told = [each.value async for each in log.scan(topics.PROGRESS) if isinstance(each.value, Drawn)]
    return {group: reason for each in told for group, reason in each.dropped.items()}


async def test_a_start_tells_which_waiting_groups_it_refuses_and_why() -> None:
    log, store = await new_run()
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=STEPS - 1))
    lanes = {lane: config for lane, config in CONFIG.lanes.items() if lane == "usual"}
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, lanes=lanes, warmup=None))
    assert await told_dropped(log) == {f"expert-{number}.0": "lane not trained" for number in range(4)}


class KillingFolder(PutsThatKill, DirectoryStore):
    """A store in a folder whose process dies at the n-th put."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self.put_counted():
            super().put(key, data)


async def drawn(log: Log) -> set[str]:
    """Groups the master was told of."""
    messages = [message.value async for message in log.scan(topics.PROGRESS)]
    return {group for message in messages if isinstance(message, Drawn) for group in message.groups}


@pytest.mark.parametrize("every", [2, 7, 1, 3, 4])
async def test_a_trainer_killed_at_any_put_ends_with_the_same_weights_and_batches(tmp_path: Path, every: int) -> None:
    store = KillingFolder(tmp_path / "killed")
    log = await filled_log(store)

    def arm(kill: int) -> None:
        store.puts, store.kill_at = 0, 1 + kill * every % 11 + kill // 5

    await check_killed(tmp_path, log, store, arm, kills=300)
    steps = [record.step for record in await journal(log) if isinstance(record, Batch)]
    assert len(steps) == len(set(steps)), "a step was journaled again instead of being executed again"


@pytest.mark.parametrize("kill_at", [2, 3, 4, 5])
async def test_a_checkpoint_written_while_the_journal_is_executed_again_passes_over_nothing(
    tmp_path: Path, kill_at: int
) -> None:
    store = KillingFolder(tmp_path)
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


@pytest.mark.parametrize("first", range(4, 56, 4))
async def test_the_master_is_told_of_every_step_also_when_its_trainer_died_before_telling(
    tmp_path: Path, first: int
) -> None:
    store = DirectoryStore(tmp_path)
    log = await filled_log(store)
    bus = KillingBus()
    bus.__dict__.update({**log.bus.__dict__, "sends": 0, "kill_at": first})
    log = Log(bus, "t", store=store)
    assert not await ends(train(log, store, ScriptedLearner()))
    bus.kill_at = -1
    await train(log, store, ScriptedLearner())
    items = [item for record in await journal(log) if isinstance(record, Batch) for item in record.items]
    assert await drawn(log) == {ids.experience_group(item.id) for item in items if item.lane == "usual"}
