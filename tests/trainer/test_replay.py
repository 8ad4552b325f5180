"""A run done again from the log and a kept checkpoint: equal at every checkpoint ever made, or an error that names why."""

import importlib
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.chain.insert import ProcessorConfig
from infra.chain.processor import Drop, processor
from infra.ledger.forget import destroy
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Keep
from infra.store.memory import MemoryStore
from infra.store.seal import Keys
from infra.store.store import Store
from schemas import Batch, Block, Experience, Rollback, Saved, encode, topics
from schemas.errors import ConfigError, HeadraceError
from schemas.fields import Lane
from tests.infra.ledger.ledger_records import TENANT, USER, log_with_ann
from tests.trainer.memory_run import (
    CONFIG,
    FLOOR,
    STEPS,
    KillingBus,
    KillingStore,
    block,
    filled_log,
    journal,
    new_run,
    replaying,
    train,
    train_through_kills,
)
from trainer.batch.assemble import build_batch, step_seed
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal import checkpoint
from trainer.journal.origin import code_hash, modules
from trainer.learners.learner import Learner
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.state import Learning
from trainer.replay.replay import Compared, ReplayStart, find_start, lost_steps, replay


async def replayed(
    log: Log,
    store: Store,
    learner: Learner | None = None,
    config: TrainerConfig = CONFIG,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> tuple[list[Compared], Learning, ReplayStart]:
    start = await find_start(log, store, "t", from_step=from_step, to_step=to_step)
    run = replaying(learner or ScriptedLearner(), config)
    return [compared async for compared in replay(run, "t", log, store, start)], run, start


class ReadOnlyBus(MemoryBus):
    async def send(self, *args, **kwargs):
        raise AssertionError("a replay wrote to the log")

    async def delete_records(self, *args, **kwargs):
        raise AssertionError("a replay trimmed the log")


class ReadOnlyStore(MemoryStore):
    def put(self, key: str, data: bytes) -> None:
        raise AssertionError("a replay wrote to the store")

    def delete(self, key: str) -> None:
        raise AssertionError("a replay removed something")


def read_only(log: Log, store: MemoryStore) -> tuple[Log, Store]:
    bus, shut = ReadOnlyBus(), ReadOnlyStore()
    bus.__dict__.update(log.bus.__dict__)
    shut.__dict__.update(store.__dict__)
    return Log(bus, "t", store=shut), shut


async def finished_run(**options: Any) -> tuple[Log, MemoryStore, ScriptedLearner]:
    log, store = await new_run()
    learner = ScriptedLearner(**options)
    await train(log, store, learner)
    return log, store, learner


async def test_every_checkpoint_ever_made_is_found_again_and_nothing_is_written() -> None:
    log, store, learner = await finished_run()
    told = [entry for entry in await journal(log) if isinstance(entry, Saved)]
    assert len(told) > len(checkpoint.places(store, "t")), "some were pruned"
    found, again, start = await replayed(*read_only(log, store))
    assert [each.step for each in found] == [each.step for each in told]
    assert all(each.equal and not each.fault for each in found)
    assert [each.got for each in found] == [each.sha256 for each in told]
    assert again.learner.tensors() == learner.tensors()
    assert start.survey.num_steps == again.position.step + 1


async def test_a_replay_may_begin_and_end_anywhere() -> None:
    log, store, _ = await finished_run()
    newest = checkpoint.places(store, "t")[-1].step
    whole, _, _ = await replayed(log, store)
    by_step = {each.step: each.got for each in whole}
    part, _, start = await replayed(log, store, from_step=newest - 1, to_step=newest)
    assert start.manifest.place.step < newest and len(part) == 2
    assert all(each.equal and each.got == by_step[each.step] for each in part)
    only, again, _ = await replayed(log, store, to_step=-1)
    assert [each.step for each in only] == [-1] and again.position.step == -1
    with pytest.raises(ConfigError, match="--from -2"):
        await replayed(log, store, from_step=-2)


FAILING = tuple(step_seed(3, step) for step in (12, 15, 16, 17))


async def test_skips_and_rollbacks_are_taken_from_the_journal() -> None:
    log, store, learner = await finished_run(fail_at=FAILING)
    assert sum(isinstance(entry, Rollback) for entry in await journal(log)) == 1
    found, again, _ = await replayed(log, store)  # whose own steps are all finite
    assert all(each.equal for each in found) and again.learner.tensors() == learner.tensors()


@pytest.mark.parametrize("first", range(3, 59, 4))
async def test_a_run_killed_around_a_rollback_quarantines_the_same_steps(first: int) -> None:
    expected = (await finished_run(fail_at=FAILING))[0]
    bus, store = KillingBus(), KillingStore()
    log = await filled_log(store, bus)
    sends = [(first + more, -1) for more in (0, 1, 2, 3)]
    learner, died = await train_through_kills(bus, store, lambda: ScriptedLearner(fail_at=FAILING), sends, log)
    assert died
    assert undone(await journal(log)) == undone(await journal(expected))
    found, again, _ = await replayed(log, store)
    assert all(each.equal for each in found) and again.learner.tensors() == learner.tensors()


def undone(records: list[object]) -> set[tuple[int, int, int]]:
    return {(record.from_step, record.to_step, record.version) for record in records if isinstance(record, Rollback)}


@processor(version=1, inline=True)
def drop_odd(experience: Experience) -> Experience | Drop:
    return Drop("odd") if experience.sequence % 2 else experience


async def test_what_the_batch_chain_dropped_is_not_trained_is_still_what_was_journaled_and_may_be_forgotten() -> None:
    (log, store), learner = await log_with_ann(at=(7,)), ScriptedLearner()
    chain = build_batch([ProcessorConfig(use="tests.trainer.test_replay:drop_odd", stage="batch")])
    await train(log, store, learner, chain=chain)
    batches = [entry for entry in await journal(log) if isinstance(entry, Batch) and entry.phase == "train"]
    gone = [{item.offset for item in batch.dropped} - {item.offset for item in batch.items} for batch in batches]
    assert all(gone), "whole groups were dropped"
    for _ in ("there", "forgotten"):
        found, again, start = await replayed(Log(log.bus, "t", store=store), store)
        assert all(each.equal for each in found) and again.learner.tensors() == learner.tensors()
        destroy(Keys(store), TENANT, USER)
    assert await lost_steps(Log(log.bus, "t", store=store), "t", start) == {}


async def test_the_buffer_keeps_what_kept_checkpoints_need_and_loses_what_none_does() -> None:
    time_ms = itertools.count(10**12, 1000)
    store = MemoryStore()
    log = Log(MemoryBus(lambda: next(time_ms)), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    validation = block(9, "expert", held_out=True)
    for each in (validation, *(block(sequence) for sequence in range(2 * STEPS))):
        await log.publish(topics.BUFFER, each)
    config = msgspec.structs.replace(CONFIG, warmup=None, checkpoint_every=1)
    floor = msgspec.structs.replace(FLOOR, keep=Keep(replay="20s"))
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(config, max_steps=STEPS // 2), floor)
    await log.publish(topics.BUFFER, validation)
    await train(log, store, ScriptedLearner(), config, floor)
    newest = checkpoint.load_newest(store, "t")
    assert newest is not None and newest.references == (), "a warm-up that is over needs no validation"
    (begins,) = (await log.bus.beginning_offsets(log.name(topics.BUFFER))).values()
    kept = checkpoint.manifests(store, "t")
    assert 0 < begins == min(each.oldest_offset for each in kept) and len(kept) < STEPS
    for place in checkpoint.places(store, "t"):
        found, _, _ = await replayed(log, store, from_step=place.step)
        assert all(each.equal for each in found)


async def broken(log: Log, store: MemoryStore) -> str:
    """Findings of a replay of a damaged run."""
    with pytest.raises(HeadraceError) as caught:
        await replayed(log, store)
    (line,) = str(caught.value).splitlines()
    return line


def replace(log: Log, topic: topics.Topic, offset: int, value: bytes) -> None:
    bus = log.bus
    assert isinstance(bus, MemoryBus)
    records = bus.log(Partition(log.name(topic), 0)).records
    records[offset] = msgspec.structs.replace(records[offset], value=value)


async def batch_at(log: Log, step: int) -> tuple[int, Batch]:
    async for message in log.scan(topics.BATCHES):
        if isinstance(message.value, Batch) and message.value.step == step:
            return message.offset, message.value
    raise AssertionError(f"no step {step}")


async def test_an_altered_buffered_block_is_named_by_step_and_offset() -> None:
    log, store, _ = await finished_run()
    _, batch = await batch_at(log, 9)
    offset = next(item.offset for item in batch.items if item.lane == "usual")
    (message,) = [each async for each in log.scan(topics.BUFFER) if each.offset == offset]
    assert isinstance(message.value, Block)
    better = Block(tuple(experience.with_bulk(logprobs=[-0.5, -0.26]) for experience in message.value.experiences))
    replace(log, topics.BUFFER, offset, encode(better))
    assert f"step 9: buffer offset {offset} holds another record" in await broken(log, store)
    replace(log, topics.BUFFER, offset, message.record.value[:-1])
    assert f"step 9: buffer offset {offset}: " in await broken(log, store)


async def test_an_altered_blob_is_named() -> None:
    log, store = await new_run()
    long = "".join(chr(33 + at * at % 90) for at in range(900_000))
    await log.publish(topics.BUFFER, block(2 * STEPS, meta={"trace": long}))
    await log.publish(topics.BUFFER, block(2 * STEPS + 1))
    config = msgspec.structs.replace(CONFIG, max_steps=STEPS + 1)
    await train(log, store, ScriptedLearner(), config)
    (key,) = store.keys("blobs/")
    assert all(each.equal for each in (await replayed(log, store))[0])
    store.put(key, store.get(key)[:-1] + b"x")
    assert re.search(rf"step \d+: buffer offset \d+: claim: {key}", await broken(log, store))


async def test_a_journal_record_that_is_missing_or_unreadable_is_named() -> None:
    log, store, _ = await finished_run()
    offset, batch = await batch_at(log, 9)
    replace(log, topics.BATCHES, offset, encode(msgspec.structs.replace(batch, run="another")))
    assert await broken(log, store) == "journal: step 9 is missing; after step 8 comes step 10"
    replace(log, topics.BATCHES, offset, b"HR")
    assert f"journal offset {offset}: " in await broken(log, store)


async def test_an_altered_journal_record_shows_at_the_next_checkpoint() -> None:
    log, store, _ = await finished_run()
    offset, batch = await batch_at(log, 9)
    items = tuple(msgspec.structs.replace(item, advantage=item.advantage + 0.001) for item in batch.items)
    replace(log, topics.BATCHES, offset, encode(msgspec.structs.replace(batch, items=items)))
    found, _, _ = await replayed(log, store)
    assert {each.step for each in found if not each.equal} == {each.step for each in found if each.step >= 9}


async def test_an_altered_checkpoint_is_named_and_the_next_one_begins() -> None:
    log, store, _ = await finished_run()
    oldest, *_, newest = checkpoint.manifests(store, "t")
    for each in (oldest, newest):
        store.put(each.state, store.get(each.state)[:-1] + b"x")
    found, _, start = await replayed(log, store)
    assert len(start.passed_over) == 1 and "step -1" in start.passed_over[0]
    assert all(each.equal for each in found), "what the journal tells is not touched by it"
    assert [each.step for each in found if each.fault] == [newest.position.step]


async def test_other_kernels_give_a_distance_instead_of_bits() -> None:
    log, store, _ = await finished_run()
    found, _, _ = await replayed(log, store, ScriptedLearner(device="cuda", drift=1e-3))
    assert [each.equal for each in found] == [True] + [False] * (len(found) - 1), "all but where it began"
    stored = {place.step for place in checkpoint.places(store, "t")}
    assert {each.step for each in found if each.distance is not None} == stored
    assert all(each.distance > 0 for each in found[1:] if each.distance is not None)


def test_a_run_is_told_by_its_own_losses_and_learner_also_where_they_are_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loss_of_origin.py").write_text("from half_of_origin import half as mine\n")
    (tmp_path / "half_of_origin.py").write_text("def half(x):\n    return x / 2\n")
    importlib.import_module("loss_of_origin")
    lanes: dict[Lane, LaneConfig] = {"usual": LaneConfig(loss="loss_of_origin:mine"), "expert": LaneConfig(loss="sft")}
    named = modules(TrainerConfig(lanes=lanes), ScriptedLearner())
    assert named == ("loss_of_origin", "trainer.learners.scripted", "trainer.losses.losses")
    before = code_hash(named)
    (tmp_path / "half_of_origin.py").write_text("def half(x):\n    return x / 3\n")
    code_hash.cache_clear()
    assert before != code_hash(named) != code_hash(("numpy",)) != code_hash()
