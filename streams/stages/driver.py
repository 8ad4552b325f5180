"""Drives a stage without state: many records in flight, acknowledged in order.

    recall records before the first delivery ───┐
                       ┌─> handle ─> publish, confirmed ─┐
    deliveries ─> window (64 per partition)              ├─> window ─> acknowledge, in offset order
                       └─> handle ─> publish, confirmed ─┘

    consumes        taskset.raw; experiences, experts (the stage collect, which has state: verified)
    produces        taskset; verified, evals (collect: buffer, progress); dead-letters
    waits for       the memory of earlier records; confirmation of a record's outputs
    unblocked by    a record; an acknowledgement by the broker; a time limit of the record or of a step
    durable first   all outputs of a record, and all outputs of the records before it, before its offset

Guarantees: at least once, at any crash. Outputs of records with the same key keep the order of the records. The memory of a
stage sees the records of a partition in log order; after a rebalance it is rebuilt from the log, as far as retention kept it,
before the first record is handled. A failure is retried, then dead-lettered; otherwise the process ends before the
acknowledgement. Records are acknowledged in offset order, after all earlier records of the partition are done, so a crash
repeats records and skips none.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, NamedTuple, Protocol, TypeVar

from infra.chain.chain import ChainTurn
from infra.log.bus import Partition, Record
from infra.log.log import Log, LogMessage
from infra.observe.failpoint import reach
from infra.observe.metrics import Metrics
from schemas import Block
from schemas.errors import BadFrame, OffsetOutOfRange, RecordTooLarge, causes
from schemas.topics import by_name
from streams.stages.stage import Delivery, Handled, Waiting, count, end_for, publish_all, read

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
CHUNK_RECORDS = 512
FETCH_BYTES = 512 * 1024  # about the size of a chunk: a larger fetch would send, and hold, later records too
YIELD_EVERY = 32  # records between two looks at everything else: heartbeats must not wait


Moved = Callable[[], None]  # called for each record that is read, as proof that the reading goes on


async def read_back(log: Log, reach: int, at: Partition, before: int, moved: Moved) -> AsyncGenerator[LogMessage, None]:
    """The kept records below offset `before` of a partition of this app, as many as hold `reach` experiences."""
    begin = (await log.bus.beginning_offsets(at.topic))[at]
    start = await _start(log, reach, at, begin, before, moved)
    if start >= before:
        return
    async with aclosing(_kept(log, at, start, before, moved)) as messages:
        async for message in messages:
            yield message
            if message.offset % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    logger.info("recalled topic=%s partition=%d from=%d to=%d", at.topic, at.index, start, before)


async def _start(log: Log, reach: int, at: Partition, begin: int, before: int, moved: Moved) -> int:
    start, found = before, 0
    while start > begin and found < reach:
        stop, start = start, max(begin, start - CHUNK_RECORDS)
        sizes: list[tuple[int, int]] = []
        async with aclosing(_kept(log, at, start, stop, moved)) as messages:
            async for message in messages:
                value = message.value
                sizes.append((message.offset, len(value.experiences) if isinstance(value, Block) else 1))
        for offset, size in reversed(sizes):
            found += size
            if found >= reach:
                return offset
    return start


async def _kept(log: Log, at: Partition, start: int, stop: int, moved: Moved) -> AsyncGenerator[LogMessage, None]:
    known = by_name(at.topic.removeprefix(f"{log.app}."))
    while True:
        scanned = log.scan(known, {at.index: start}, {at.index: stop}, fetch_bytes=FETCH_BYTES)
        try:
            async with aclosing(scanned) as messages:
                async for message in messages:
                    moved()
                    yield message
            return
        except OffsetOutOfRange:
            begin = (await log.bus.beginning_offsets(at.topic))[at]
            logger.warning("recall_trimmed topic=%s partition=%d from=%d to=%d", at.topic, at.index, start, begin)
            start = begin


Handle = TypeVar("Handle")


class Ticket(NamedTuple):
    """One record in flight. generation: of the assignment that delivered it."""

    partition: int
    offset: int
    generation: int


class _Lane(Generic[Handle]):
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.highest = -1
        self.flying: dict[int, Handle] = {}  # by offset, in their order
        self.done: set[int] = set()


class Window(Generic[Handle]):
    """Records in flight of any number of partitions; holds no clock, task or client."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit: got {limit}, expected 1 or more")
        self.limit = limit
        self._lanes: dict[int, _Lane[Handle]] = {}
        self._given_up = -1  # the newest generation whose records were forgotten

    def is_full(self, partition: int, generation: int) -> bool:
        lane = self._lanes.get(partition)
        return lane is not None and lane.generation == generation and len(lane.flying) >= self.limit

    def take(self, partition: int, offset: int, generation: int, handle: Handle) -> Ticket | None:
        """Put a record in flight; None if this generation has seen it, or an older or forgotten generation delivered it.

        A newer generation forgets the records in flight of the older one: Kafka delivers them again.
        """
        if generation <= self._given_up:
            return None
        lane = self._lanes.get(partition)
        if lane is None or generation > lane.generation:
            lane = self._lanes[partition] = _Lane(generation)
        if generation < lane.generation or offset <= lane.highest:
            return None
        lane.highest = offset
        lane.flying[offset] = handle
        return Ticket(partition, offset, generation)

    def complete(self, ticket: Ticket) -> list[Handle]:
        """Handles that may be acknowledged now, in offset order; none for a ticket of a forgotten generation."""
        lane = self._lanes.get(ticket.partition)
        if lane is None or lane.generation != ticket.generation or ticket.offset not in lane.flying:
            return []
        lane.done.add(ticket.offset)
        ready: list[Handle] = []
        while lane.flying and (first := next(iter(lane.flying))) in lane.done:
            lane.done.remove(first)
            ready.append(lane.flying.pop(first))
        return ready

    def forget(self) -> list[Handle]:
        """Give up everything in flight; returns the handles, none of which may be acknowledged.

        The window refuses later records of that generation: Faust might commit past the gap, and skip the records in it.
        """
        self._given_up = max([self._given_up, *(lane.generation for lane in self._lanes.values())])
        given_up = [handle for lane in self._lanes.values() for handle in lane.flying.values()]
        for lane in self._lanes.values():
            lane.flying.clear()
            lane.done.clear()
        return given_up

    def num_in_flight(self) -> int:
        return sum(len(lane.flying) for lane in self._lanes.values())


