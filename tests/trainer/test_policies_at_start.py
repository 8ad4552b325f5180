"""What a trainer reads of `policies` when it begins, and what it leaves there for whoever begins later."""

import asyncio
from itertools import pairwise

import msgspec
import pytest

from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.beginning import LOOK, newest_summary, read_on
from infra.policies.fold import PoliciesFold
from infra.policies.summary import published
from infra.store.memory import MemoryStore
from schemas import Directive, PolicyEvent, topics
from tests.starts import CountingBus, summarize
from tests.trainer.memory_run import CONFIG, STEPS, filled_log, train
from tests.trainer.test_pause import said_paused
from tests.trainer.test_publication import publish
from trainer.journal.journal import take_lease
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.publication import SUMMARIZE_EVERY, WeightPublisher
from trainer.replay.resume import read_policies

LONG = 4 * LOOK


def reward(version: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="reward", version=version, manifest=f"m/{version}")


async def lived(log: Log) -> None:
    """Much more is said, of another policy, with summaries."""
    for version in range(LONG):
        await log.publish(topics.POLICIES, reward(version))
    summarize(log)


async def events_of(log: Log) -> list[tuple[int, PolicyEvent]]:
    messages = [message async for message in log.read_all(topics.POLICIES)]
    return [(message.offset, message.value) for message in messages if isinstance(message.value, PolicyEvent)]


def test_a_trainer_reads_policies_once_from_its_newest_summary_and_goes_on_as_one_that_read_all() -> None:
    async def main() -> None:
        bus, store = CountingBus(), MemoryStore()
        log = await filled_log(store, bus)
        await train(log, store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=STEPS - 4))
        before = published(await events_of(log), "main")
        await log.publish(topics.POLICIES, Directive(order="pause", owner="ann"))
        await lived(log)
        bus.read.clear()
        training = asyncio.create_task(train(log, store, ScriptedLearner()))
        await said_paused(log)
        assert bus.read[log.name(topics.POLICIES)] <= LOOK + 1 + SUMMARIZE_EVERY + 2, (
            "the pause lies before the summary"
        )
        await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
        async with asyncio.timeout(60):
            await training
        after = published(await events_of(log), "main")
        assert list(after) == list(range(len(after))) and len(after) > len(before)
        assert {version: after[version] for version in before} == before, "nothing was published twice"

    asyncio.run(main())


def test_a_trainer_whose_checkpoint_is_older_than_every_summary_reads_all() -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        await lived(log)
        for version in (0, LONG // 2, LONG - 3):
            found, past = await read_policies(log, "reward", version)
            whole = published(await events_of(log), "reward")
            assert {one: found[one].manifest for one in range(version, LONG)} == {
                one: whole[one].manifest for one in range(version, LONG)
            }
            assert past.next_offset == LONG
        assert past.begun_at > 0 and (await read_policies(log, "reward", 0))[1].begun_at == 0

    asyncio.run(main())


async def publisher_of(log: Log, store: MemoryStore) -> WeightPublisher:
    lease = await take_lease(log, policy="main", run="r", owner="train/1")
    return WeightPublisher(log, store, lease, "main", *await read_policies(log, "main", 0))


def test_a_summary_of_all_records_is_stored_now_and_then() -> None:
    async def main() -> None:
        store = MemoryStore()
        log = Log(MemoryBus(), "t", store=store)
        await log.create_topics(partitions=1, keep_ms=-1)
        publisher = await publisher_of(log, store)
        for version in range(10):
            for _ in range(SUMMARIZE_EVERY // 4):
                await log.publish(topics.POLICIES, Directive(order="eval", suite="dev", version=version))
            await read_on(log, publisher.past)  # as the trainer does that follows the topic
            await publish(publisher, version, version)
        keys = sorted(store.keys("snapshots/t/policies/manifests/"))
        places = [int(key.rpartition("/")[2].partition("-")[0]) for key in keys]
        gaps = [later - earlier for earlier, later in pairwise([0, *places])]
        assert len(places) == 2 and all(SUMMARIZE_EVERY <= gap < 2 * SUMMARIZE_EVERY for gap in gaps)
        again = PoliciesFold()
        await read_on(log, again, stop=places[-1])
        for _ in range(LOOK):
            await log.publish(topics.POLICIES, Directive(order="eval", suite="dev", version=3))
        assert await newest_summary(log) == again.summary()

    asyncio.run(main())


def test_after_a_restart_it_is_known_what_was_replaced_before_the_horizon_as_without_one() -> None:
    """The new trainer begins with a summary, in which those versions are not."""

    async def main() -> None:
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

    asyncio.run(main())


@pytest.mark.full
def test_over_a_broker_a_start_begins_with_the_newest_summary(kafka: str, app_name: str) -> None:
    async def main() -> None:
        store = MemoryStore()
        log = Log(KafkaBus(kafka), app_name, store=store)
        await log.bus.start()
        await log.create_topics(partitions=1, keep_ms=3_600_000)
        publisher = await publisher_of(log, store)
        await publish(publisher, 0, 0)
        words = [Directive(order="pause", owner="ann"), *[Directive(order="eval", suite="dev")] * LOOK]
        await log.publish_all(topics.POLICIES, words)
        await read_on(log, publisher.past)
        await publish(publisher, 1, 1)
        summary = await newest_summary(log)
        assert summary is not None and summary == publisher.past.summary()
        found, past = await read_policies(log, "main", 1)
        assert (sorted(found), past.learning, past.begun_at) == ([0, 1], "pause", summary.below)
        assert [await publisher.replaced(keep_ms) for keep_ms in (3_600_000, 0)] == [-1, 0]
        await log.bus.close()

    asyncio.run(main())
