"""Collector: rebuilt from the log, sends nothing twice, ticks when idle, applies changed settings to waiting groups."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.seal import FRESH_S, Keys, sealed
from schemas import Block, Closure, DeadLetter, FeedbackWait, Message, Tick
from schemas.topics import BUFFER, DEAD_LETTERS, PROGRESS, VERIFIED
from streams.collect.collector import Collector, CollectSettings, TakenAway
from streams.collect.feedback import FeedbackRules
from streams.collect.inbox import CollectDriver
from streams.collect.rules import APART_MS, PORTION, Rules, go_by
from streams.collect.state import State
from streams.stages.stage import Waiting
from tests.actors.rig import until
from tests.names import subject_name
from tests.streams.collect.collecting import FakePartition, answer, block, decisions, folded, said, stub, tick
from tests.streams.deliveries import START_MS, Clock, KeptDelivery, memory_log, stored, values
from tests.streams.test_source import Away

RULES = Rules(deadline_ms=3_600_000, keep_ms=86_400_000)


def settings(folder: Path, rules: Rules = RULES) -> CollectSettings:
    return CollectSettings(folder=folder, rules=rules, steps=())


async def opened(log: Log, folder: Path, committed: int = 0, rules: Rules = RULES) -> Collector:
    collector = Collector(log, Metrics("process"), 0, settings(folder, rules))
    await collector.recover(committed, lambda: False)
    return collector


async def fold_everything(log: Log, collector: Collector) -> None:
    await collector.take([message.record for message in await stored(log, VERIFIED)])


async def groups_in(log: Log) -> list[str]:
    return [sent.group for sent in await values(log, BUFFER) if isinstance(sent, Block)]


async def closed_groups(log: Log) -> list[str]:
    return [end.group for end in await values(log, PROGRESS) if isinstance(end, Closure)]


async def feed(log: Log, *groups: str) -> None:
    for group in groups:
        for episode in range(2):
            await log.publish(VERIFIED, block(answer(group, episode)))


async def test_a_worker_that_closed_late_what_another_had_closed_sends_nothing_of_what_the_other_closed_after_it(
    tmp_path: Path,
) -> None:
    async with memory_log() as log:
        await feed(log, "t.0")
        slow = await opened(log, tmp_path / "a")
        await feed(log, "u.0")
        other = await opened(log, tmp_path / "b")
        await fold_everything(log, other)
        other.close()
        records = [message.record for message in await stored(log, VERIFIED)]
        await slow.take(records[:2])  # it did not know yet that the partition was another's
        slow.close()
        assert await closed_groups(log) == ["t.0", "u.0", "t.0"]
        back = await opened(log, tmp_path / "a", committed=4)
        back.close()
        assert await closed_groups(log) == ["t.0", "u.0", "t.0"]


async def test_a_worker_remembers_the_closures_of_its_own_partition_only(tmp_path: Path) -> None:
    async with memory_log(partitions=2) as log:
        homes: dict[int, set[str]] = {0: set(), 1: set()}
        for group in [f"t-{number}.0" for number in range(9)]:
            homes[(await log.publish(VERIFIED, block(answer(group, 0)))).partition].add(group)
            await log.publish(PROGRESS, Closure(group=group, outcome="dropped"))
        for partition, groups in homes.items():
            collector = Collector(log, Metrics("process"), partition, settings(tmp_path))
            await collector.recover(0, lambda: False)
            collector.close()
            assert groups and {group for group, _, _ in collector._published} == groups


async def test_records_already_folded_are_skipped_and_gaps_are_read_from_the_log(tmp_path: Path) -> None:
    async with memory_log() as log:
        await feed(log, "t.0", "u.0")
        collector = await opened(log, tmp_path)
        records = [message.record for message in await stored(log, VERIFIED)]
        await collector.take(records[3:])
        await collector.take(records)
        collector.close()
        assert await groups_in(log) == ["t.0", "u.0"]


async def test_a_rebuild_stops_when_the_partition_is_taken_away(tmp_path: Path) -> None:
    async with memory_log() as log:
        await feed(log, "t.0")
        collector = Collector(log, Metrics("process"), 0, settings(tmp_path))
        with closing(collector), pytest.raises(TakenAway):
            await collector.recover(2, lambda: True)
        assert await groups_in(log) == []


async def test_an_idle_partition_ticks_once_its_deadline_is_due(tmp_path: Path) -> None:
    async with memory_log() as log:
        await log.publish(VERIFIED, block(answer("t.0", 0)))
        collector = await opened(log, tmp_path)
        await fold_everything(log, collector)
        due_ms = collector.state.next_due_ms()
        assert not await collector.tick(due_ms - 1)
        assert await collector.tick(due_ms)
        collector.close()
        last = (await values(log, VERIFIED))[-1]
        assert last == Tick(partition=0, due_ms=due_ms)


async def test_an_unreadable_record_is_dead_lettered_and_its_neighbours_are_folded(tmp_path: Path) -> None:
    async with memory_log() as log:
        await log.publish(VERIFIED, block(answer("t.0", 0)))
        await log.bus.send(log.name(VERIFIED), b"HR\x01\x00nonsense", key=b"t.0")
        await log.publish(VERIFIED, block(answer("t.0", 1)))
        collector = await opened(log, tmp_path)
        await fold_everything(log, collector)
        collector.close()
        assert await groups_in(log) == ["t.0"]
        (dead,) = await values(log, DEAD_LETTERS)
        assert isinstance(dead, DeadLetter)
        assert (dead.topic, dead.offset, dead.stage) == ("verified", 1, "collect")


@pytest.mark.parametrize(
    "take_away",
    [lambda driver: driver.retire(), lambda driver: driver.assigned(set(), 2)],
    ids=["seen", "over before the worker saw it"],
)
async def test_a_driver_folds_acknowledges_and_lets_go_of_its_partition_in_a_rebalance(
    tmp_path: Path, take_away: Callable[[CollectDriver], None]
) -> None:
    async with memory_log() as log:
        await feed(log, "t.0", "u.0")

        async def committed(partition: int) -> int:
            return (await log.bus.beginning_offsets(log.name(VERIFIED)))[Partition(log.name(VERIFIED), partition)]

        async with asyncio.TaskGroup() as tasks:
            driver = CollectDriver(log, Metrics("process"), settings(tmp_path), committed, tasks)
            driver.assigned({0}, 1)
            deliveries = [KeptDelivery(message.record) for message in await stored(log, VERIFIED)]
            for delivery in deliveries[:3]:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in deliveries[:3]))
            assert driver.waiting().groups == 1
            take_away(driver)
            late = KeptDelivery(deliveries[3].record)
            await driver.accept(late)
            assert late.is_abandoned
            await until(lambda: driver.waiting() == Waiting())
            again = [KeptDelivery(delivery.record, generation=2) for delivery in deliveries]
            for delivery in again:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in again))
            await driver.finish()
        assert sorted(await closed_groups(log)) == ["t.0", "u.0"]


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_forgotten_answer_is_dropped_where_it_waits_and_is_unreadable_in_the_state_file(
    tmp_path: Path, restarts: bool
) -> None:
    async with memory_log() as plain:
        store, clock = MemoryStore(), Clock()
        log, keys = Log(plain.bus, plain.app, store=store, clock=clock), Keys(store)
        subject = subject_name("acme", "ann")
        said_by_ann = (Message(role="user", content="WILHELMINA"), Message(role="assistant", content="yes"))
        for episode in range(2):
            member = answer("t.0", episode).with_bulk(messages=said_by_ann)
            sent = sealed(block(msgspec.structs.replace(member, subject=subject)), keys, subject)
            await log.publish(VERIFIED, sent)
        first, last = (message.record for message in await stored(log, VERIFIED))
        collector = await opened(log, tmp_path)
        await collector.take([first])
        assert b"WILHELMINA" not in everything_in(tmp_path)
        keys.destroy(subject)
        clock.now_ms += 1 + int(FRESH_S)  # this clock counts seconds
        if restarts:
            collector.close()
            collector = await opened(Log(log.bus, log.app, store=store), tmp_path)
        await collector.take([last])
        collector.close()
        assert not await groups_in(log)
        (end,) = [end for end in await values(log, PROGRESS) if isinstance(end, Closure)]
        assert (end.outcome, end.reason, end.drops) == ("dropped", "forgotten", {"forgotten": 2})


async def test_a_store_that_is_away_is_asked_again_for_the_key_of_a_waiting_answer(tmp_path: Path) -> None:
    async with memory_log() as plain:
        log = Log(plain.bus, plain.app, store=(store := Away()))
        await log.publish(VERIFIED, sealed(block(answer("t.0", 0)), Keys(store), subject_name("acme", "ann")))
        await fold_everything(log, first := await opened(log, tmp_path))
        first.close()
        await log.publish(VERIFIED, stub("t.0", 1))
        records = [message.record for message in await stored(log, VERIFIED)]
        second = await opened(Log(log.bus, log.app, store=store), tmp_path)
        store.fails = True
        await second.take(records)
        second.close()
        assert await groups_in(log) == ["t.0"] and not store.fails


DAY_MS, HOUR_MS = 86_400_000, 3_600_000
REF = "hr-a1b2.0.0-0-0"


def rules(**windows_ms: int) -> Rules:
    sources = {name: FeedbackRules(window_ms=window_ms) for name, window_ms in windows_ms.items()}
    return Rules(deadline_ms=10 * DAY_MS, keep_ms=30 * DAY_MS, sources=sources)


async def log_by(clock: Clock) -> Log:
    log = Log(MemoryBus(clock), "app")
    await log.create_topics(partitions=1, keep_ms=-1)
    await log.publish(VERIFIED, block(answer("a1b2.0", 0, size=1, lane="live")))
    return log


async def begun_anew(log: Log, folder: Path, before: Rules, now: Rules) -> Collector:
    """A collector with the second rules, of a file that one with the first left."""
    first = await opened(log, folder, rules=before)
    await fold_everything(log, first)
    first.close()
    assert await closed_groups(log) == []
    return await opened(log, folder, rules=now)


async def ended_at(log: Log, collector: Collector, clock: Clock, now_ms: int) -> list[str]:
    clock.now_ms = now_ms
    if await collector.tick(now_ms):
        await fold_everything(log, collector)
    return await closed_groups(log)


async def test_a_shorter_window_closes_what_waits_for_the_longer_one(tmp_path: Path) -> None:
    clock = Clock()
    log = await log_by(clock)
    second = await begun_anew(log, tmp_path, rules(csat=DAY_MS), rules(csat=HOUR_MS))
    assert second.state.waits() == FeedbackWait(1, START_MS + HOUR_MS)
    assert await ended_at(log, second, clock, START_MS + HOUR_MS - 1) == []
    assert await ended_at(log, second, clock, START_MS + HOUR_MS) == ["a1b2.0"]
    assert second.state.waits() == FeedbackWait()
    second.close()


@pytest.mark.parametrize("is_rated", [True, False])
async def test_a_source_that_was_taken_out_is_waited_for_no_more(tmp_path: Path, is_rated: bool) -> None:
    clock = Clock()
    log = await log_by(clock)
    if is_rated:
        await log.publish(VERIFIED, said(REF, 1.0, source="user"))
    second = await begun_anew(log, tmp_path, rules(user=HOUR_MS, csat=DAY_MS), rules(user=HOUR_MS))
    assert await ended_at(log, second, clock, START_MS + 1) == (["a1b2.0"] if is_rated else [])
    assert await ended_at(log, second, clock, START_MS + HOUR_MS) == ["a1b2.0"]
    second.close()


def test_what_new_rules_would_have_closed_by_now_closes_in_portions() -> None:
    count = 2 * PORTION + 500
    inbox = FakePartition(step_ms=1).extend(block(answer(f"a{at}.0", 0, size=1, lane="live")) for at in range(count))
    state, now = State(), rules(csat=1)
    assert not decisions(folded(inbox, rules(csat=DAY_MS), state=state))
    assert go_by(state, now) == count
    closed = []
    for _ in range(4):
        inbox.append(tick(), after_ms=APART_MS if closed else 0)
        closed.append(len(decisions(folded(inbox, now, state=state))))
    assert closed == [PORTION + 1, PORTION + 1, 498, 0], "and the last two when their own time comes"
    assert state.waits() == FeedbackWait()
