"""An engine that begins with a summary of `policies` serves what one serves that read all of it."""

import asyncio

from actors.engines.reload import PolicyFollower
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.policies.beginning import LOOK
from infra.store.memory import MemoryStore
from schemas import PolicyEvent
from schemas.fields import Channel
from schemas.topics import POLICIES
from tests.actors.rig import FLOOR, running, until
from tests.actors.test_first_weights import FolderEngine, published
from tests.role import role_of
from tests.starts import CountingBus, summarize
from trainer.loop.publication import SUMMARIZE_EVERY

LATER = 3 * LOOK  # versions that were published since the first ones


def stable(kind: str, version: int) -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=version, channel="stable", owner="ann")  # type: ignore[arg-type]


class Life:
    """A log of a long life, and an engine that begins. Only the first five versions and the newest are in the store."""

    def __init__(self, channel: Channel) -> None:
        self.bus, self.store, self.metrics = CountingBus(), MemoryStore(), Metrics("serve")
        self.log = Log(self.bus, FLOOR.app)
        self.events, self.weights = published(self.store)
        self.engine = FolderEngine()
        role = role_of("serve", FLOOR, self.log, self.store, metrics=self.metrics)
        self.follower = PolicyFollower(role, self.engine, channel=channel)

    async def lived(self, *moves: PolicyEvent, late: tuple[PolicyEvent, ...] = ()) -> None:
        """moves: before the later versions. late: after them."""
        await self.log.create_topics(partitions=1, keep_ms=-1)
        for event in (*self.events[:4], *moves):
            await self.log.publish(POLICIES, event)
        for version in range(10, 10 + LATER):
            away = PolicyEvent(event="published", policy="main", version=version, token=3, manifest=f"gone/{version}")
            await self.log.publish(POLICIES, away)
        for event in late:
            await self.log.publish(POLICIES, event)
        summarize(self.log)
        self.bus.read.clear()

    @property
    def read(self) -> int:
        return self.bus.read.get(self.log.name(POLICIES), 0)

    async def serves(self, version: int) -> None:
        await until(lambda: self.engine.version == version and self.metrics.counters().get("reloads", 0) > 0)


async def served(life: Life, *, version: int) -> None:
    await life.engine.start()
    async with running(asyncio.create_task(life.follower.read()), asyncio.create_task(life.follower.load())):
        await life.serves(version)
    await life.engine.close()


def test_a_gateway_serves_what_is_stable_however_old_and_reads_no_more_for_it() -> None:
    async def main() -> None:
        life = Life("stable")
        await life.lived(stable("promoted", 2), stable("pinned", 3))
        await served(life, version=3)
        assert life.read <= LOOK + 1 + 2 * SUMMARIZE_EVERY
        assert (life.follower.stable.version, life.follower.stable.pinned) == (3, True)
        gauges = life.metrics.gauges()
        assert (gauges["policy_version_stable"], gauges["policy_version_published"]) == (3, 9 + LATER)

    asyncio.run(main())


def test_a_version_from_before_the_summary_is_served_as_soon_as_it_is_stable() -> None:
    async def main() -> None:
        life = Life("stable")
        await life.lived(stable("promoted", 2), stable("pinned", 3))
        await life.engine.start()
        async with running(asyncio.create_task(life.follower.read()), asyncio.create_task(life.follower.load())):
            await life.serves(3)
            read = life.read
            await life.log.publish(POLICIES, stable("rolled_back", 1))
            await life.serves(1)
            assert life.read > read + LATER, "only the first records tell of it"
            read = life.read
            await life.log.publish(POLICIES, stable("promoted", 2))
            await life.serves(2)
            assert life.read == read + 1
        await life.engine.close()

    asyncio.run(main())


def test_what_a_gateway_knows_from_the_summary_stays_in_force_while_it_reads_all() -> None:
    async def main() -> None:
        life = Life("stable")
        await life.lived(stable("promoted", 2), late=(stable("pinned", 3),))
        await life.log.publish(
            POLICIES, PolicyEvent(event="published", policy="main", version=10 + LATER, manifest="gone")
        )
        await life.engine.start()
        seen: set[int] = set()

        async def look() -> None:
            while True:
                seen.add(life.follower.stable.version)
                await asyncio.sleep(0)

        loops = [asyncio.create_task(one) for one in (life.follower.read(), life.follower.load(), look())]
        async with running(*loops):
            await life.serves(3)
        await life.engine.close()
        assert life.read > LATER, "the summary does not tell where version 3 is"
        assert seen == {-1, 3}, "never what was stable in between"

    asyncio.run(main())


def test_an_explorer_hears_of_the_newest_version_and_reads_no_more_for_it() -> None:
    async def main() -> None:
        life = Life("candidate")
        await life.lived()
        async with running(asyncio.create_task(life.follower.read())):
            await life.follower.caught_up.wait()
        assert life.read <= LOOK + 1 + 2 * SUMMARIZE_EVERY
        assert life.metrics.gauges()["policy_version_published"] == 9 + LATER

    asyncio.run(main())
