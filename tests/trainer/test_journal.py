"""The journal's reading rules: fences, first record wins, rollbacks."""

import asyncio

import pytest

from infra.bus.log import Log
from infra.bus.memory import MemoryBus
from schemas import Batch, Fence, Rollback, Skip, topics
from schemas.errors import BadFrame, FencedOut
from trainer.journal import Lease, Pending, append, effective, is_quarantined, pending, read_journal


def batch(step: int, token: int) -> Batch:
    return Batch(run="r", token=token, step=step, version=step, items=())


def test_records_of_a_lower_token_after_a_fence_count_for_nothing() -> None:
    records = [Fence(run="r", token=1), batch(0, 1), Fence(run="r", token=5), batch(1, 1), batch(1, 5)]
    entries, token = effective(records, "r")
    assert entries == [batch(0, 1), batch(1, 5)] and token == 5


def test_the_first_record_of_a_token_and_step_wins() -> None:
    first, second = batch(0, 1), Batch(run="r", token=1, step=0, version=9, items=())
    assert effective([first, second], "r")[0] == [first]


def test_another_run_is_another_journal() -> None:
    assert effective([Fence(run="other", token=9), batch(0, 1)], "r") == ([batch(0, 1)], -1)


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
