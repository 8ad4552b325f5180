"""Worker: watchdog, clock, rules from settings, and the message it ends with."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from actors.tasksets.loader import example_block
from actors.tasksets.taskset import Preference
from infra.chain.chain import Context, new_memories, run_chain
from infra.log.bus import Partition, RecordPosition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.roles.process import EXIT_STUCK, ClaimedFolder
from infra.settings.config import Floor, Keep, decode
from schemas import Block, Closure, Experience, Message, Progress
from schemas.experience import pair_fault
from schemas.topics import PROGRESS, VERIFIED
from streams.collect.fold import fold
from streams.collect.inbox import CollectDriver
from streams.collect.rules import collect_rules
from streams.collect.state import State
from streams.config import RewardConfig, ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from streams.stages.stage import process_exit
from streams.worker import HeldTopic, LogTime, report, watch
from tests.actors.rig import CharTokenizer
from tests.simulator.virtual_loop import VirtualLoop
from tests.streams.collect.collecting import RULES, FakePartition, answer, block
from tests.streams.collect.test_collector import settings
from tests.streams.deliveries import KeptDelivery


def test_two_workers_of_one_machine_have_different_folders(tmp_path: Path) -> None:
    first, second = ClaimedFolder(tmp_path), ClaimedFolder(tmp_path)
    assert [first.path.name, second.path.name] == ["worker-0", "worker-1"]
    first.release()
    third = ClaimedFolder(tmp_path)
    assert third.path.name == "worker-0"
    second.release()
    third.release()


class Ended(Exception):
    """The end of the process, with the message of the watchdog."""


def watched(held_by: str, *, lag: bool = True, moves: Callable[[int], int] = lambda second: 0) -> str:
    """Messages of a worker's watchdog in 20 minutes about a partition that has lag. held_by: "me", "other" or "".

    moves: what is committed after so many seconds.
    """
    loop = VirtualLoop(Random(0))

    def end(message: str, code: int) -> NoReturn:
        assert code == EXIT_STUCK
        raise Ended(message)

    async def main() -> str:
        process_exit.set(end)
        bus = MemoryBus()
        log = Log(bus, "a")
        await bus.create_topic("a.verified", 1, {})
        if held_by:
            await bus.subscribed(["a.verified"], group="a.collect")
        for _ in range(2000 if lag else 0):
            await bus.send("a.verified", b"x", key=b"k")
        mine = {0} if held_by == "me" else set[int]()

        def held() -> list[HeldTopic]:
            bus.group("a.collect").committed = {Partition("a.verified", 0): moves(int(loop.time() - began_s))}
            return [HeldTopic(topic="a.verified", group="a.collect", partitions=mine, marks={})]

        began_s = loop.time()
        try:
            async with asyncio.timeout(1200):
                await watch(log, held, Metrics("process"), stuck_s=180.0)
        except Ended as error:
            return str(error)
        except TimeoutError:
            pass
        return ""

    try:
        return loop.run_until_complete(main())
    finally:
        loop.abandon()


def test_a_worker_whose_group_lets_none_in_or_deals_it_nothing_ends() -> None:
    assert "a.verified/0, held by no worker of a.collect: 2000 records behind" in watched("")


def test_a_worker_that_holds_a_partition_and_does_not_move_ends() -> None:
    assert "a.verified/0, held here: 2000 records behind" in watched("me")


@pytest.mark.parametrize("held_by", ["me", ""])
def test_a_worker_lives_while_there_is_nothing_to_do_or_something_moves(held_by: str) -> None:
    assert watched(held_by, lag=False) == ""
    assert watched(held_by, moves=lambda second: second) == ""


def test_a_worker_lives_while_another_holds_what_does_not_move() -> None:
    assert watched("other") == ""


def test_feedback_tables_become_the_rules_of_collect() -> None:
    table = {
        "feedback": [
            {"name": "csat", "use": "support:csat", "from": {"topic": "zendesk"}, "window": "2h", "default": 0.5},
            {"name": "edit", "use": "support:edit", "from": {"topic": "edits"}, "late": "retrain"},
        ],
        "collect": {"deadline_s": 60},
    }
    rules = collect_rules(Floor(app="bot", keep=Keep(replay="2d")), decode(table, StreamsConfig, "bot.toml"))
    assert (rules.deadline_ms, rules.keep_ms) == (60_000, 172_800_000)
    assert (rules.sources["csat"].window_ms, rules.sources["csat"].default) == (7_200_000, 0.5)
    assert (rules.sources["edit"].default, rules.sources["edit"].late) == (None, "retrain")


HOURS_MS = 2 * 3_600_000
TRUE_MS = 1_763_715_600_000


async def feed(log: Log, driver: CollectDriver) -> None:
    """Hand on what comes, ticks too."""
    async for message in log.tail(VERIFIED, "beginning"):
        await driver.accept(KeptDelivery(message.record, generation=1))


@pytest.mark.parametrize("off_ms", [HOURS_MS, -HOURS_MS, 0])
def test_a_group_of_an_idle_partition_is_closed_in_time_whatever_the_machines_clock_says(
    off_ms: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = VirtualLoop(Random(0))
    began_s = loop.time()

    def true_ms() -> int:
        return TRUE_MS + round(1000 * (loop.time() - began_s))

    async def closed_after_ms() -> int:
        bus = MemoryBus(true_ms)
        log, time = Log(bus, "t"), LogTime(lambda: true_ms() + off_ms)
        await log.create_topics(partitions=1, keep_ms=-1)
        telling = asyncio.create_task(report(log, lambda: Progress(role="process", instance="p"), time))
        async with asyncio.TaskGroup() as tasks:

            async def committed(partition: int) -> int:
                return 0

            driver = CollectDriver(log, Metrics("process"), settings(tmp_path), committed, tasks, wall_ms=time.now_ms)
            driver.assigned({0}, 1)
            came = await log.publish(VERIFIED, block(answer("t.0", 0)))  # of two: the group waits for the other
            feeding = tasks.create_task(feed(log, driver))
            async for closure in log.tail(PROGRESS, "beginning"):
                if isinstance(closure.value, Closure):
                    break
            feeding.cancel()
            driver.retire(1)
            await driver.finish()
        telling.cancel()
        return closure.record.timestamp_ms - came.timestamp_ms

    with caplog.at_level(logging.WARNING):
        took_ms = loop.run_until_complete(closed_after_ms())
    rules = settings(tmp_path).rules
    assert rules.deadline_ms <= took_ms <= rules.deadline_ms + 10_000
    said = [record.getMessage() for record in caplog.records if "clock_off" in record.getMessage()]
    assert said == ([f"clock_off seconds={off_ms // 1000}: stages go by the broker's clock"] if off_ms else [])


def heard(time: LogTime, stored_ms: int, then: Callable[[], None] = lambda: None) -> None:
    """A record that the broker says was stored then. then: what happens before that is known."""

    async def storing() -> RecordPosition:
        then()
        return RecordPosition("t.reports", 0, 0, stored_ms)

    asyncio.run(time.hear(storing()))


def test_a_clock_that_is_put_right_is_gone_by_again() -> None:
    now = [HOURS_MS]
    time = LogTime(lambda: now[0])
    assert time.now_ms() == HOURS_MS
    heard(time, 0)
    assert time.now_ms() == 0
    now[0] = 2000
    heard(time, 1990)
    assert time.now_ms() == 2000


CONFIG = StreamsConfig(
    score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),), reward=RewardConfig(require=("exact",))
)


def pair() -> Block:
    asked = (Message(role="user", content="2+2="),)
    return example_block(Preference(id="q", messages=asked, chosen="4", rejected="5"), CharTokenizer())


def verified(experiences: tuple[Experience, ...]) -> tuple[Experience, ...]:
    steps = build_verify(CONFIG)
    outcome = asyncio.run(run_chain(steps, experiences, Context(memories=new_memories(steps))))
    assert not outcome.dropped
    return outcome.kept


def test_a_pair_reaches_the_buffer_whole_and_unjudged() -> None:
    kept = verified(pair().experiences)
    arrival = FakePartition().append(Block(kept))
    result = asyncio.run(fold(State(), arrival, RULES, partial(run_chain, build_collect(CONFIG))))
    (decision,) = result.decisions
    assert (decision.closure.outcome, decision.closure.experiences, decision.closure.lane) == ("buffered", 2, "human")
    (block,) = decision.blocks
    assert pair_fault(block.experiences) == ""
    assert [(member.reward, member.advantage, member.scores) for member in block.experiences] == [(None, None, ())] * 2
