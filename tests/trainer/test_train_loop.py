"""The trainer on an in-memory log: what survives a kill at any moment, and what a newer lease does."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.directory import DirectoryStore
from schemas import Batch, Block, Drawn, Rollback, Skip, Span, topics
from schemas.errors import FencedOut
from tests.trainer.memory_run import STEPS, KillingBus, block, ends, filled_log, journal, published, train
from trainer.batch.assemble import step_seed
from trainer.journal.journal import read_journal, take_lease
from trainer.learners.scripted import ScriptedLearner


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
    told = [each.value async for each in log.read_all(topics.PROGRESS) if isinstance(each.value, Drawn)]
    assert {name: why for each in told for name, why in each.dropped.items()} == {"long.0": "longer than the context"}
    trained = {item.id for entry in await journal(log) if isinstance(entry, Batch) for item in entry.items}
    assert len([name for name in trained if name.startswith("usual-")]) == 4 * STEPS and "long.0.0-0-0" not in trained


@pytest.mark.parametrize("every", [3, 8, 1, 2, 5])
async def test_a_trainer_killed_at_any_send_ends_with_the_same_weights_and_batches(tmp_path: Path, every: int) -> None:
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
    assert journaled_items(await journal(log)) == journaled_items(records)
    assert sorted({event.version for event in await published(log)}) == versions


async def test_an_overtaken_lease_cannot_read_the_journal_as_its_own(tmp_path: Path) -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    old = await take_lease(log, policy="main", run="t", owner="old")
    await take_lease(log, policy="main", run="t", owner="new")
    with pytest.raises(FencedOut):
        await read_journal(log, old)


async def test_a_step_that_is_not_finite_is_skipped_recorded_and_changes_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    log = await filled_log(store)
    await train(log, store, ScriptedLearner(fail_at=(step_seed(3, 12),)))
    records = await journal(log)
    assert [record.step for record in records if isinstance(record, Skip)] == [12]
    manifests = {event.version: event for event in await published(log)}
    assert len(manifests) == STEPS + 2


async def test_repeated_skips_restore_the_last_good_policy_as_a_higher_version(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    log = await filled_log(store)
    failing = tuple(step_seed(3, step) for step in (15, 16, 17))
    await train(log, store, ScriptedLearner(fail_at=failing))
    rollbacks = [record for record in await journal(log) if isinstance(record, Rollback)]
    assert len(rollbacks) == 1 and rollbacks[0].to_step == 17
    assert rollbacks[0].version > rollbacks[0].restored_version


async def test_groups_past_the_bound_are_dropped_with_a_reason_and_told_to_the_master(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    log = await filled_log(store)
    old = block(500)
    stale = Block(tuple(experience.with_bulk(spans=(Span(2, 4, 0),)) for experience in old.experiences))
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
