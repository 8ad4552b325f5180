"""Around the stages: folders nobody shares, movement told from standing still, settings turned into rules."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.roles.claimed import ClaimedFolder
from infra.roles.deadline import EXIT_STUCK
from infra.settings.config import Floor, Keep, decode
from streams.config import StreamsConfig
from streams.stages.stage import process_exit
from streams.worker import HeldTopic, Movement, QuietRepeats, rules_of, watch
from tests.simulator.virtual_loop import VirtualLoop


def test_two_workers_of_one_machine_have_different_folders(tmp_path: Path) -> None:
    first, second = ClaimedFolder(tmp_path), ClaimedFolder(tmp_path)
    assert [first.path.name, second.path.name] == ["worker-0", "worker-1"]
    first.release()
    third = ClaimedFolder(tmp_path)
    assert third.path.name == "worker-0"
    second.release()
    third.release()


def test_a_partition_is_stuck_only_while_it_lags_and_nothing_moves() -> None:
    movement = Movement()
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=100) == 0
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=130) == 30
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=7, now_s=140) == 0
    assert movement.stuck_for_s("verified", 0, lag=5, committed=2, mark=7, now_s=150) == 0
    assert movement.stuck_for_s("verified", 0, lag=0, committed=2, mark=7, now_s=180) == 0
    assert movement.stuck_for_s("verified", 0, lag=1, committed=2, mark=7, now_s=190) == 10


def test_a_partition_that_comes_back_starts_its_time_anew() -> None:
    movement = Movement()
    movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=100)
    movement.keep("verified", {1})
    assert movement.stuck_for_s("verified", 0, lag=5, committed=1, mark=0, now_s=900) == 0


class Ended(Exception):
    """What the watchdog ends the process with."""


def watched(held_by: str, *, lag: bool = True, moves: Callable[[int], int] = lambda second: 0) -> str:
    """What a worker's watchdog says in 20 minutes about one partition that has lag. held_by: "me", "other" or "".

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
    rules = rules_of(Floor(app="bot", keep=Keep(replay="2d")), decode(table, StreamsConfig, "bot.toml"))
    assert (rules.deadline_ms, rules.keep_ms) == (60_000, 172_800_000)
    assert (rules.sources["csat"].window_ms, rules.sources["csat"].default) == (7_200_000, 0.5)
    assert (rules.sources["edit"].default, rules.sources["edit"].late) == (None, "retrain")


def test_a_repeated_message_is_logged_once_in_a_while() -> None:
    quiet = QuietRepeats()
    record = logging.LogRecord("aiokafka", logging.ERROR, "", 0, "Unable connect to node with id %s", (1,), None)
    other = logging.LogRecord("aiokafka", logging.ERROR, "", 0, "Unable to update metadata from %s", ([1],), None)
    assert [quiet.filter(record), quiet.filter(record), quiet.filter(other)] == [True, False, True]