class Stage(Protocol):
    """A stage that decides about one record at a time."""

    async def recall(self, log: Log, at: Partition, before: int, moved: Moved) -> None:
        """Remember what it decided before the input at offset `before` of a partition."""

    async def handle(self, message: LogMessage, turn: ChainTurn | None = None) -> Handled:
        """Decide about the record; does no I/O on the log. turn: waited for before anything is remembered."""

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        """Return the outputs for a record that could not be handled."""

    def forget(self) -> None:
        """The partitions were taken away."""


class WindowDriver:
    """Runs one stage over one topic."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        log: Log,
        metrics: Metrics,
        tasks: asyncio.TaskGroup,
        *,
        limit: int = 64,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """limit: records in flight per partition. timeout_s: of handling one record."""
        self.name = name
        self._stage = stage
        self._log = log
        self._metrics = metrics
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._window: Window[Delivery] = Window(limit)
        self._room = asyncio.Event()
        self._generation = -1
        self._last_of_key: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        self._turns: dict[int, ChainTurn] = {}  # of the newest record of each partition
        self._recalls: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._num_recalled = 0

    async def accept(self, delivery: Delivery) -> None:
        record = delivery.record
        if delivery.generation > self._generation:
            self._generation = delivery.generation
            self.abandon()
            self._last_of_key.clear()
            self._turns.clear()
            self._recalls.clear()
            self._stage.forget()
        while self._window.is_full(record.partition, delivery.generation):
            self._room.clear()
            await self._room.wait()
        ticket = self._window.take(record.partition, record.offset, delivery.generation, delivery)
        if ticket is None:
            delivery.abandon()
            return
        if record.partition not in self._recalls:
            self._recalls[record.partition] = self._tasks.create_task(self._recall(record))
        turn = self._turns[record.partition] = ChainTurn(self._turns.get(record.partition))
        key = (record.partition, record.key)
        task = self._tasks.create_task(self._run(delivery, ticket, turn, self._last_of_key.get(key)))
        self._last_of_key[key] = task
        self._running.add(task)
        task.add_done_callback(lambda done: self._forget(key, done))

    def abandon(self) -> None:
        """Wait for nothing of this generation any more: a rebalance must not hang on a slow record, or on a long memory."""
        for recalling in self._recalls.values():
            recalling.cancel()
        for delivery in self._window.forget():
            delivery.abandon()
        self._room.set()

    def assigned(self, partitions: set[int], generation: int) -> None:
        """Do nothing: work begins with the first record."""

    def retire(self, generation: int) -> None:
        """Work in flight continues until it is abandoned."""

    def num_in_flight(self) -> int:
        return self._window.num_in_flight()

    def waiting(self) -> Waiting:
        """Nothing: each record is handled by itself."""
        return Waiting()

    def mark(self, partition: int) -> int:
        """Grows while the memory of any partition is rebuilt: records of the others may wait behind its own."""
        return self._num_recalled

    async def finish(self) -> None:
        """Give up the records in flight: Kafka delivers them again."""
        self.abandon()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _moved(self) -> None:
        self._num_recalled += 1

    async def _recall(self, record: Record) -> None:
        try:
            at = Partition(record.topic, record.partition)
            await self._stage.recall(self._log, at, record.offset, self._moved)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            end_for(error, f"{self.name}: {record.topic}/{record.partition} below {record.offset}")

    async def _run(
        self, delivery: Delivery, ticket: Ticket, turn: ChainTurn, before: "asyncio.Task[None] | None"
    ) -> None:
        recalling = self._recalls[delivery.record.partition]
        try:
            message = await read(self._log, delivery.record)
            if not recalling.done():  # to wait for a done task takes a turn of the loop
                await asyncio.wait((recalling,))
            if recalling.cancelled() or delivery.generation < self._generation:
                return  # given up with everything in flight: it is delivered again
            handled = await decided(self._stage, message, turn, self._timeout_s)
            if before is not None and not before.done():
                await asyncio.wait((before,))
            await self._published(message, handled)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            end_for(error, f"{self.name}: {delivery.record.topic}/{delivery.record.partition} {delivery.record.offset}")
        finally:
            turn.end()
        for done in self._window.complete(ticket):
            reach("stage.before_ack")
            done.acknowledge()
            reach("stage.after_ack")
        self._room.set()

    async def _published(self, message: LogMessage, handled: Handled) -> None:
        try:
            await publish_all(self._log, handled.first)
            await publish_all(self._log, handled.then)
        except* (BadFrame, RecordTooLarge, ValueError) as refused:
            error = causes(refused)[0]
            reason = "record too large" if isinstance(error, RecordTooLarge) else "cannot be encoded"
            handled = self._stage.failed(message, reason, str(error))
            await publish_all(self._log, handled.then)
        count(self._metrics, self.name, handled)

    def _forget(self, key: tuple[int, bytes], done: "asyncio.Task[None]") -> None:
        self._running.discard(done)
        if self._last_of_key.get(key) is done:
            del self._last_of_key[key]


async def decided(stage: Stage, message: LogMessage, turn: ChainTurn, timeout_s: float) -> Handled:
    """Handle a record within `timeout_s`, without its wait for other records; never raises."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            turn.limit = limit
            return await stage.handle(message, turn)
    except Exception as error:
        reason = "timed out" if limit.expired() else "stage failed"
        where = f"{message.record.topic}/{message.partition}@{message.offset}"
        logger.warning("record_failed at=%s reason=%s", where, reason, exc_info=error)
        return stage.failed(message, reason, f"{type(error).__name__}: {error}")
    finally:
        turn.end()
