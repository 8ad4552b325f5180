"""What waits goes by the windows of now: settings that changed hold for it from the next start on."""

import asyncio
from pathlib import Path

import pytest

from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import FeedbackWait
from schemas.topics import VERIFIED
from streams.collect.collector import Collector
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import APART_MS, PORTION, Rules, go_by
from streams.collect.state import State
from tests.streams.collect.collecting import FakePartition, answer, block, decisions, folded, said, tick
from tests.streams.collect.test_collector import closed_groups, fold_everything, opened

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
START_MS = 1_763_715_600_000
REF = "hr-a1b2.0.0-0-0"


class Clock:
    """Log-append milliseconds, set by hand."""

    now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


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
    """What has closed by then."""
    clock.now_ms = now_ms
    if await collector.tick(now_ms):
        await fold_everything(log, collector)
    return await closed_groups(log)


def test_a_shorter_window_closes_what_waits_for_the_longer_one(tmp_path: Path) -> None:
    async def run() -> None:
        clock = Clock()
        log = await log_by(clock)
        second = await begun_anew(log, tmp_path, rules(csat=DAY_MS), rules(csat=HOUR_MS))
        assert second.waits() == FeedbackWait(1, START_MS + HOUR_MS)
        assert await ended_at(log, second, clock, START_MS + HOUR_MS - 1) == []
        assert await ended_at(log, second, clock, START_MS + HOUR_MS) == ["a1b2.0"]
        assert second.waits() == FeedbackWait()
        second.close()

    asyncio.run(run())


def test_a_longer_window_keeps_what_waits_open(tmp_path: Path) -> None:
    async def run() -> None:
        clock = Clock()
        log = await log_by(clock)
        second = await begun_anew(log, tmp_path, rules(csat=HOUR_MS), rules(csat=DAY_MS))
        assert second.waits() == FeedbackWait(1, START_MS + DAY_MS)
        assert await ended_at(log, second, clock, START_MS + HOUR_MS) == []
        assert await ended_at(log, second, clock, START_MS + DAY_MS) == ["a1b2.0"]
        second.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_rated", [True, False])
def test_a_source_that_was_taken_out_is_waited_for_no_more(tmp_path: Path, is_rated: bool) -> None:
    async def run() -> None:
        clock = Clock()
        log = await log_by(clock)
        if is_rated:
            await log.publish(VERIFIED, said(REF, 1.0, source="user"))
        second = await begun_anew(log, tmp_path, rules(user=HOUR_MS, csat=DAY_MS), rules(user=HOUR_MS))
        assert await ended_at(log, second, clock, START_MS + 1) == (["a1b2.0"] if is_rated else [])
        assert await ended_at(log, second, clock, START_MS + HOUR_MS) == ["a1b2.0"]
        second.close()

    asyncio.run(run())


def test_of_several_answers_of_a_group_all_must_be_rated_before_it_closes() -> None:
    """A group that may have all it waits for is looked at again, and not just closed."""
    inbox = FakePartition().extend([block(*(answer("a1b2.0", at, size=2, lane="live") for at in range(2)))])
    inbox.extend([said(REF, 1.0), said("hr-a1b2.0.0-9-0", 1.0)])
    state = State()
    assert not decisions(folded(inbox, rules(csat=DAY_MS, user=HOUR_MS), state=state))
    assert go_by(state, rules(csat=DAY_MS)) == 1, "as many words as answers, though one is about none of them"
    inbox.append(tick())
    assert not decisions(folded(inbox, rules(csat=DAY_MS), state=state))
    assert state.waits() == FeedbackWait(2, state.oldest_ms() + DAY_MS)


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


def test_rules_that_did_not_change_move_nothing() -> None:
    waiting = block(answer("a1b2.0", 0, size=1, lane="live"))
    inbox = FakePartition().extend([said("hr-none.0.0-0-0", 1.0), block(answer("t.0", 0)), waiting, said(REF, 1.0)])
    given, state = rules(csat=DAY_MS, user=HOUR_MS), State()
    folded(inbox, given, state=state)
    before = {name: group.due_ms for name, group in state.groups.items()}
    assert len(before) == 3 and go_by(state, given) == 0
    assert {name: group.due_ms for name, group in state.groups.items()} == before
