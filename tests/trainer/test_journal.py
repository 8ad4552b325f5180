"""The journal's reading rules: fences, first record wins, rollbacks."""

import asyncio

import pytest

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Batch, Fence, PolicyEvent, Rollback, Saved, Skip, topics
from schemas.errors import BadFrame, FencedOut
from trainer.journal.journal import (
    Journal,
    Lease,
    Pending,
    append,
    effective,
    is_quarantined,
    pending,
    read_journal,
    read_records,
    take_lease,
)  # fmt: skip


def batch(step: int, token: int) -> Batch:
    return Batch(run="r", token=token, step=step, version=step, items=())


def test_records_of_a_lower_token_after_a_fence_count_for_nothing() -> None:
    records = [Fence(run="r", token=1), batch(0, 1), Fence(run="r", token=5), batch(1, 1), batch(1, 5)]
    entries, token = effective(records, "r")
    assert entries == [batch(0, 1), batch(1, 5)] and token == 5


def test_the_first_record_of_a_token_and_step_wins() -> None:
    first, second = batch(0, 1), Batch(run="r", token=1, step=0, version=9, items=())
    assert effective([first, second], "r")[0] == [first]


OF_A_ZOMBIE = ((5, 0), (2, 1), (5, 1))  # token, step


def test_another_run_is_another_journal() -> None:
    assert effective([Fence(run="other", token=9), batch(0, 1)], "r") == ([batch(0, 1)], 1)


def test_a_batch_and_its_skip_both_count() -> None:
    skip = Skip(run="r", token=1, step=0, reason="not finite")
    assert effective([batch(0, 1), skip], "r")[0] == [batch(0, 1), skip]


def test_rolled_back_batches_are_never_executed_again() -> None:
    back = Rollback(run="r", token=1, from_step=1, to_step=2, restored_version=1, version=3, reason="x")
    entries = [batch(0, 1), batch(1, 1), batch(2, 1), back, batch(3, 1)]
    assert pending(entries, after_step=-1) == [
        Pending(batch(0, 1), "trained"), Pending(batch(1, 1), "quarantined"), Pending(batch(2, 1), "quarantined"),
        back, Pending(batch(3, 1), "open"),
    ]  # fmt: skip
    assert [is_quarantined(entries, step) for step in range(4)] == [False, True, False, False]
    assert pending(entries, after_step=2) == [Pending(batch(3, 1), "open")], "a state after the rollback holds it"


def test_batches_before_the_checkpoint_are_not_executed_again() -> None:
    assert pending([batch(0, 1), batch(1, 1)], after_step=0) == [Pending(batch(1, 1), "open")]


def test_a_step_that_was_skipped_is_known_to_be() -> None:
    skip = Skip(run="r", token=1, step=0, reason="not finite")
    assert pending([batch(0, 1), skip, batch(1, 1)], after_step=-1)[0] == Pending(batch(0, 1), "skipped")


def journal_of(*tokens: int) -> tuple[Log, Lease]:
    """A log whose journal is fenced by `tokens`, and the lease of the first."""
    log = Log(MemoryBus(), "t")

    async def fill() -> None:
        await log.create_topics(partitions=1, keep_ms=-1)
        for token in tokens:
            await log.publish(topics.BATCHES, Fence(run="r", token=token, owner=f"train/{token}"))

    asyncio.run(fill())
    return log, Lease(run="r", token=tokens[0], owner="")


def test_a_write_after_a_newer_fence_raises_before_anything_follows_from_it() -> None:
    log, lease = journal_of(1, 5)
    with pytest.raises(FencedOut, match="train/5 took 5 and fenced the journal at offset 1"):
        asyncio.run(append(log, lease, batch(0, 1), expected=1))


def test_a_write_behind_older_fences_or_other_runs_counts() -> None:
    log, lease = journal_of(5, 1)
    asyncio.run(log.publish(topics.BATCHES, Fence(run="other", token=9, owner="")))
    assert asyncio.run(append(log, lease, batch(0, 5), expected=1)).offset == 3


def test_a_journal_record_that_cannot_be_read_is_named_by_its_offset() -> None:
    log, lease = journal_of(1)
    asyncio.run(log.bus.send(log.name(topics.BATCHES), b"HR?", key=b"r"))
    with pytest.raises(BadFrame, match="journal offset 1: "):
        asyncio.run(read_journal(log, lease))


def back(from_step: int, to_step: int, token: int = 1) -> Rollback:
    return Rollback(
        run="r", token=token, from_step=from_step, to_step=to_step, restored_version=0, version=9, reason="x"
    )


def test_an_empty_journal_is_read_from_its_start_and_has_no_fence() -> None:
    assert Journal() == Journal(entries=(), next_offset=0, token=-1)
    assert effective([], "r") == ([], -1)


def test_a_fence_read_before_the_first_record_counts_and_an_older_one_lowers_nothing() -> None:
    assert effective([batch(0, 1), batch(1, 5)], "r", token=5) == ([batch(1, 5)], 5)
    assert effective([Fence(run="r", token=5), Fence(run="r", token=1), batch(0, 4)], "r") == ([], 5)


