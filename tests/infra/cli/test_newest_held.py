"""The newest records that are held from call to call are those that a fresh look finds."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from infra.cli.govern.words import PolicyWords
from infra.cli.look.newest import HeldNewest, newest
from infra.log.bus import Partition, Record
from infra.log.follower import Follower
from infra.log.log import Log, LogMessage
from infra.log.memory import MemoryBus
from schemas import DeadLetter, Directive, PolicyEvent, topics

LAST = 5
scripts = st.lists(
    st.tuples(st.sampled_from(["report", "other", "trim", "look", "anew"]), st.integers(1, 9)), max_size=30
)


async def filled_log(bus: MemoryBus) -> Log:
    log = Log(bus, "app")
    await log.create_topics(partitions=2, keep_ms=-1)
    return log


@settings(max_examples=100, deadline=None)
@given(scripts)
def test_what_is_held_is_what_a_fresh_look_finds(script: list[tuple[str, int]]) -> None:
    async def check() -> None:
        log = await filled_log(MemoryBus())
        held, open_held = HeldNewest(log), HeldNewest(log, Follower(log, (topics.POLICIES,)))
        for what, num in [*script, ("look", 1)]:
            name = log.name(topics.POLICIES)
            if what == "report":
                for one in range(num):
                    await log.publish(topics.POLICIES, PolicyEvent(event="published", policy="main", version=one))
            elif what == "other":
                await log.publish(topics.POLICIES, Directive(order="pause", owner="ann"))
            elif what == "trim":
                part = Partition(name, 0)
                await log.bus.delete_records(part, min(num, (await log.bus.end_offsets(name))[part]))
            elif what == "anew":
                log.bus.restore(name, [])  # type: ignore[attr-defined]
            for kind in ("", "directive") if what in ("look", "anew") else ():
                found = await held.newest(topics.POLICIES, LAST, kind)
                assert found == await newest(log, topics.POLICIES, LAST, kind)
                assert found == await open_held.newest(topics.POLICIES, LAST, kind)
                assert kind == "" or all(isinstance(one.value, Directive) for one in found)

    asyncio.run(check())


class CountingLog(Log):
    """A log that counts what it decodes."""

    decodes = 0

    def decode(self, record: Record) -> LogMessage:
        self.decodes += 1
        return super().decode(record)


def test_of_what_is_read_from_many_partitions_only_the_newest_are_decoded() -> None:
    async def check() -> None:
        log = CountingLog(MemoryBus(), "app")
        await log.create_topics(partitions=4, keep_ms=-1)
        held = HeldNewest(log)
        for times in (1, 2):
            for number in range(40):
                letter = DeadLetter(stage="verify", reason=f"{number}", topic="t", partition=0, offset=number)
                await log.publish(topics.DEAD_LETTERS, letter, partition=number % 4)
            await held.newest(topics.DEAD_LETTERS, LAST)
            assert log.decodes == LAST * times

    asyncio.run(check())


def test_words_about_a_policy_read_on_are_those_read_at_once() -> None:
    async def check() -> None:
        log = await filled_log(MemoryBus())
        held, open_held = PolicyWords("main"), PolicyWords("main")
        follower = Follower(log, (topics.POLICIES,))
        token = (await log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="main"))).offset
        for version in range(3):
            await log.publish(
                topics.POLICIES, PolicyEvent(event="published", policy="main", version=version, token=token)
            )
            await log.publish(topics.POLICIES, Directive(order="pause", owner="ann", reason=f"{version}"))
            await held.read_on(log)
            await open_held.read_on(log, follower)
        at_once = PolicyWords("main")
        await at_once.read_on(log)
        assert (held.events, held.orders, held.stable) == (at_once.events, at_once.orders, at_once.stable)
        assert (open_held.events, open_held.orders, open_held.stable) == (held.events, held.orders, held.stable)
        assert [one.version for _, one in held.events] == [0, 1, 2]
        assert [one.reason for _, one in held.orders] == ["0", "1", "2"]

    asyncio.run(check())
