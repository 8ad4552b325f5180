"""`trace`: an answer's way to the weights is told from records alone, and the index is a cache of the log."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infra.ledger.index import LogIndex, follow
from infra.ledger.trace import AnswerTrace, trace_answer, trace_policy
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Feedback, Fence, PolicyEvent, Rollback, Skip, topics
from schemas.errors import BrokerUnavailable, NotInLog
from tests.actors.rig import until
from tests.infra.ledger.ledger_records import RUN, batch, block, closure, stub

NAME = "a.0.0-0-0"
POLICY = "main"


class AwayBus(MemoryBus):
    """A broker that nobody can ask where the log ends, until it is back."""

    is_away = True
    num_refused = 0

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        if self.is_away:
            self.num_refused += 1
            raise BrokerUnavailable("away")
        return await super().end_offsets(topic)


def published(version: int, step: int, token: int = 1) -> PolicyEvent:
    return PolicyEvent(event="published", policy=POLICY, version=version, parent=version - 1, step=step, token=token)


async def log_of_a_run(bus: MemoryBus | None = None) -> Log:
    log = Log(bus or MemoryBus(), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    for group in ("a.0", "b.0"):
        await log.publish(topics.EXPERIENCES, block(group))
        await log.publish(topics.VERIFIED, block(group))
    await log.publish(topics.VERIFIED, stub("b.0", 1, "too short"))
    await log.publish(topics.VERIFIED, Feedback(ref=f"hr-{NAME}", id="t-1", value=0.5, source="csat"))
    await log.publish(topics.VERIFIED, Feedback(ref="hr-a.0.0-1-0", id="t-2", value=1.0, source="csat"))
    await log.publish(topics.BUFFER, block("a.0"))
    await log.publish(topics.PROGRESS, closure("a.0", "buffered"))
    await log.publish(topics.POLICIES, published(0, -1))
    await log.publish(topics.BATCHES, Fence(run=RUN, token=1))
    for step in range(3):
        await log.publish(topics.BATCHES, batch(step, NAME if step == 1 else "c.0.0-0-0", use=step))
        await log.publish(topics.POLICIES, published(step + 1, step))
    return log


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LogIndex]:
    found = LogIndex(tmp_path / "trace.sqlite", run=RUN, policy=POLICY)
    yield found
    found.close()


async def traced(log: Log, index: LogIndex, ref: str) -> AnswerTrace:
    await index.refresh(log)
    return await trace_answer(log, index, ref)


async def test_an_answer_is_followed_to_its_step_and_its_version(index: LogIndex) -> None:
    found = await traced(await log_of_a_run(), index, f"hr-{NAME}")
    assert found.published is not None and found.published.id == NAME
    assert [said.id for _, said in found.feedback] == ["t-1"], "feedback of another answer of the group is not its"
    assert [one.outcome for _, one in found.closures] == ["buffered"]
    assert len(found.buffered) == 1
    assert [(use.step, use.use, use.undone) for use in found.uses] == [(1, 1, "")]
    assert (found.first_version, found.newest_version) == (2, 3)


async def test_a_dropped_answer_says_why_and_was_learned_by_nobody(index: LogIndex) -> None:
    found = await traced(await log_of_a_run(), index, "b.0.0-1-0")
    assert (found.dropped, found.uses, found.first_version) == ("too short", (), None)


@pytest.mark.parametrize("ref", ["hr-z.9.0-0-0", "a.0.0-7-0", "nonsense"])
async def test_an_answer_the_log_does_not_hold_is_said_not_to_be_there(index: LogIndex, ref: str) -> None:
    with pytest.raises(NotInLog):
        await traced(await log_of_a_run(), index, ref)


async def test_steps_that_were_skipped_or_rolled_back_taught_nothing(index: LogIndex) -> None:
    log = await log_of_a_run()
    await log.publish(topics.BATCHES, batch(3, NAME, use=1))
    await log.publish(topics.BATCHES, Skip(run=RUN, token=1, step=3, reason="not finite"))
    await log.publish(
        topics.BATCHES,
        Rollback(run=RUN, token=1, from_step=1, to_step=2, restored_version=1, version=4, reason="alarm"),
    )
    found = await traced(log, index, NAME)
    assert [use.undone for use in found.uses] == ["rolled back: alarm", "step skipped: not finite"]
    assert found.first_version is None


async def test_a_policy_lists_the_steps_and_answers_it_was_made_of(index: LogIndex) -> None:
    log = await log_of_a_run()
    await index.refresh(log)
    made = await trace_policy(log, index, 2)
    assert (made.parent, [step.step for step in made.steps], made.ids) == (1, [1], (NAME,))
    assert made.lanes == {"usual": 1}
    with pytest.raises(NotInLog, match="the newest is 3"):
        await trace_policy(log, index, 8)


async def test_a_log_that_is_away_does_not_end_what_keeps_the_index_up(index: LogIndex) -> None:
    bus = AwayBus()
    log, stop = Log(bus, "t"), asyncio.Event()
    await log.create_topics(partitions=1, keep_ms=-1)
    await log.publish(topics.EXPERIENCES, block("a.0"))
    following = asyncio.create_task(follow(log, index, stop, every_s=0.001))
    await until(lambda: bool(bus.num_refused))
    assert not index.places("a.0")
    bus.is_away = False
    await until(lambda: bool(index.places("a.0")))
    stop.set()
    await following


async def test_what_retention_took_leaves_the_index(tmp_path: Path) -> None:
    log = await log_of_a_run()
    with closing(LogIndex(tmp_path / "trace.sqlite", run=RUN, policy=POLICY, prune_at=1)) as index:
        await index.refresh(log)
        before = index.places("a.0")
        for at, end in (await log.bus.end_offsets(log.name(topics.EXPERIENCES))).items():
            await log.bus.delete_records(at, end)
        await index.refresh(log)
        assert index.places("a.0") == [place for place in before if place.topic != "experiences"] != before


async def test_what_was_trimmed_from_the_journal_leaves_the_index(tmp_path: Path) -> None:
    log = await log_of_a_run()
    with closing(LogIndex(tmp_path / "trace.sqlite", run=RUN, policy=POLICY, prune_at=1)) as index:
        await index.refresh(log)
        first, *rest = index.steps_between(0, 99)
        assert rest
        await log.bus.delete_records(Partition(log.name(topics.BATCHES), 0), first.offset + 1)
        await index.refresh(log)
        assert index.steps_between(0, 99) == rest
