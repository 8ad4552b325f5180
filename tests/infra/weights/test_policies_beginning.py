"""A start reads `policies` from the newest summary of this very log, and without one from the first record."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.policies.beginning import LOOK, folded, newest_summary, write_summary
from infra.policies.fold import PoliciesFold
from infra.policies.summary import Summary
from infra.store.memory import MemoryStore
from schemas import Directive, PolicyEvent
from schemas.errors import StoreError
from schemas.topics import POLICIES
from tests.starts import CountingBus, summarize
from trainer.loop.publication import SUMMARIZE_EVERY

LONG = 3 * LOOK


def version(number: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="main", version=number, manifest=f"m/{number}")


class Rig:
    """A log in memory, of which is counted what is read."""

    def __init__(self) -> None:
        self.bus = CountingBus()
        self.store = MemoryStore()
        self.log = Log(self.bus, "t", store=self.store)
        self.name = self.log.name(POLICIES)

    @property
    def records(self) -> list[Record]:
        return self.bus.log(Partition(self.name, 0)).records

    async def says(self, count: int) -> None:
        """So many versions more, each followed by a word of a person, and the summaries of a trainer."""
        first = len(self.records) // 2
        for number in range(first, first + count // 2):
            await self.log.publish(POLICIES, version(number))
            held = PolicyEvent(event="held", policy="main", version=number, channel="stable", owner="ann")
            await self.log.publish(POLICIES, held)
        summarize(self.log)

    async def reads(self) -> int:
        """Records that a start reads."""
        self.bus.read.clear()
        await folded(self.log)
        return self.bus.read.get(self.name, 0)

    def summaries(self, kind: str = "parts") -> list[str]:
        """Keys in the store, oldest first."""
        return sorted(self.store.keys(f"snapshots/t/policies/{kind}/"))


def run(body: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig()
        await rig.log.create_topics(partitions=1, keep_ms=-1)
        await body(rig)

    asyncio.run(main())


async def whole(log: Log) -> Summary:
    fold = PoliciesFold()
    async for message in log.read_all(POLICIES):
        fold.take(message)
    return fold.summary()


def test_a_start_reads_no_more_of_policies_however_long_the_app_has_lived() -> None:
    async def body(rig: Rig) -> None:
        read = []
        for _ in range(6):
            await rig.says(LONG)
            assert (await folded(rig.log)).summary() == await whole(rig.log)
            read.append(await rig.reads())
        assert max(read) <= LOOK + 1 + SUMMARIZE_EVERY + 2

    run(body)


def test_a_damaged_summary_is_said_and_the_one_before_it_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def body(rig: Rig) -> None:
        await rig.says(LONG)
        newest = await newest_summary(rig.log)
        rig.store.put(rig.summaries()[-1], b"damaged")
        before = await newest_summary(rig.log)
        assert newest is not None and before is not None and before.below < newest.below
        assert (await folded(rig.log)).summary() == await whole(rig.log)

    run(body)
    assert "policies_summary_not_used" in caplog.text and "damaged" in caplog.text


class ClosedStore(MemoryStore):
    """A store that does not answer."""

    def keys(self, prefix: str) -> list[str]:
        raise StoreError("no answer")


@pytest.mark.parametrize("store", [None, MemoryStore(), ClosedStore()])
def test_where_the_store_has_no_summary_all_is_read(
    store: MemoryStore | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(rig: Rig) -> None:
        await rig.says(LONG)
        log = Log(rig.bus, "t", store=store)
        with caplog.at_level(logging.INFO):
            assert (await folded(log)).summary() == await whole(rig.log)

    run(body)
    assert ("policies_read_whole" in caplog.text) == (store is not None)


def lost(records: Sequence[Record], at: int) -> list[Record]:
    """The log without its records from there on, and with others in their places."""
    kept = list(records[:at])
    lease = msgspec.structs.replace(records[at], timestamp_ms=records[at].timestamp_ms + 1)
    return [*kept, *(msgspec.structs.replace(lease, offset=at + number) for number in range(LOOK))]


def test_a_summary_of_records_that_the_log_lost_counts_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def body(rig: Rig) -> None:
        await rig.says(LONG)
        ahead = (await folded(rig.log)).summary()
        write_summary(rig.store, "t", ahead)
        for key in rig.summaries("manifests")[:-1]:
            rig.store.delete(key)
        rig.bus.restore(rig.name, lost(rig.records, ahead.below - 100))
        assert await newest_summary(rig.log) is None
        assert "made of another log" in caplog.text
        rig.bus.restore(rig.name, rig.records[: ahead.below - 50])
        assert await newest_summary(rig.log) is None
        now = (await folded(rig.log)).summary()
        assert now == await whole(rig.log)
        write_summary(rig.store, "t", now)
        assert await newest_summary(rig.log) == now, "the summary ahead of the log is gone"

    run(body)


def test_records_below_a_place_are_folded_up_to_it() -> None:
    async def body(rig: Rig) -> None:
        await rig.says(LONG)
        await rig.log.publish(POLICIES, Directive(order="pause"))
        stop = LONG - 300
        fold = await folded(rig.log, stop=stop)
        assert (fold.next_offset, fold.of("main").newest, fold.learning) == (stop, (stop - 1) // 2, "")
        assert (await folded(rig.log)).learning == "pause"

    run(body)


def test_a_reader_that_needs_an_older_version_begins_with_an_older_summary() -> None:
    async def body(rig: Rig) -> None:
        await rig.says(4 * LONG)
        wanted = 3 * LONG // 2
        found = await newest_summary(rig.log, fits=lambda summary: summary.of("main").known_from <= wanted)
        newest = await newest_summary(rig.log)
        assert found is not None and newest is not None
        assert found.of("main").known_from <= wanted < newest.of("main").known_from
        assert found.below > wanted

    run(body)
