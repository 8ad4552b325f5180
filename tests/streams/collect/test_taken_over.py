"""A partition taken over from a snapshot: by a worker without the file, as often as it likes, whatever failed meanwhile."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas.errors import StoreError
from schemas.topics import VERIFIED
from streams.collect.collector import Collector
from streams.collect.snapshots import MAX_ROWS, closed_parts
from tests.stored import newest
from tests.streams.collect.carrying import (
    RULES,
    SERIES,
    STEP_MS,
    collector_of,
    counted,
    everything,
    filled,
    opened,
    outcome,
    stored_once,
)
from tests.streams.collect.collecting import answer, block, tick

kinds = st.sampled_from(["turn", "turn", "said", "said", "rollout", "stub", "tick"])
records = st.lists(st.tuples(kinds, st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=40)


class Failing(MemoryStore):
    """Fails from the `left`-th object on, until it is well again."""

    left = 10**9

    def put(self, key: str, data: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreError("the store is away")
        super().put(key, data)


lives = st.lists(
    # records it folds, worker whose folder it is, whether that is empty, puts before the store fails, dies unsaved
    st.tuples(st.integers(1, 12), st.integers(0, 2), st.booleans(), st.sampled_from([0, 1, 3, 99, 99]), st.booleans()),
    min_size=1,
    max_size=8,
)


@hypothesis(max_examples=40, deadline=None)
@given(records, lives)
def test_a_partition_taken_over_from_a_snapshot_joins_as_one_that_read_everything(
    steps: list[tuple[str, int, int]], given_lives: list[tuple[int, int, bool, int, bool]]
) -> None:
    async def run(folder: Path) -> None:
        plain = await filled(steps, None)
        reader = await opened(plain, folder / "plain")
        await reader.take(await everything(plain))
        reader.close()

        store = Failing()
        log = await filled(steps, store)
        await (await carried_on(log, store, folder, given_lives)).take(await everything(log))
        assert await outcome(log) == await outcome(plain)

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


async def carried_on(
    log: Log, store: Failing, folder: Path, given_lives: list[tuple[int, int, bool, int, bool]]
) -> Collector:
    """The last of many workers, each of which dies; acknowledged is only what they saved."""
    inbox, committed = await everything(log), 0
    for number, (length, worker, is_empty, puts, dies) in enumerate(given_lives):
        own = folder / (f"empty-{number}" if is_empty else f"worker-{worker}")
        collector = await opened(log, own, committed=committed)
        done = max(collector.next_offset, committed)
        if dies:  # folded and published, and neither saved nor acknowledged
            batch, _ = await collector.fold(inbox[done : done + length])
            await collector._emit([one for each in batch for one in each.decisions if collector._is_new(one)], [])
        else:
            await collector.take(inbox[done : done + length])
            committed = max(committed, collector.next_offset)
            store.left = puts
            await collector.snapshot()
            store.left = 10**9
        collector.close()
    return await opened(log, folder / "last", committed=committed)


def test_the_next_worker_begins_where_the_snapshot_ends_and_leaves_the_blocks_in_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        log, _, first = await stored_once(tmp_path / "a")
        metrics = Metrics("process")
        second = await opened(log, tmp_path / "b", metrics)
        assert (second.next_offset, second.num_open()) == (first.next_offset, first.num_open())
        assert counted(metrics, "snapshots") == {"snapshots_taken_up": 1.0}
        size = metrics.gauges()["snapshot_bytes{partition=0}"]
        assert size > 0
        assert second.num_open() > 0 and len(second._state.frames.absent) > 0
        before = await outcome(log)
        await second.take(await everything(log))
        assert await outcome(log) == before
        first.close()
        second.close()
        assert metrics.gauges()["snapshot_bytes{partition=0}"] == 0

    asyncio.run(run())


def test_a_file_that_is_further_than_the_snapshot_is_kept(tmp_path: Path) -> None:
    async def run() -> None:
        log, _, first = await stored_once(tmp_path / "a")
        await log.publish(VERIFIED, tick())
        await first.take((await everything(log))[-1:])
        first.close()
        metrics = Metrics("process")
        again = await opened(log, tmp_path / "a", metrics)
        assert again.next_offset == (await log.bounds(VERIFIED))[1][0]
        assert counted(metrics, "snapshots") == {}
        again.close()

    asyncio.run(run())


def test_parts_of_closed_groups_stay_few_and_expire(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()
        log = await filled([], store)
        clock = log.bus.clock  # type: ignore[attr-defined]
        rules = msgspec.structs.replace(RULES, keep_ms=200 * STEP_MS)
        collector = collector_of(log, tmp_path, None, rules)
        await collector.recover(0, lambda: False)
        counts = []
        for number in range(300):
            clock.now_ms += STEP_MS
            await log.publish(VERIFIED, block(*(answer(f"t{number}.0", episode) for episode in range(2))))
            await collector.take([one.record async for one in log.scan(VERIFIED, {0: number})])
            await collector.snapshot()
            snapshot = newest(store, SERIES, lambda reason, line: None)
            assert snapshot is not None and snapshot.position == number + 1
            counts.append(len(closed_parts(snapshot)))
        assert max(counts) <= 10 < MAX_ROWS
        assert snapshot is not None and sum(one.rows for one in closed_parts(snapshot)) <= 400
        assert len(list(store.keys("snapshots/"))) <= 2 * (2 * max(counts) + 3)
        collector.close()

    asyncio.run(run())
