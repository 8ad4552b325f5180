"""Publishing: weights, then the event; a version number never has two contents."""

import asyncio
from itertools import pairwise

import msgspec
import pytest

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.beginning import LOOK, newest_summary, read_on
from infra.policies.fetch import PolicyFetcher
from infra.policies.fold import PoliciesFold, published
from infra.policies.manifest import HashedTensors
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from schemas import Directive, PolicyEvent, topics
from tests.starts import CountingBus, summarize
from tests.trainer.memory_run import CONFIG, STEPS, filled_log, train
from tests.trainer.test_waiting import said_paused
from trainer.journal.journal import Lease, take_lease
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.publication import KNOWN_VERSIONS, SUMMARIZE_EVERY, WeightPublisher
from trainer.replay.resume import read_policies


def tensors(value: int) -> dict[str, Tensor]:
    return {"weights": Tensor("F32", (4,), bytes([value]) * 16)}


class Rig:
    """A log, a store, and trainers that come one after another."""

    def __init__(self) -> None:
        self.log = Log(MemoryBus(), "t")
        self.store = MemoryStore()

    async def events(self) -> list[tuple[int, PolicyEvent]]:
        return [
            (message.offset, message.value)
            async for message in self.log.scan(topics.POLICIES)
            if isinstance(message.value, PolicyEvent)
        ]

    async def trainer(self) -> WeightPublisher:
        """A trainer that has just taken the lease and read what was published."""
        lease = await take_lease(self.log, policy="main", run="r", owner="train/1")
        return WeightPublisher(self.log, self.store, lease, "main", *await read_policies(self.log, "main", 0))

    async def said(self) -> list[tuple[str, int]]:
        return [(event.event, event.version) for _, event in await self.events() if event.event != "lease"]


async def publish(publisher: WeightPublisher, version: int, value: int) -> int:
    return await publisher.publish(
        version, HashedTensors(tensors(value)), None, parent=version - 1, step=version, stats={"loss": 0.5}
    )


async def new_rig() -> Rig:
    rig = Rig()
    await rig.log.create_topics(partitions=1, keep_ms=-1)
    return rig


async def test_executing_again_to_the_same_weights_publishes_nothing() -> None:
    rig = await new_rig()
    first = await rig.trainer()
    for version in (0, 1, 2):
        await publish(first, version, version)
    before = await rig.said()
    again = await rig.trainer()
    assert again.has(2) and not again.has(3)
    assert [await publish(again, version, version) for version in (1, 2)] == [1, 2]
    assert await rig.said() == before
    assert await publish(again, 3, 3) == 3


async def test_executing_again_to_other_weights_orphans_the_old_version_and_takes_the_next_free_number() -> None:
    rig = await new_rig()
    first = await rig.trainer()
    for version in (0, 1, 2):
        await publish(first, version, version)
    again = await rig.trainer()
    assert await publish(again, 1, 71) == 3
    assert (await rig.said())[-2:] == [("orphaned", 1), ("published", 3)]
    kept = published(await rig.events(), "main")
    assert {version: event.event for version, event in kept.items()} == {
        0: "published",
        1: "orphaned",
        2: "published",
        3: "published",
    }
    policy = PolicyFetcher(rig.store, "main").fetch(kept[3])
    assert bytes(policy.tensors["weights"].data) == bytes([71]) * 16


async def test_a_version_whose_manifest_cannot_be_read_is_orphaned_and_published_under_the_next_number() -> None:
    rig = await new_rig()
    await publish(await rig.trainer(), 0, 0)
    (key,) = [key for key in rig.store.keys("policies/main/") if key.endswith("/manifests/0.json")]
    rig.store.put(key, b"damaged")
    assert await publish(await rig.trainer(), 0, 0) == 1
    assert await rig.said() == [("published", 0), ("orphaned", 0), ("published", 1)]


async def test_what_a_trainer_remembers_of_its_versions_is_bounded_and_a_number_it_forgot_stays_taken() -> None:
    rig = await new_rig()
    trainer = await rig.trainer()
    for version in range(KNOWN_VERSIONS + 3):
        await publish(trainer, version, version % 100)
    known = [version for version in range(KNOWN_VERSIONS + 3) if trainer.has(version)]
    assert known == list(range(3, KNOWN_VERSIONS + 3))
    newest = KNOWN_VERSIONS + 2
    got = await trainer.publish(1, HashedTensors(tensors(71)), None, parent=newest, step=newest, stats={})
    assert got == newest + 1


def test_what_an_overtaken_trainer_publishes_late_does_not_count() -> None:
    events = [
        PolicyEvent(event="lease", policy="main"),
        PolicyEvent(event="published", policy="main", version=1, token=0),
        PolicyEvent(event="lease", policy="main"),
        PolicyEvent(event="published", policy="main", version=2, token=0, reason="late"),
        PolicyEvent(event="published", policy="main", version=2, token=2),
        PolicyEvent(event="published", policy="main", version=2, token=2, reason="again"),
        PolicyEvent(event="lease", policy="other"),
        PolicyEvent(event="published", policy="other", version=9, token=6),
    ]
    found = published(list(enumerate(events)), "main")
    assert {version: (event.token, event.reason) for version, event in found.items()} == {1: (0, ""), 2: (2, "")}


