"""Frames too large for the log: deposited in the store, claimed, pruned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.blob_prune import LEEWAY_DAYS, claimed_keys, prune_frames
from infra.log.blobs import MAGIC, Claim, day_of_key, deposit, epoch_day, is_claim, read_claim, redeem
from infra.log.bus import Partition, RecordPosition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Block, DeadLetter, make_experience
from schemas.errors import BadFrame, StoreError, UnknownMajor
from schemas.topics import BUFFER, DEAD_LETTERS, EXPERIENCES, EXPERTS, Topic


def test_a_deposited_frame_is_redeemed_whole_under_one_key(store_dir: Path) -> None:
    store = DirectoryStore(store_dir)
    value = deposit(store, b"HR" + bytes(2_000_000))
    assert is_claim(value)
    assert len(value) < 200
    assert deposit(store, b"HR" + bytes(2_000_000)) == value
    assert redeem(store, value) == b"HR" + bytes(2_000_000)
    assert list(store.keys("blobs/")) == [read_claim(value).key]


def test_a_blob_that_is_gone_or_altered_is_a_bad_frame(store_dir: Path) -> None:
    store = DirectoryStore(store_dir)
    value = deposit(store, b"frame")
    key = read_claim(value).key
    for data in (b"fraud", b"frame and more"):
        store.put(key, data)
        with pytest.raises(BadFrame, match="expected 5 bytes as hashed"):
            redeem(store, value)
    store.delete(key)
    with pytest.raises(BadFrame, match="is not in the store"):
        redeem(store, value)


def test_a_claim_reaches_nothing_but_blobs(store_dir: Path) -> None:
    store = DirectoryStore(store_dir)
    store.put("keys/secret", b"x")
    for claim in (Claim("keys/secret", "keys/secret", 1), Claim("blobs/../keys/secret", "../keys/secret", 1)):
        with pytest.raises(BadFrame):
            redeem(store, MAGIC + b"\x01" + msgspec.msgpack.encode(claim))


def test_a_claim_cannot_announce_more_than_a_frame_may_hold() -> None:
    claim = Claim("blobs/020000-" + "0" * 64, "0" * 64, 1 << 40)
    with pytest.raises(BadFrame, match="128 MiB"):
        read_claim(MAGIC + b"\x01" + msgspec.msgpack.encode(claim))


def test_a_claim_of_a_newer_format_stops_its_reader() -> None:
    with pytest.raises(UnknownMajor, match="upgrade readers first"):
        read_claim(MAGIC + b"\x02anything")


WHOLE = deposit(MemoryStore(), b"frame")


@given(st.lists(st.tuples(st.integers(2, len(WHOLE) - 1), st.integers(0, 255)), max_size=4))
def test_altered_claims_reach_blobs_or_raise_nothing_else(changes: list[tuple[int, int]]) -> None:
    altered = bytearray(WHOLE)
    for place, value in changes:
        altered[place] = value
    try:
        claim = read_claim(bytes(altered))
    except (BadFrame, UnknownMajor):
        return
    assert claim.key.startswith("blobs/") and ".." not in claim.key and claim.key.endswith(claim.sha256)


KEEP_MS = 30 * 86_400_000
TODAY = 20_000
LONG_AGO = TODAY - 100
FRAME = b"a frame too large for the log"


class HookedStore(MemoryStore):
    """Does something before each object is removed. fail_after: removals, then the store fails."""

    def __init__(self, before: Callable[[str], None] = lambda key: None, fail_after: int = 1_000) -> None:
        super().__init__()
        self.before, self.left = before, fail_after

    def delete(self, key: str) -> None:
        if not self.left:
            raise StoreError("the store is away")
        self.left -= 1
        self.before(key)
        super().delete(key)


async def log_on(store: MemoryStore) -> Log:
    log = Log(MemoryBus(), "bot", store=store)
    await log.create_topics(partitions=2, keep_ms=KEEP_MS)
    return log


async def send(log: Log, topic: Topic, value: bytes) -> RecordPosition:
    return await log.bus.send(log.name(topic), value, key=b"k")


def kept(store: MemoryStore) -> set[str]:
    return set(store.keys(BLOBS))


async def prune(log: Log, today: int = TODAY) -> int:
    return await prune_frames(log, today=today, keep_ms=KEEP_MS)


async def test_what_nothing_claims_goes_when_keep_has_passed_and_not_a_day_before() -> None:
    store = MemoryStore()
    log = await log_on(store)
    deposit(store, FRAME, day=LONG_AGO)
    last_day = LONG_AGO + 30 + LEEWAY_DAYS
    assert await prune(log, today=last_day) == 0 and kept(store)
    assert await prune(log, today=last_day + 1) == 1 and not kept(store)


@pytest.mark.parametrize("topic", [EXPERIENCES, EXPERTS, BUFFER], ids=lambda topic: topic.name)
async def test_a_frame_that_a_kept_record_claims_stays_however_old_it_is(topic: Topic) -> None:
    store = MemoryStore()
    log = await log_on(store)
    at = await send(log, topic, deposit(store, FRAME, day=LONG_AGO))
    assert await prune(log) == 0
    await log.bus.delete_records(Partition(at.topic, at.partition), at.offset + 1)
    assert await prune(log) == 1


async def test_a_frame_that_only_a_dead_letter_claims_stays() -> None:
    store = MemoryStore()
    log = await log_on(store)
    value = deposit(store, FRAME, day=LONG_AGO)
    letter = DeadLetter(topic="experiences", partition=0, offset=0, stage="verify", reason="bad", value=value)
    await log.publish(DEAD_LETTERS, letter)
    assert await prune(log) == 0 and kept(store) == {read_claim(value).key}


async def test_a_frame_sent_again_while_the_old_one_is_removed_stays_readable() -> None:
    again: list[bytes] = []
    store = HookedStore(lambda key: again.append(deposit(store, FRAME, day=TODAY)))
    log = await log_on(store)
    deposit(store, FRAME, day=LONG_AGO)
    assert await prune(log) == 1 and len(again) == 1
    await send(log, EXPERIENCES, again[0])
    assert kept(store) == {read_claim(again[0]).key} == await claimed_keys(log)


async def test_a_copy_made_while_the_log_is_read_keeps_its_frame() -> None:
    """A record that expires behind the reader, after its dead letter was written."""
    store = MemoryStore()
    log = await log_on(store)
    value = deposit(store, FRAME, day=LONG_AGO)
    at = await send(log, EXPERIENCES, value)
    letter = DeadLetter(topic="experiences", partition=0, offset=0, stage="verify", reason="bad", value=value)
    begin, topics = log.assigned, []

    async def assigned(topic: Topic, starts: Any, *, group: str | None = None) -> Any:
        topics.append(topic)
        if topic is EXPERIENCES:
            await log.publish(DEAD_LETTERS, letter)
            await log.bus.delete_records(Partition(at.topic, at.partition), at.offset + 1)
        return await begin(topic, starts, group=group)

    watched = WatchedLog(log, assigned)
    assert await prune(watched) == 0 and kept(store) and topics[0] is topics[-1] is DEAD_LETTERS


class WatchedLog(Log):
    """A log whose readers are watched as they begin."""

    def __init__(self, inner: Log, begin: Callable[..., Any]) -> None:
        super().__init__(inner.bus, inner.app, store=inner.store)
        self._begin = begin

    async def assigned(self, topic: Topic, starts: Any, *, group: str | None = None, fetch_bytes: int = 0) -> Any:
        return await self._begin(topic, starts, group=group)


async def test_a_frame_that_is_sent_lies_under_the_day_of_the_sending() -> None:
    assert epoch_day(86_400.0 * TODAY + 1) == TODAY
    store = MemoryStore()
    log = await log_on(store)
    tokens = np.random.default_rng(0).integers(1, 1 << 31, 400_000)
    one = make_experience(
        tokens=tokens, logprobs=np.zeros(0, np.float32), messages=(), id="t.0.0-0-0", group="t.0", episode=0,
        group_size=1, spans=(),
    )  # fmt: skip
    await log.publish(EXPERIENCES, Block((one,)))
    (key,) = kept(store)
    assert (day_of_key(key) or 0) > TODAY
    found = [message async for message in log.scan(EXPERIENCES)]
    assert is_claim(found[0].record.value) and found[0].error is None
