"""The journal's reading rules: fences, first record wins, rollbacks."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ledger.account import audit
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Keep
from infra.store.memory import MemoryStore
from schemas import Batch, Fence, Rollback, Saved, Skip, topics
from schemas.errors import BadFrame, FencedOut, OffsetOutOfRange
from schemas.journal import effective
from tests.trainer.memory_run import CONFIG, FLOOR, STEPS, block, filled_log, journal, new_run, train
from trainer.config import SLOTS, LaneConfig
from trainer.journal.checkpoint import (
    CheckpointPlace,
    CheckpointTime,
    Manifest,
    Position,
    journal_begin,
    kept,
    load_newest,
    places,
    remove,
    trim_below,
    uses_below,
)
from trainer.journal.journal import Journal, Lease, Pending, append, pending, read_journal, read_records
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.saving import trim_journal


def batch(step: int, token: int) -> Batch:
    return Batch(run="r", token=token, step=step, version=step, items=())


def test_records_of_a_lower_token_after_a_fence_count_for_nothing() -> None:
    records = [Fence(run="r", token=1), batch(0, 1), Fence(run="r", token=5), batch(1, 1), batch(1, 5)]
    entries, token = effective(records, "r")
    assert entries == [batch(0, 1), batch(1, 5)] and token == 5


OF_A_ZOMBIE = ((5, 0), (2, 1), (5, 1))  # token, step


def back(from_step: int, to_step: int) -> Rollback:
    return Rollback(run="r", token=1, from_step=from_step, to_step=to_step, restored_version=0, version=9, reason="x")


SAVED = Saved(run="r", token=1, step=9, version=9, sha256="", phase="", made_with={})
SKIPS = [Skip(run="r", token=1, step=step, reason="x") for step in (1, 4)]
FIVE = [batch(step, 1) for step in range(5)]


@pytest.mark.parametrize(
    ("entries", "after_step", "expected"),
    [
        # Batches that were rolled back are not executed again, and a state after the rollback holds it.
        ([*FIVE[:3], back(1, 2), FIVE[3]], -1, ["0 trained", "1 quarantined", "2 quarantined", "back", "3 open"]),
        ([*FIVE[:3], back(1, 2), FIVE[3]], 2, ["3 open"]),
        # A skipped step that was taken back later is quarantined, and so is no step beside it.
        ([*FIVE, *SKIPS, back(1, 2), batch(5, 1)], -1,
         ["0 trained", "1 quarantined", "2 quarantined", "back", "3 trained", "4 skipped", "5 open"]),
        # In the order of steps; the first batch of a step counts.
        ([FIVE[3], FIVE[2], batch(3, 2), SAVED], 1, ["2 trained", "3 open"]),
        ([], 4, []),
        # A rollback behind a state that ends in its steps.
        ([back(1, 3)], 2, ["back"]),
        ([back(1, 3)], 3, []),
        ([FIVE[3], back(1, 3)], 2, ["3 quarantined", "back"]),
    ],
)  # fmt: skip
def test_what_is_left_to_do_of_a_journal(entries: list, after_step: int, expected: list[str]) -> None:
    found = pending(entries, after_step)
    assert [f"{each.batch.step} {each.fate}" if isinstance(each, Pending) else "back" for each in found] == expected


def test_a_second_rollback_to_the_same_checkpoint_counts_and_one_that_was_sent_twice_counts_once() -> None:
    records = [*FIVE[:3], back(1, 2), FIVE[3], back(1, 3)]
    assert effective([*records, back(1, 3)], "r") == (records, 1)


async def journal_of(*tokens: int) -> tuple[Log, Lease]:
    """A log whose journal is fenced by `tokens`, and the lease of the first."""
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    for token in tokens:
        await log.publish(topics.BATCHES, Fence(run="r", token=token, owner=f"train/{token}"))
    return log, Lease(run="r", token=tokens[0], owner="")


async def test_a_write_after_a_newer_fence_raises_before_anything_follows_from_it() -> None:
    log, lease = await journal_of(1, 5)
    with pytest.raises(FencedOut, match="train/5 took 5 and fenced the journal at offset 1"):
        await append(log, lease, batch(0, 1), expected=1)


async def test_a_journal_record_that_cannot_be_read_is_named_by_its_offset() -> None:
    log, lease = await journal_of(1)
    await log.bus.send(log.name(topics.BATCHES), b"HR?", key=b"r")
    with pytest.raises(BadFrame, match="journal offset 1: "):
        await read_journal(log, lease)


def test_a_fence_read_before_the_first_record_counts_and_an_older_one_lowers_nothing() -> None:
    assert effective([batch(0, 1), batch(1, 5)], "r", token=5) == ([batch(1, 5)], 5)
    assert effective([Fence(run="r", token=5), Fence(run="r", token=1), batch(0, 4)], "r") == ([], 5)


async def test_a_gap_in_the_journal_is_named_with_what_is_missing_and_what_is_there() -> None:
    log, _ = await journal_of(1, 2, 3)
    del log.bus.log(Partition(log.name(topics.BATCHES), 0)).records[1]  # type: ignore[attr-defined]
    with pytest.raises(BadFrame, match="journal offset 1: missing, the next record is at 2"):
        [message.offset async for message in read_records(log, 0, 3)]


async def test_a_journal_is_what_counts_up_to_this_lease_and_where_to_read_on() -> None:
    log, lease = await journal_of(5)
    for record in (batch(0, 5), batch(1, 5)):
        await log.publish(topics.BATCHES, record)
    assert await read_journal(log, lease) == Journal((batch(0, 5), batch(1, 5)), 3, 5)
    assert await read_journal(log, lease, start=2, token=5) == Journal((batch(1, 5),), 3, 5)
    assert await read_journal(log, lease, start=3, token=4) == Journal((), 3, 4)
    assert await read_journal(log, lease, start=3) == Journal((), 3, -1)
    with pytest.raises(FencedOut, match="holds token 5, token 6 has taken over"):
        await read_journal(log, lease, start=3, token=6)


def test_of_a_trimmed_journal_the_first_record_stands_for_the_fence_before_it() -> None:
    first, late, second = (Batch(run="r", token=token, step=step, version=0, items=()) for token, step in OF_A_ZOMBIE)
    whole = [Fence(run="r", token=5), first, late, second]
    assert effective(whole, "r") == ([first, second], 5)
    assert effective(whole[1:], "r") == ([first, second], 5), "what an overtaken trainer wrote counts"


def pruned(gaps_ms: list[int], newest: int, keep_ms: int) -> tuple[list[CheckpointTime], list[CheckpointTime]]:
    """All checkpoints of a run that prunes after each, and those that are left at its end."""
    made: list[CheckpointTime] = []
    left: list[CheckpointTime] = []
    for step, gap in enumerate(gaps_ms):
        each = CheckpointTime(CheckpointPlace(step, 1), (made[-1].time_ms if made else 10**12) + gap)
        made.append(each)
        stay = kept([*left, each], newest=newest, keep_ms=keep_ms)
        left = [mark for mark in [*left, each] if mark.place in stay]
        assert len(left) <= newest + SLOTS + 2
    return made, left


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=80), st.integers(3, 6), st.integers(1, 100_000))
def test_the_newest_stay_and_everything_inside_the_horizon_can_be_replayed(
    gaps_ms: list[int], newest: int, keep_ms: int
) -> None:
    made, left = pruned(gaps_ms, newest, keep_ms)
    assert left[-newest:] == made[-newest:]
    begins_ms = made[-1].time_ms - keep_ms
    assert left[0].time_ms <= begins_ms or left[0] == made[0], "the first one inside could not be replayed"


def test_checkpoints_thin_out_to_about_one_in_each_span_of_the_horizon() -> None:
    made, left = pruned([1000] * 1000, 3, 80_000)  # spans of 10 s
    inside = [each for each in left[:-3] if each.time_ms > made[-1].time_ms - 80_000]
    assert SLOTS - 2 <= len(inside) <= SLOTS + 1
    assert all(each.time_ms % 10_000 == 0 for each in inside)


def manifest(step: int, oldest_offset: int = 0, *, token: int = 1, time_ms: int = 0, **position: int) -> Manifest:
    return Manifest(
        position=Position(step=step, **position),  # type: ignore[arg-type]
        state="", size=0, sha256="", index="", index_sha256="", token=token, oldest_offset=oldest_offset, time_ms=time_ms,
    )  # fmt: skip


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 1000), min_size=1), st.data())
def test_the_buffer_is_trimmed_to_what_the_neediest_kept_checkpoint_needs_and_never_above(
    needs: dict[int, int], data: st.DataObject
) -> None:
    manifests = [manifest(step, offset) for step, offset in needs.items()]
    stay = data.draw(st.sets(st.sampled_from([manifest.place for manifest in manifests]), min_size=1))
    below = trim_below(manifests, stay)
    assert all(below <= manifest.oldest_offset for manifest in manifests if manifest.place in stay)
    assert any(below == manifest.oldest_offset for manifest in manifests if manifest.place in stay)


def test_uses_reach_back_to_what_the_oldest_checkpoint_had_read_once_it_is_older_than_the_horizon() -> None:
    made = [manifest(step, token=0, time_ms=10**12 + 1000 * step, buffer_next=10 * step) for step in range(4)]
    stay = {each.place for each in made[2:]}
    assert uses_below(made, stay, keep_ms=1000) == 20
    assert uses_below(made, stay, keep_ms=1001) == 0, "what the oldest had read may be delivered again"
    assert uses_below([], set(), keep_ms=1000) == 0


async def test_what_was_trained_before_the_first_checkpoint_and_is_delivered_after_it_is_not_trained_again() -> None:
    expert = LaneConfig(loss="sft", weight=0.5, max_uses=1, optional=True)
    lanes = {"usual": LaneConfig(weight=0.5), "expert": expert}
    config = msgspec.structs.replace(CONFIG, lanes=lanes, warmup=None, checkpoint_every=1)
    log, store = await new_run()
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(config, max_steps=6))
    for number in range(4):  # by a worker that died before it could say that it had sent them
        await log.publish(topics.BUFFER, block(number, "expert"))
    await train(log, store, ScriptedLearner(), config)
    batches = [entry for entry in await journal(log) if isinstance(entry, Batch)]
    times = Counter((item.id, item.use) for batch in batches for item in batch.items if item.lane == "expert")
    assert len(times) == 8 and set(times.values()) == {1}


async def test_a_checkpoint_remembers_the_uses_of_its_horizon_and_not_of_the_whole_run() -> None:
    async def remembered(keep: str) -> int:
        tick, store = itertools.count(step=1000), MemoryStore()
        log = await filled_log(store, MemoryBus(lambda: next(tick)))
        config = msgspec.structs.replace(CONFIG, checkpoint_every=1)
        await train(log, store, ScriptedLearner(), config, msgspec.structs.replace(FLOOR, keep=Keep(replay=keep)))
        found = load_newest(store, "t")
        assert found is not None and found.position.step >= STEPS
        return len(found.uses)

    whole = await remembered("30d")
    assert whole >= 2 * STEPS
    assert await remembered("10s") < whole / 2


def test_the_journal_reaches_back_to_the_newest_checkpoint_older_than_the_horizon() -> None:
    made = [
        manifest(step, token=0, time_ms=10**12 + 1000 * step, journal_next=10 * step, journal_token=7)
        for step in range(1, 5)
    ]
    stay = {each.place for each in made[1:]}
    assert journal_begin(made, stay, keep_ms=2000) == (19, 7)
    assert journal_begin(made, stay, keep_ms=2001) == (0, -1), "another run may have written inside the horizon"
    assert journal_begin([], set(), keep_ms=1000) == (0, -1)


async def test_the_journal_is_bounded_by_the_horizon_and_resume_audit_and_another_run_go_on_from_what_is_kept() -> None:
    config = msgspec.structs.replace(CONFIG, checkpoint_every=1)
    floor = msgspec.structs.replace(FLOOR, keep=Keep(replay="10s"))
    tick, store = itertools.count(step=1000), MemoryStore()
    log = await filled_log(store, MemoryBus(lambda: next(tick)))
    await train(log, store, ScriptedLearner(), msgspec.structs.replace(config, max_steps=STEPS - 2), floor)
    (first,), _ = (list(bound.values()) for bound in await log.bounds(topics.BATCHES))
    assert first > 10, "the journal grows with the life of the run"
    kept_records = await journal(log)
    entries, token = effective([record for record in kept_records if not isinstance(record, Fence)], "t")
    assert token == entries[0].token, "the first record kept says which lease was in force"
    before = load_newest(store, "t")
    await train(log, store, ScriptedLearner(), config, floor)  # resumes from what is kept
    after = load_newest(store, "t")
    assert before is not None and after is not None and after.position.step > before.position.step
    account = await audit(log, "t")
    assert account.is_clean
    for sequence in range(90, 94):
        await log.publish(topics.BUFFER, block(sequence))
    config, floor = msgspec.structs.replace(CONFIG, max_steps=2, warmup=None), msgspec.structs.replace(floor, run="u")
    await train(log, store, ScriptedLearner(), config, floor)
    assert [entry.step for entry in await journal(log) if isinstance(entry, Batch) and entry.run == "u"] == [0, 1]
    remove(store, "u", places(store, "u"))
    (end,) = (await log.bounds(topics.BATCHES))[1].values()
    await log.bus.delete_records(Partition(log.name(topics.BATCHES), 0), end - 1)
    with pytest.raises(OffsetOutOfRange, match="no checkpoint is left, and its journal is kept from step 1 on"):
        await train(log, store, ScriptedLearner(), config, floor)


async def test_a_journal_is_not_trimmed_to_a_record_of_a_trainer_that_was_overtaken() -> None:
    async def begins(token: int) -> int:
        log = await filled_log(MemoryStore())
        for number in range(6):
            await log.publish(topics.BATCHES, Fence(run="t", token=token if number == 4 else 9))
        trimmed = await trim_journal(log, "t", 4, 9)
        assert trimmed == (token >= 9)
        return (await log.bounds(topics.BATCHES))[0][0]

    assert await begins(9) == 4
    assert await begins(8) == 0
