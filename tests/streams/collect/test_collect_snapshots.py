"""Snapshots: a partition taken over by a worker without the state file, and snapshots that cannot be used."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from infra.chain.processor import Memory
from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.snapshots import candidates, read, save
from schemas import Block, Closure, Control
from schemas.errors import NotInLog, StoreError
from schemas.ids import request_group
from schemas.topics import BUFFER, DEAD_LETTERS, PROGRESS, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.pending import PendingFile
from streams.collect.rules import Rules
from streams.collect.snapshots import series_name
from tests.infra.test_seal import AwayStore
from tests.names import session_name
from tests.starts import newest
from tests.streams.collect.collecting import answer, block, said, stub, tick
from tests.streams.deliveries import Clock, values

DAY_MS = 86_400_000
SOURCE = FeedbackRules(window_ms=400, late="amend", discount=0.5)
RULES = Rules(deadline_ms=300, keep_ms=10 * DAY_MS, sources={"csat": SOURCE}, session_ms=150, session_turns=5)
SERIES = series_name("app", 0)
STEP_MS = 20


def group_of(session: int, number: int) -> str:
    return request_group(session_name("acme", f"chat-{session}"), 7, number)


def record_of(kind: str, item: int, other: int) -> Block | Control:
    if kind == "turn":
        made = answer(group_of(item, other), 0, size=1, lane="live")
        return block(msgspec.structs.replace(made, turn=1 + 2 * other))
    if kind == "said":
        type = "retraction" if other == 4 else "value"
        return said(f"hr-{group_of(item, other % 3)}.0-0-0", other / 5, id=str(other), rater=f"r{other % 2}", type=type)
    if kind == "rollout":
        return block(answer(f"t{item}.0", other % 2, attempt=other // 3))
    return stub(f"t{item}.0", other % 2) if kind == "stub" else tick()


async def filled(steps: Sequence[tuple[str, int, int]], store: MemoryStore | None, from_ms: int = 1_000_000) -> Log:
    clock = Clock()
    clock.now_ms = from_ms
    log = Log(MemoryBus(clock), "app", store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    for step in steps:
        clock.now_ms += STEP_MS
        await log.publish(VERIFIED, record_of(*step))
    return log


async def everything(log: Log) -> list[Record]:
    end = (await log.bounds(VERIFIED))[1][0]
    return [record async for chunk in log.chunks(VERIFIED, {0: 0}, {0: end}) for record in chunk]


def collector_of(log: Log, folder: Path, metrics: Metrics | None = None, rules: Rules = RULES) -> Collector:
    return Collector(log, metrics or Metrics("process"), 0, CollectSettings(folder, rules, ()))


async def opened(log: Log, folder: Path, metrics: Metrics | None = None, committed: int = 0) -> Collector:
    collector = collector_of(log, folder, metrics)
    await collector.recover(committed, lambda: False)
    return collector


async def outcome(log: Log) -> tuple[list[str], list[str], list[str]]:
    """Every closure, block and letter, in an order of their own."""
    closures = sorted(repr(record) for record in await values(log, PROGRESS) if isinstance(record, Closure))
    blocks = sorted(
        repr([(member.id, member.revision, member.lane, member.scores, member.turn) for member in sent.experiences])
        for sent in await values(log, BUFFER)
        if isinstance(sent, Block)
    )
    return closures, blocks, sorted(repr(record) for record in await values(log, DEAD_LETTERS))


def some(count: int) -> list[tuple[str, int, int]]:
    """Open turns, closed ones and rollouts that wait."""
    return [(kind, number % 3, number % 5) for number in range(count) for kind in ("turn", "said", "rollout")]


async def stored_once(folder: Path, count: int = 8) -> tuple[Log, MemoryStore, Collector]:
    store = MemoryStore()
    log = await filled(some(count), store)
    collector = await opened(log, folder)
    await collector.take(await everything(log))
    await collector.snapshot()
    return log, store, collector


def counted(metrics: Metrics, name: str) -> dict[str, float]:
    return {key: value for key, value in metrics.counters().items() if key.startswith(name) and value}


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
            await collector._emit(
                [decision for each in batch for decision in each.decisions if collector._is_new(decision)], []
            )
        else:
            await collector.take(inbox[done : done + length])
            committed = max(committed, collector.next_offset)
            store.left = puts
            await collector.snapshot()
            store.left = 10**9
        collector.close()
    return await opened(log, folder / "last", committed=committed)


async def test_the_next_worker_begins_where_the_snapshot_ends_and_leaves_the_blocks_in_the_log(tmp_path: Path) -> None:
    log, _, first = await stored_once(tmp_path / "a")
    metrics = Metrics("process")
    second = await opened(log, tmp_path / "b", metrics)
    assert (second.next_offset, second.state.num_open()) == (first.next_offset, first.state.num_open())
    assert counted(metrics, "snapshots") == {"snapshots_taken_up": 1.0}
    size = metrics.gauges()["snapshot_bytes{partition=0}"]
    assert size > 0
    assert second.state.num_open() > 0 and len(second._state.frames.absent) > 0
    before = await outcome(log)
    await second.take(await everything(log))
    assert await outcome(log) == before
    first.close()
    second.close()
    assert metrics.gauges()["snapshot_bytes{partition=0}"] == 0


async def test_a_file_that_is_further_than_the_snapshot_is_kept(tmp_path: Path) -> None:
    log, _, first = await stored_once(tmp_path / "a")
    await log.publish(VERIFIED, tick())
    await first.take((await everything(log))[-1:])
    first.close()
    metrics = Metrics("process")
    again = await opened(log, tmp_path / "a", metrics)
    assert again.next_offset == (await log.bounds(VERIFIED))[1][0]
    assert counted(metrics, "snapshots") == {}
    again.close()


def damage_open(store: MemoryStore) -> None:
    snapshot = newest(store, SERIES, lambda reason, line: None)
    assert snapshot is not None
    store.put(snapshot.parts["groups/0"].key, b"something else")


def newer_layout(store: MemoryStore) -> None:
    (key,) = store.keys(f"snapshots/{SERIES}/manifests/")
    store.put(key, store.get(key).replace(b'"layout":8', b'"layout":9'))


def other_bytes(store: MemoryStore) -> None:
    """A part whole as it was written, of something that is none."""
    snapshot = newest(store, SERIES, lambda reason, line: None)
    assert snapshot is not None
    store.delete(snapshot.key)
    parts = [
        (name, b"\x93 no rows" if name == "groups/0" else read(store, part)) for name, part in snapshot.parts.items()
    ]
    save(store, SERIES, snapshot.position, parts, snapshot.about)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(damage_open, "damaged"), (newer_layout, "written by a newer release"), (other_bytes, "damaged")],
)
async def test_a_snapshot_that_cannot_be_used_is_said_and_counted_and_the_log_is_folded(
    harm: object, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, store, first = await stored_once(tmp_path / "a")
    first.close()
    harm(store)  # type: ignore[operator]
    metrics = Metrics("process")
    before = await outcome(log)
    second = await opened(log, tmp_path / "b", metrics, committed=first.next_offset)
    assert (second.next_offset, second.state.num_open()) == (first.next_offset, first.state.num_open())
    assert counted(metrics, "snapshots") == {f"snapshots_refused{{reason={reason}}}": 1.0}
    assert await outcome(log) == before
    second.close()
    assert (
        len([message for message in caplog.messages if message.startswith("collect_snapshot_refused partition=0")]) == 1
    )


@pytest.mark.parametrize("count", [1, 9])
async def test_a_snapshot_of_another_log_is_not_taken_and_goes(count: int, tmp_path: Path) -> None:
    _, store, first = await stored_once(tmp_path / "a")
    first.close()
    other = await filled(some(count), store, from_ms=5_000_000)
    metrics = Metrics("process")
    second = await opened(other, tmp_path / "b", metrics)
    assert second.next_offset == 0
    assert counted(metrics, "snapshots") == {"snapshots_refused{reason=of another log}": 1.0}
    await second.take(await everything(other))
    for _ in range(3):  # its own are the newest now, though they begin lower
        await second.snapshot()
    assert [item.position for item in candidates(store, SERIES, lambda reason, line: None)] == [3 * count]
    second.close()


@pytest.mark.parametrize("beyond", [-1, 1])
async def test_a_snapshot_older_than_the_log_or_waiting_for_a_trimmed_block_is_not_taken(
    beyond: int, tmp_path: Path
) -> None:
    log, _, first = await stored_once(tmp_path / "a")
    first.close()
    for _ in range(3):
        await log.publish(VERIFIED, tick())
    await log.bus.delete_records(Partition(log.name(VERIFIED), 0), first.next_offset + beyond)
    metrics = Metrics("process")
    second = await opened(log, tmp_path / "b", metrics)
    assert second.state.num_open() == 0
    assert counted(metrics, "snapshots_refused") == {"snapshots_refused{reason=older than the log}": 1.0}
    second.close()


async def test_a_store_that_is_away_costs_a_snapshot_and_no_record(tmp_path: Path) -> None:
    log = await filled(some(8), AwayStore(away=True))
    metrics = Metrics("process")
    collector = collector_of(log, tmp_path, metrics)
    collector._snapshots.store_away_s = 0.0
    await collector.recover(0, lambda: False)
    await collector.take(await everything(log))
    await collector.snapshot()
    assert collector.next_offset == 24
    assert counted(metrics, "snapshots") == {
        "snapshots_refused{reason=the store was away}": 1.0,
        "snapshots_failed": 1.0,
    }
    collector.close()


async def test_a_block_that_is_gone_ends_the_worker_before_it_decides_without_it(tmp_path: Path) -> None:
    log, _, first = await stored_once(tmp_path / "a")
    first.close()
    second = await opened(log, tmp_path / "b")
    await log.bus.delete_records(Partition(log.name(VERIFIED), 0), first.next_offset)
    log.bus.clock.now_ms += DAY_MS  # type: ignore[attr-defined]
    await log.publish(VERIFIED, tick())
    before = await outcome(log)
    with pytest.raises(NotInLog, match="verified/0 offset"):
        await second.take([message.record async for message in log.scan(VERIFIED)])
    second.close()
    assert await outcome(log) == before


def test_a_damaged_file_is_put_aside_and_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "collect-0.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"garbage" * 500)
    pending = PendingFile(path)
    assert pending.load({}).next_offset == 0
    pending.close()
    assert path.with_suffix(".damaged").exists()


KEEP_MS = 1_000
LIMIT = 4
# "" saves; a number is remembered under the key, None forgets it.
DONE = st.lists(st.tuples(st.sampled_from(("", *"abcdefg")), st.none() | st.integers(0, 9)), max_size=60)


class KeptFile:
    """A partition's file with one memory, on which things are done and saved."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.pending = PendingFile(path)
        self.state = self.pending.load({"said": Memory(limit)})
        self.memory = self.state.memories["said"]

    def save(self) -> None:
        asyncio.run(self.pending.save(self.state, KEEP_MS))

    def close(self) -> None:
        self.pending.close()


def loaded(path: Path, limit: int = LIMIT) -> Memory:
    kept = KeptFile(path, limit)
    kept.close()
    return kept.memory


def do(memory: Memory, done: Sequence[tuple[str, int | None]], save: "KeptFile | None" = None) -> None:
    for key, value in done:
        if key and value is None:
            memory.discard(key)
        elif key:
            memory.set(key, value)
        elif save is not None:
            save.save()


@given(done=DONE)
def test_a_memory_of_which_only_changes_are_saved_is_read_as_it_was(
    done: list[tuple[str, int | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, plain = tmp_path_factory.mktemp("file") / "collect-0.sqlite", Memory(LIMIT)
    do(plain, done)
    kept = KeptFile(path)
    do(kept.memory, done, kept)
    kept.save()
    kept.close()
    assert loaded(path).to_bytes() == kept.memory.to_bytes() == plain.to_bytes()
