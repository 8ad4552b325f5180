"""The simulated log and object store: one broker and one store in memory, and each process's own connections to them.

A request travels, is applied at the broker in one instant, and its answer travels back; a process may die or stall in
between. Requests of one process to one partition keep their order. The broker reports each stored record to `RunWatch`. An
object under `policies/` never changes, and a policy manifest is written after everything it names."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial

from actors.master.snapshot import series
from infra.log.bus import CommitRefused, Headers, Partition, Reader, Record, RecordPosition, check_size, partition_for
from infra.log.memory import MemoryBus
from infra.policies.manifest import decode_manifest
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas.errors import BrokerUnavailable, NotInStore, OffsetOutOfRange, StoreError
from tests.simulator.faults import BOMB, Fate, Faults
from tests.simulator.scenario import APP
from tests.simulator.virtual_loop import Killed, Process
from tests.simulator.watch import RunWatch

DEADLINE_S = 4.0  # a client gives up on a broker it cannot reach
EPOCH_MS = 1_700_000_000_000


class SimulatedCluster(MemoryBus):
    """The broker: every process's requests end here, in the broker's own context."""

    def __init__(self, loop: asyncio.AbstractEventLoop, faults: Faults, watcher: RunWatch) -> None:
        super().__init__(self.now_ms)
        self.loop = loop
        self.faults = faults
        self.watcher = watcher
        self.context = copy_context()
        self._sleepers: dict[str, list[asyncio.Future[None]]] = {}
        self._archive: dict[str, list[Record]] = {}  # all records ever stored, trimmed or not
        self._last: dict[tuple[str, Process, int], float] = {}

    def now_ms(self) -> int:
        """The log's clock."""
        return EPOCH_MS + int(self.loop.time() * 1000)

    def append(self, process: Process, topic: str, value: bytes, key: bytes, headers: Headers, index: int) -> Record:
        """Store one record, now."""
        log = self.log(Partition(topic, index))
        record = Record(topic, index, log.end, self.now_ms(), key, value, tuple(headers))
        log.records.append(record)
        self._archive.setdefault(topic, []).append(record)
        for sleeper in self._sleepers.pop(topic, ()):
            if not sleeper.done():
                sleeper.set_result(None)
        self.watcher.stored(process, record)
        return record

    def everything(self, topic: str) -> list[Record]:
        """All records of a topic, in partition order, also records that were deleted since."""
        return sorted(self._archive.get(topic, ()), key=lambda entry: (entry.partition, entry.offset))

    def request(
        self, process: Process, topic: str, value: bytes, key: bytes, headers: Headers, partition: int | None
    ) -> asyncio.Future[RecordPosition]:
        """Send a record off; the future is the client's."""
        check_size(topic, key, value, headers)
        count = len(self._logs(topic))
        index = partition_for(key, count) if partition is None else partition
        self.log(Partition(topic, index))
        answer: asyncio.Future[RecordPosition] = self.loop.create_future()
        fate = self.faults.send_fate(process, topic)
        delay_s, reachable = self.faults.travel(process)
        at_s = self.loop.time() + delay_s
        if not reachable or fate is Fate.LOST:
            self.loop.call_at(
                self.loop.time() + (DEADLINE_S if not reachable else delay_s),
                partial(self._fail, process, answer, topic, key, value, False),
                context=self.context,
            )
            return answer
        way = (topic, process, index)
        at_s = self._last[way] = max(at_s, self._last.get(way, 0.0) + 1e-6)
        arrive = partial(self._arrive, process, answer, fate, topic, value, key, headers, index)
        self.loop.call_at(at_s, arrive, context=self.context)
        return answer

    def _arrive(
        self, process: Process, answer: asyncio.Future[RecordPosition], fate: Fate, topic: str, value: bytes, key: bytes,
        headers: Headers, index: int,
    ) -> None:  # fmt: skip
        if fate is Fate.CRASH_BEFORE:
            self.faults.kill(process)
            return
        record = self.append(process, topic, value, key, headers, index)
        if fate is Fate.CRASH_AFTER:
            self.faults.kill(process)
            return
        delay_s, _ = self.faults.travel(process)
        if fate is Fate.UNCONFIRMED:
            told = partial(self._fail, process, answer, topic, key, value, True)
        else:
            told = partial(self._confirm, process, answer, record)
        self.loop.call_later(delay_s, told, context=self.context)

    def _confirm(self, process: Process, answer: asyncio.Future[RecordPosition], record: Record) -> None:
        if not answer.done() and not process.is_dead:
            self.watcher.confirmed(process, record)
            answer.set_result(RecordPosition(record.topic, record.partition, record.offset, record.timestamp_ms))

    def _fail(
        self,
        process: Process,
        answer: asyncio.Future[RecordPosition],
        topic: str,
        key: bytes,
        value: bytes,
        stored: bool,
    ) -> None:
        if not answer.done() and not process.is_dead:
            self.watcher.failed(process, topic, key, value, stored)
            answer.set_exception(BrokerUnavailable(f"{topic}: not confirmed (simulated)"))

    async def sleep_until_news(self, topics: Sequence[str], until_s: float) -> None:
        """Until one of the topics has a new record."""
        news: asyncio.Future[None] = self.loop.create_future()
        for topic in topics:
            self._sleepers.setdefault(topic, []).append(news)
        timer = self.loop.call_at(until_s, lambda: None if news.done() else news.set_result(None))
        try:
            await news
        finally:
            timer.cancel()

    def expel(self, process: Process) -> None:
        """The group's sessions of a process that is not heard of are over."""
        for name, group in self._groups.items():
            for reader in [member for member in group.members if getattr(member, "process", None) is process]:
                self.leave(name, reader)


