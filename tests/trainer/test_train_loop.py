"""The trainer on an in-memory log: what survives a kill at any moment, and what a newer lease does."""

import asyncio
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, MemoryReader
from infra.policies.fetch import PolicyFetcher
from infra.policies.fold import PolicyFeed
from infra.policies.tensors import Tensor
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import Pieces, Store
from schemas import Batch, Block, Drawn, Fence, PolicyEvent, Rollback, Saved, Skip, Span, ids, topics
from schemas.errors import FencedOut, OffsetOutOfRange
from schemas.journal import effective
from tests.trainer.memory_run import (
    CONFIG,
    STEPS,
    KillingBus,
    KillingStore,
    PutsThatKill,
    block,
    ends,
    filled_log,
    journal,
    published,
    train,
    train_through_kills,
)
from trainer.batch.assemble import step_seed
from trainer.buffer.buffer import Uses
from trainer.journal import checkpoint
from trainer.journal.checkpoint import Checkpoint, Position, load_newest, places, remove, save
from trainer.journal.journal import Lease, read_journal, take_lease
from trainer.learners.scripted import ScriptedLearner
from trainer.replay.resume import find_start


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
        async for each in log.read_all(topics.BATCHES)
        if isinstance(each.value, Saved)
    }
    published = {
        each.value.version: each.timestamp_ms
        async for each in log.read_all(topics.POLICIES)
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


@pytest.mark.parametrize("topic", [topics.BUFFER, topics.BATCHES], ids=lambda topic: topic.name)
async def test_a_resume_whose_segment_was_deleted_says_so_and_overwrites_nothing(topic: topics.Topic) -> None:
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


class KillingFolder(PutsThatKill, DirectoryStore):
    """A store in a folder whose process dies at the n-th put."""

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        with self.put_counted():
            super().put_pieces(key, pieces)


async def drawn(log: Log) -> set[str]:
    """Groups the master was told of."""
    messages = [message.value async for message in log.read_all(topics.PROGRESS)]
    return {group for message in messages if isinstance(message, Drawn) for group in message.groups}


def usual_groups(records: list[object]) -> set[str]:
    return {
        ids.group_of(item.id) for items in journaled_items(records).values() for item in items if item.lane == "usual"
    }  # type: ignore[attr-defined]


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
    assert await drawn(log) == usual_groups(await journal(log))


CYCLES = 100


class StandStill:
    """A process stands still before or after its n-th send, until it is opened: nothing of it reads or writes meanwhile."""

    def __init__(self, stall_at: int) -> None:
        self.stalled = asyncio.Event()
        self.opened = asyncio.Event()
        self._left = stall_at

    async def reach(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.stalled.set()
            await self.opened.wait()

    async def hold(self) -> None:
        """What another task of the process does while it stands still."""
        if self.stalled.is_set():
            await self.opened.wait()


class GatedReader(MemoryReader):
    """Hears nothing while its process stands still."""

    gate: StandStill

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        records = await super().get_many(timeout_s=timeout_s, max_records=max_records)
        await self.gate.hold()
        return records


class GatedBus(MemoryBus):
    """One process's way to a log that others share."""

    def __init__(self, shared: MemoryBus, gate: StandStill) -> None:
        super().__init__()
        self.__dict__.update(shared.__dict__)
        self._gate = gate

    async def assigned(self, starts, *, group=None, fetch_bytes=0):
        reader = GatedReader(self, dict(starts), group=group)
        reader.gate = self._gate
        return reader

    async def send(self, *args, **kwargs):
        await self._gate.reach()
        position = await super().send(*args, **kwargs)
        await self._gate.reach()
        return position


async def overtaken(log: Log, store: MemoryStore, stall_at: int) -> str:
    """One cycle: a trainer stands still somewhere, another trains on, the first goes on. How the first ended."""
    gate = StandStill(stall_at)
    assert isinstance(log.bus, MemoryBus)
    zombie = asyncio.create_task(train(Log(GatedBus(log.bus, gate), log.app, store=store), store, ScriptedLearner()))
    await asyncio.wait([zombie, asyncio.create_task(gate.stalled.wait())], return_when=asyncio.FIRST_COMPLETED)
    if not gate.stalled.is_set():
        await zombie
        return "ended before"
    successor = asyncio.create_task(train(log, store, ScriptedLearner()))
    ends = len(await journal(log))
    async for message in log.read_all(topics.BATCHES, until_end=False):
        if message.offset >= ends + 2:  # the successor's fence and a step, or its last checkpoint
            break
    gate.opened.set()
    try:
        await zombie
        ended = "did nothing more"
    except* FencedOut:
        ended = "fenced out"
    await successor
    return ended


async def loaded(log: Log, store: MemoryStore) -> dict[int, set[str]]:
    """Versions as a follower of the log loads them, one by one: version → contents."""
    feed, follower = PolicyFeed("main"), PolicyFetcher(store, "main")
    found: dict[int, set[str]] = {}
    lease = -1
    async for message in log.read_all(topics.POLICIES):
        event = message.value
        assert isinstance(event, PolicyEvent)
        lease = message.offset if event.event == "lease" else lease
        stale = event.event != "lease" and event.token < lease
        if feed.apply(event, message.offset):
            assert not stale, f"{event.event} v{event.version} of token {event.token} under lease {lease}"
            policy = follower.fetch(event)
            found.setdefault(event.version, set()).add(hexed(policy.tensors["weights"]))
    return found


async def stale_events(log: Log) -> int:
    """What a zombie still sent to `policies` after it had been overtaken."""
    lease, found = -1, 0
    async for message in log.read_all(topics.POLICIES):
        event = message.value
        assert isinstance(event, PolicyEvent)
        found += event.event != "lease" and event.token < lease
        lease = message.offset if event.event == "lease" else lease
    return found


def hexed(tensor: Tensor) -> str:
    return bytes(tensor.data).hex()


@pytest.mark.parametrize("seed", range(5))
async def test_a_trainer_that_was_overtaken_publishes_nothing_that_is_loaded_and_journals_nothing_that_counts(
    seed: int,
) -> None:
    chosen = random.Random(seed)
    outcomes: Counter[str] = Counter()
    expected_store = MemoryStore()
    quiet = await filled_log(expected_store)
    await train(quiet, expected_store, ScriptedLearner())
    alone = load_newest(expected_store, "t")
    expected, expected_loaded = counted(await journal(quiet)), await loaded(quiet, expected_store)
    for _ in range(CYCLES // 5):
        store = MemoryStore()
        log = await filled_log(store)
        outcomes[await overtaken(log, store, chosen.randint(3, 90))] += 1
        # What counts is what one trainer in peace would have journaled, and every version has its content.
        assert counted(await journal(log)) == expected
        assert await loaded(log, store) == expected_loaded
        outcomes["stale events"] += await stale_events(log)
        newest = load_newest(store, "t")
        assert newest is not None and alone is not None
        assert newest.learner == alone.learner
    assert outcomes["fenced out"] >= CYCLES // 10 and outcomes["stale events"] >= 1, outcomes


def counted(records: list[object]) -> list[tuple[object, ...]]:
    """Steps that count, with what they trained on."""
    entries, _ = effective([record for record in records if isinstance(record, Fence | Batch)], "t")
    batches = {
        entry.step: tuple(item.id for item in entry.items) for entry in reversed(entries) if isinstance(entry, Batch)
    }
    assert len([entry for entry in entries if isinstance(entry, Batch)]) == len(batches), "a step counts twice"
    return sorted(batches.items())