def test_rollbacks_are_told_apart_by_their_first_step() -> None:
    records = [back(1, 4), back(1, 3), back(2, 4)]
    assert effective(records, "r")[0] == [back(1, 4), back(2, 4)]


def test_a_skipped_step_that_was_taken_back_later_is_quarantined_and_so_is_no_step_beside_it() -> None:
    skips = [Skip(run="r", token=1, step=step, reason="x") for step in (1, 4)]
    entries = [*(batch(step, 1) for step in range(5)), *skips, back(1, 2), batch(5, 1)]
    fates = [(one.batch.step, one.fate) for one in pending(entries, -1) if isinstance(one, Pending)]
    assert fates == [
        (0, "trained"), (1, "quarantined"), (2, "quarantined"), (3, "trained"), (4, "skipped"), (5, "open")
    ]  # fmt: skip


def test_what_is_pending_comes_in_the_order_of_steps_and_the_first_batch_of_a_step_counts() -> None:
    again = Batch(run="r", token=2, step=3, version=8, items=())
    saved = Saved(run="r", token=1, step=9, version=9, sha256="", phase="", made_with={})
    found = pending([batch(3, 1), batch(2, 1), again, saved], 1)
    assert found == [Pending(batch(2, 1), "trained"), Pending(batch(3, 1), "open")]
    assert pending([], 4) == []


def test_a_rollback_behind_a_state_that_ends_in_its_steps_is_pending() -> None:
    assert pending([back(1, 3)], 2) == [back(1, 3)]
    assert pending([back(1, 3)], 3) == []
    assert pending([batch(3, 1), back(1, 3)], 2) == [Pending(batch(3, 1), "quarantined"), back(1, 3)]


def test_a_lease_is_announced_and_fences_the_journal_under_its_offset() -> None:
    log, _ = journal_of(1)
    asyncio.run(log.publish(topics.POLICIES, PolicyEvent(event="lease", policy="other")))
    lease = asyncio.run(take_lease(log, policy="main", run="r", owner="train/7"))
    assert lease == Lease(run="r", token=1, owner="train/7")
    told = records_of(log, topics.POLICIES)[1]
    assert (told.event, told.policy, told.owner) == ("lease", "main", "train/7")
    assert records_of(log, topics.BATCHES)[1] == Fence(run="r", token=1, owner="train/7")


def records_of(log: Log, topic: str) -> list:
    async def read() -> list:
        reader = await log.assigned(topic, {0: 0})
        return [message.value for message in await log.read(reader, timeout_s=1.0)]

    return asyncio.run(read())


def offsets(log: Log, start: int, stop: int | None = None) -> list[int]:
    async def read() -> list[int]:
        return [message.offset async for message in read_records(log, start, stop)]

    return asyncio.run(read())


def test_records_are_read_from_start_up_to_stop_and_by_default_to_the_end() -> None:
    log, _ = journal_of(1, 2, 3, 4)
    assert offsets(log, 0) == [0, 1, 2, 3] and offsets(log, 1, 3) == [1, 2]
    assert offsets(log, 4) == offsets(log, 2, 2) == offsets(log, 3, 2) == []


def test_a_gap_in_the_journal_is_named_with_what_is_missing_and_what_is_there() -> None:
    log, _ = journal_of(1, 2, 3)
    del log.bus.log(Partition(log.name(topics.BATCHES), 0)).records[1]  # type: ignore[attr-defined]
    with pytest.raises(BadFrame, match="journal offset 1: missing, the next record is at 2"):
        offsets(log, 0, 3)


def test_a_journal_is_what_counts_up_to_this_lease_and_where_to_read_on() -> None:
    log, lease = journal_of(5)
    for record in (batch(0, 5), batch(1, 5)):
        asyncio.run(log.publish(topics.BATCHES, record))
    assert asyncio.run(read_journal(log, lease)) == Journal((batch(0, 5), batch(1, 5)), 3, 5)
    assert asyncio.run(read_journal(log, lease, start=2, token=5)) == Journal((batch(1, 5),), 3, 5)
    assert asyncio.run(read_journal(log, lease, start=3, token=4)) == Journal((), 3, 4)
    assert asyncio.run(read_journal(log, lease, start=3)) == Journal((), 3, -1)
    with pytest.raises(FencedOut, match="holds token 5, token 6 has taken over"):
        asyncio.run(read_journal(log, lease, start=3, token=6))


def test_fences_read_before_a_write_stop_nobody_again() -> None:
    log, lease = journal_of(5, 9)
    assert asyncio.run(append(log, lease, batch(0, 5), expected=2)).offset == 2
    asyncio.run(log.publish(topics.BATCHES, Fence(run="r", token=5, owner="itself")))
    assert asyncio.run(append(log, lease, batch(1, 5), expected=2)).offset == 4


def test_of_a_trimmed_journal_the_first_record_stands_for_the_fence_before_it() -> None:
    first, late, second = (Batch(run="r", token=token, step=step, version=0, items=()) for token, step in OF_A_ZOMBIE)
    whole = [Fence(run="r", token=5), first, late, second]
    assert effective(whole, "r") == ([first, second], 5)
    assert effective(whole[1:], "r") == ([first, second], 5), "what an overtaken trainer wrote counts"