class ClientBus:
    """A Bus: one process's connection to the cluster."""

    def __init__(self, cluster: SimulatedCluster, process: Process) -> None:
        self.cluster = cluster
        self.process = process

    async def start(self) -> None:
        await self.hop()

    async def close(self) -> None:
        pass

    async def hop(self) -> None:
        """One way over the network."""
        if self.process.is_dead:
            raise Killed
        delay_s, reachable = self.cluster.faults.travel(self.process)
        await asyncio.sleep(delay_s if reachable else DEADLINE_S)
        if not reachable:
            raise BrokerUnavailable("the network is cut (simulated)")

    async def send(
        self, topic: str, value: bytes, *, key: bytes, headers: Headers = (), partition: int | None = None
    ) -> RecordPosition:
        if self.process.is_dead:
            raise Killed
        return await self.cluster.request(self.process, topic, value, key, headers, partition)

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        for partition in starts:
            self.cluster.log(partition)
        return ClientReader(self, dict(starts), group=group)

    async def subscribed(self, topics: Sequence[str], *, group: str) -> Reader:
        await self.hop()
        for topic in topics:
            await self.cluster.commit_beginnings(group, topic)
        reader = ClientReader(self, {}, group=group, topics=tuple(topics))
        self.cluster.join(group, reader)  # type: ignore[arg-type]
        return reader

    async def partitions(self, topic: str) -> tuple[int, ...]:
        return await self.cluster.partitions(topic)

    async def beginning_offsets(self, topic: str) -> dict[Partition, int]:
        await self.hop()
        return await self.cluster.beginning_offsets(topic)

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        await self.hop()
        ends = await self.cluster.end_offsets(topic)
        for partition, end in ends.items():
            self.cluster.watcher.asked_end(self.process, partition, end)
        return ends

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[Partition, int]:
        await self.hop()
        return await self.cluster.offsets_at(topic, timestamp_ms)

    async def committed(self, group: str, topic: str) -> dict[Partition, int]:
        await self.hop()
        return await self.cluster.committed(group, topic)

    async def commit_beginnings(self, group: str, topic: str) -> None:
        await self.cluster.commit_beginnings(group, topic)

    async def held(self, group: str, topic: str) -> set[int]:
        await self.hop()
        return await self.cluster.held(group, topic)

    async def create_topic(self, topic: str, partitions: int, config: Mapping[str, str], replication: int = 0) -> bool:
        return await self.cluster.create_topic(topic, partitions, config)

    async def delete_records(self, partition: Partition, before: int) -> None:
        await self.hop()
        await self.cluster.delete_records(partition, before)