async def test_nothing_is_said_of_weights_that_could_not_be_stored() -> None:
    class Full(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            if key.endswith(".json"):
                raise OSError("no space left")
            super().put(key, data)

    rig = await new_rig()
    publisher = WeightPublisher(rig.log, Full(), Lease(run="r", token=0, owner="o"), "main", {}, PoliciesFold())
    with pytest.raises(OSError, match="no space"):
        await publish(publisher, 0, 0)
    assert await rig.said() == [] and not publisher.has(0)


async def test_what_a_killed_trainer_left_unfinished_goes_when_the_next_one_tidies() -> None:
    rig = await new_rig()
    first = await rig.trainer()
    await publish(first, 0, 0)
    (token,) = tokens_of(rig)
    rig.store.put(f"policies/main/{token}/anchors/1/{'a' * 32}.safetensors", b"left")
    second = await rig.trainer()
    await publish(second, 1, 1)
    rig.store.put(f"policies/main/{max(tokens_of(rig), key=int)}/anchors/2/{'b' * 32}.safetensors", b"being written")
    assert second.prune(-1) == 1 and second.prune(-1) == 0
    assert not [key for key in rig.store.keys("") if "a" * 32 in key]
    assert [key for key in rig.store.keys("") if "b" * 32 in key]


async def test_what_channels_serve_and_the_version_to_roll_back_to_stay_stored() -> None:
    rig = await new_rig()
    trainer = await rig.trainer()
    for version in range(6):
        await publish(trainer, version, version)
    for version in (1, 3):
        promoted = PolicyEvent(event="promoted", policy="main", version=version, channel="stable", owner="ann")
        await rig.log.publish(topics.POLICIES, promoted)
    await read_on(rig.log, trainer.past)
    trainer.prune(5)
    kept = {key.rpartition("/")[2] for key in rig.store.keys("policies/main/") if "/manifests/" in key}
    assert kept == {"1.json", "3.json", "5.json"}


def tokens_of(rig: Rig) -> set[str]:
    return {key.split("/")[2] for key in rig.store.keys("policies/main/")}


LONG = 4 * LOOK


def reward(version: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="reward", version=version, manifest=f"m/{version}")


async def lived(log: Log) -> None:
    """Much more is said, of another policy, with summaries."""
    for version in range(LONG):
        await log.publish(topics.POLICIES, reward(version))
    summarize(log)


async def events_of(log: Log) -> list[tuple[int, PolicyEvent]]:
    messages = [message async for message in log.scan(topics.POLICIES)]
    return [(message.offset, message.value) for message in messages if isinstance(message.value, PolicyEvent)]


async def test_a_trainer_reads_policies_once_from_its_newest_summary_and_goes_on_as_one_that_read_all() -> None:
    bus, store = CountingBus(), MemoryStore()
    log = await filled_log(store, bus)
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=STEPS - 4))
    before = published(await events_of(log), "main")
    await log.publish(topics.POLICIES, Directive(order="pause", owner="ann"))
    await lived(log)
    bus.read.clear()
    training = asyncio.create_task(train(log, store, ScriptedLearner()))
    await said_paused(log)
    assert bus.read[log.name(topics.POLICIES)] <= LOOK + 1 + SUMMARIZE_EVERY + 2, "the pause lies before the summary"
    await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
    async with asyncio.timeout(60):
        await training
    after = published(await events_of(log), "main")
    assert list(after) == list(range(len(after))) and len(after) > len(before)
    assert {version: after[version] for version in before} == before, "nothing was published twice"


async def test_a_trainer_whose_checkpoint_is_older_than_every_summary_reads_all() -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    await lived(log)
    for version in (0, LONG // 2, LONG - 3):
        found, past = await read_policies(log, "reward", version)
        whole = published(await events_of(log), "reward")
        assert {each: found[each].manifest for each in range(version, LONG)} == {
            each: whole[each].manifest for each in range(version, LONG)
        }
        assert past.next_offset == LONG
    assert past.begun_at > 0 and (await read_policies(log, "reward", 0))[1].begun_at == 0


async def publisher_of(log: Log, store: MemoryStore) -> WeightPublisher:
    lease = await take_lease(log, policy="main", run="r", owner="train/1")
    return WeightPublisher(log, store, lease, "main", *await read_policies(log, "main", 0))


async def test_a_summary_of_all_records_is_stored_now_and_then() -> None:
    store = MemoryStore()
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    publisher = await publisher_of(log, store)
    for version in range(10):
        for _ in range(SUMMARIZE_EVERY // 4):
            await log.publish(topics.POLICIES, Directive(order="open", about=f"a.{version}"))
        await read_on(log, publisher.past)  # as the trainer does that follows the topic
        await publish(publisher, version, version)
    keys = sorted(store.keys("snapshots/t/policies/manifests/"))
    places = [int(key.rpartition("/")[2].partition("-")[0]) for key in keys]
    gaps = [later - earlier for earlier, later in pairwise([0, *places])]
    assert len(places) == 2 and all(SUMMARIZE_EVERY <= gap < 2 * SUMMARIZE_EVERY for gap in gaps)
    again = PoliciesFold()
    await read_on(log, again, stop=places[-1])
    for _ in range(LOOK):
        await log.publish(topics.POLICIES, Directive(order="open", about="a.3"))
    assert await newest_summary(log) == again.summary()


async def test_after_a_restart_it_is_known_what_was_replaced_before_the_horizon_as_without_one() -> None:
    """The new trainer begins with a summary, in which those versions are not."""
    now_ms = [0]
    store = MemoryStore()
    log = Log(MemoryBus(lambda: now_ms[0]), "t", store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    first = await publisher_of(log, store)
    for version in range(10):
        now_ms[0] += 1000
        await publish(first, version, version)
    assert await first.replaced(9500) == -1
    assert await first.replaced(3500) == 5, "version 9 is of 10 s, 5 of 6 s and 6 of 7 s"
    await lived(log)
    second = await publisher_of(log, store)
    assert await second.replaced(1000) == -1, "it has published nothing yet"
    now_ms[0] += 1000
    await publish(second, 10, 10)
    assert [await second.replaced(keep_ms) for keep_ms in (4500, 3500)] == [5, 6]
