"""The trainer's ears: who is missing, and what may no longer be waited for."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.policies.fold import PoliciesFold
from schemas import Closure, MasterState, PolicyEvent, Progress, topics
from schemas.errors import FencedOut
from tests.trainer.buffered_blocks import block, message
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake, follow_buffer
from trainer.journal.journal import take_lease
from trainer.train import watch_policies


def intake(**offsets: int) -> Intake:
    return Intake(Buffer({"usual": 1}), **{"buffer_next": 0, "progress_next": 0, **offsets})


def arrive(each: Intake, *sequences: int) -> None:
    for sequence in sequences:
        arrived = block(f"g{sequence}.0", sequence=sequence)
        assert each.take_block(message(arrived, sequence), arrived) == ""


def closed(sequence: int, outcome: str = "dropped") -> Closure:
    return Closure(group=f"g{sequence}.0", outcome=outcome, sequence=sequence)  # type: ignore[arg-type]


def test_what_lies_below_a_draw_is_no_longer_waited_for_unless_it_is_still_absent() -> None:
    each = intake()
    arrive(each, 0, 1, 3, 4)
    each.settle([0, 1])
    assert each.floor == 2 and each.absent() == [2]
    each.settle([3, 4])
    assert each.floor == 2, "2 may still come, and is then the oldest"
    arrive(each, 2)
    each.settle([2])
    assert each.floor == 3


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30))
def test_the_floor_only_rises_and_never_passes_an_absent_number(events: list[tuple[int, bool]]) -> None:
    each, arrived = intake(), set()
    for number, draw in events:
        if number not in arrived and number >= each.floor:
            arrive(each, number)
            arrived.add(number)
        if draw:
            before, absent = each.floor, each.absent()
            each.settle([number])
            assert each.floor >= before
            assert all(each.floor <= missing for missing in absent if missing <= number)


def test_only_the_masters_word_says_that_no_more_will_come() -> None:
    each = intake()
    each.take_report(Progress(role="explore", instance="e", state="draining", gauges={"outstanding_groups": 9.0}))
    assert not each.draining and each.outstanding_groups == 0
    each.take_report(Progress(role="master", instance="m", master=MasterState(state="draining", outstanding=9)))
    assert each.draining and each.outstanding_groups == 9
    each.take_report(Progress(role="master", instance="m", state="issuing", gauges={"outstanding_groups": 1.0}))
    assert each.draining and each.outstanding_groups == 9, "names and gauges are for people"
    each.take_report(Progress(role="master", instance="m", master=MasterState(state="issuing")))
    assert not each.draining


async def test_a_restart_reads_on_no_further_than_the_drops_that_were_told() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    each = intake()
    telling, told = asyncio.Event(), asyncio.Event()

    async def tell_dropped(dropped: dict[str, str]) -> None:
        telling.set()
        await told.wait()

    await log.publish(topics.BUFFER, block("a.0"))
    await log.publish(topics.BUFFER, block("b.0", lane="live"))
    await log.publish(topics.BUFFER, block("c.0"))
    following = asyncio.create_task(follow_buffer(log, each, Metrics("train"), tell_dropped))
    async with asyncio.timeout(10):
        await telling.wait()
        assert each.buffer_next == 1, "a checkpoint of now must not pass b.0, which nobody knows to be dropped"
        told.set()
        while each.buffer_next < 3:
            each.changed.clear()
            await each.changed.wait()
    following.cancel()
    assert each.buffer.references() == [0, 2]


async def test_what_of_the_buffer_cannot_be_read_or_trained_is_dropped_with_a_reason() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    each, metrics = intake(), Metrics("train")
    told: dict[str, str] = {}

    async def tell_dropped(dropped: dict[str, str]) -> None:
        told.update(dropped)

    following = asyncio.create_task(follow_buffer(log, each, metrics, tell_dropped))
    await log.bus.send(log.name(topics.BUFFER), b"no frame", key=b"k", headers=(("group", b"c.0"),))
    await log.publish(topics.BUFFER, block("b.0", lane="live"))
    await log.publish(topics.BUFFER, block("a.0"))
    async with asyncio.timeout(10):
        while each.buffer_next < 3:
            each.changed.clear()
            await each.changed.wait()
    following.cancel()
    assert each.buffer.num_groups("usual") == 1
    refused = {name: value for name, value in metrics.counters().items() if name.startswith("buffer_refused")}
    assert refused == {"buffer_refused{reason=bad frame}": 1.0, "buffer_refused{reason=lane not trained}": 1.0}
    assert told == {"c.0": "bad frame", "b.0": "lane not trained"}
    assert [message.value.reason async for message in log.read_all(topics.DEAD_LETTERS)] == ["bad frame"]


async def test_only_a_newer_lease_of_the_same_policy_ends_a_trainer() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    lease = await take_lease(log, policy="main", run="r", owner="me")
    watching = asyncio.create_task(watch_policies(log, lease, "main", intake(), PoliciesFold()))
    await log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="other", owner="x"))
    await log.publish(topics.POLICIES, PolicyEvent(event="published", policy="main", version=3))
    newer = await log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="main", owner="newer"))
    try:
        async with asyncio.timeout(10):
            await watching
        raise AssertionError("nobody noticed")
    except FencedOut as error:
        assert str(error) == f"run 'r': token {lease.token} is held here, newer took {newer.offset}"