class ClientReader:
    """A Reader of one process. Partitions are read in a random order, a random number of records of each."""

    def __init__(
        self, bus: ClientBus, starts: dict[Partition, int], *, group: str | None, topics: tuple[str, ...] = ()
    ) -> None:
        self.topics = topics
        self.process = bus.process
        self.generation = -1
        self._bus = bus
        self._cluster = bus.cluster
        self._group = group
        self._positions = starts
        self._closed = False

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        clock = self._cluster.loop.time
        until_s = clock() + timeout_s
        await self._bus.hop()
        while True:
            self._follow()
            topics = self.topics or tuple(sorted({at.topic for at in self._positions}))
            if not self._has_news() and clock() < until_s:
                await self._cluster.sleep_until_news(topics, until_s)
            if self._has_news():
                if lag_s := self._cluster.faults.lag_s(self.process, topics):
                    await asyncio.sleep(lag_s)
                self._follow()
                if records := self._take(max_records):
                    return records
            if clock() >= until_s:
                return []

    def seek(self, partition: Partition, offset: int) -> None:
        self._follow()
        if partition not in self._positions:
            raise ValueError(f"not assigned to this reader: {partition}")
        self._positions[partition] = offset

    def positions(self) -> dict[Partition, int]:
        self._follow()
        return dict(self._positions)

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self._group is None:
            raise ValueError("this reader has no group to commit for")
        generation = self.generation
        await self._bus.hop()
        group = self._cluster.group(self._group)
        if self.topics and (generation != group.generation or self not in group.members):  # type: ignore[comparison-overlap]
            raise CommitRefused(f"group {self._group}: has rebalanced")
        group.committed.update(offsets)
        await self._bus.hop()

    async def close(self) -> None:
        is_member = self.topics and self._group is not None and not self._closed and not self.process.is_dead
        if is_member and self in self._cluster.group(self._group or "").members:  # type: ignore[comparison-overlap]
            self._cluster.leave(self._group or "", self)  # type: ignore[arg-type]
        self._closed = True

    def _follow(self) -> None:
        """Join again where the group gave this reader up; take over the partitions that the last rebalance dealt it."""
        if not self.topics or self._group is None:
            return
        group = self._cluster.group(self._group)
        if self not in group.members:  # type: ignore[comparison-overlap]
            self._cluster.join(self._group, self)  # type: ignore[arg-type]
        if group.generation != self.generation:
            self.generation = group.generation
            mine = self._cluster.share(self._group, self)  # type: ignore[arg-type]
            self._positions = {partition: group.committed[partition] for partition in mine}

    def _has_news(self) -> bool:
        for partition, position in self._positions.items():
            log = self._cluster.log(partition)
            if position < log.end or position < log.beginning:
                return True
        return False

    def _take(self, max_records: int) -> list[Record]:
        partitions = sorted(self._positions)
        self._cluster.faults.shuffle(partitions)
        taken: list[Record] = []
        for partition in partitions:
            log, position = self._cluster.log(partition), self._positions[partition]
            if not log.beginning <= position <= log.end:
                if taken:
                    break
                raise OffsetOutOfRange(f"{partition}: offset {position} is not kept, from {log.beginning}")
            if position == log.end:
                continue
            most = min(max_records - len(taken), self._cluster.faults.take_count())
            records = log.records[position - log.beginning : position - log.beginning + most]
            self._positions[partition] = position + len(records)
            self._cluster.watcher.heard(self.process, partition, position + len(records))
            taken += records
        return taken


SOUND_READS = 12  # behind one that was altered: who fetches again from the anchor is answered, else nobody ever serves


class ClientStore(Store):
    """The shared store as one process sees it."""

    def __init__(self, shared: MemoryStore, process: Process, faults: Faults, watch: RunWatch) -> None:
        self._shared = shared
        self._process = process
        self._faults = faults
        self._watch = watch
        self._sound_reads = 0  # left
        self._is_actor = process.name.startswith(("explore", "serve", "canary"))

    def put(self, key: str, data: bytes) -> None:
        self._check_alive()
        fate = self._faults.put_fate()
        if fate is Fate.CRASH_BEFORE:
            self._die()
        if fate is Fate.LOST:
            raise StoreError(f"{key}: not stored (simulated)")
        if fate is Fate.TORN:
            self._shared.put(key, data[: len(data) // 2])
            self._die()
        self._check(key, data)
        self._shared.put(key, data)
        if fate is Fate.CRASH_AFTER:
            self._die()
        if fate is Fate.UNCONFIRMED:
            raise StoreError(f"{key}: not confirmed (simulated)")

    def get(self, key: str) -> bytes:
        self._check_alive()
        if self._faults.get_fails():
            raise StoreError(f"{key}: not read (simulated)")
        if key.startswith("policies/") and self._is_actor:
            self._sound_reads -= 1
            if self._sound_reads < 0 and self._faults.get_is_altered():
                self._sound_reads = SOUND_READS
                self._watch.altered[self._process] += 1
                self._watch.happened(self._process, "reads what somebody else put there")
                return BOMB
        return self._shared.get(key)

    def read(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def keys(self, prefix: str) -> Iterator[str]:
        self._check_alive()
        yield from list(self._shared.keys(prefix))

    def delete(self, key: str) -> None:
        self._check_alive()
        self._shared.delete(key)

    def _check_alive(self) -> None:
        if self._process.is_dead:
            raise Killed

    def _die(self) -> None:
        self._faults.kill(self._process)
        raise Killed

    def _check(self, key: str, data: bytes) -> None:
        if key.startswith(f"snapshots/{series(APP)}/"):
            self._watch.snapshots[key] = data
        if not key.startswith("policies/"):
            return
        try:
            old = self._shared.get(key)
        except NotInStore:
            old = data
        if old != data and data[: len(old)] != old:  # a torn object may be written again
            self._watch.complain("I3 one content", f"{key} was written before with other bytes")
        if "/manifests/" not in key:
            return
        for source in decode_manifest(data).sources:
            for shard in source.shards:
                try:
                    whole = len(self._shared.get(shard.key)) == shard.num_bytes
                except NotInStore:
                    whole = False
                if not whole:
                    self._watch.complain("I3 complete", f"{key} was written before {shard.key}")
