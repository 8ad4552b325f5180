"""Feeds one partition's records to its collector in batches, and the time while no record arrives.

    deliveries ─> queue ─> batch (64 records or 50 ms) ─> Collector.take ─> acknowledge
                    └── idle and a deadline is due ─> Collector.tick, which comes back as a record

Guarantees: the inbox folds records in offset order and acknowledges them after it saved their effects. When a rebalance takes
its partition, it finishes the current batch and abandons its queue, which Kafka delivers again. An error ends the process
before the acknowledgement.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from infra.log.log import Log
from infra.log.memory import wall_ms
from infra.observe.failpoint import reach
from infra.observe.metrics import Metrics
from schemas.records import together
from streams.collect.collector import Collector, CollectSettings, TakenAway
from streams.collect.state import State
from streams.stages.stage import Delivery, Waiting, end_for

logger = logging.getLogger(__name__)

BATCH_RECORDS = 64
LINGER_S = 0.05
MAX_QUEUED = 256
IDLE_S = 1.0
TICK_AGAIN_S = 1.0


class Inbox:
    """One partition of one generation."""

    def __init__(self, partition: int, generation: int, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self.partition = partition
        self.generation = generation
        self._collector: Collector | None = None
        self._queue: deque[Delivery] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._retired = False
        self._ticked_at_s = 0.0

    async def put(self, delivery: Delivery) -> None:
        while len(self._queue) >= MAX_QUEUED and not self._retired:
            self._room.clear()
            await self._room.wait()
        if self._retired:
            delivery.abandon()
            return
        self._queue.append(delivery)
        self._changed.set()

    def retire(self) -> None:
        self._retired = True
        while self._queue:
            self._queue.popleft().abandon()
        self._changed.set()
        self._room.set()

    def num_queued(self) -> int:
        return len(self._queue)

    def state(self) -> State | None:
        return None if self._collector is None else self._collector.state

    def mark(self) -> int:
        """Grows while records are folded, in a rebuild too."""
        return -1 if self._collector is None else self._collector.next_offset

    async def run(
        self,
        make: Callable[[], Collector],
        committed: Callable[[], Awaitable[int]],
        before: "asyncio.Task[None] | None",
    ) -> None:
        """Recover, then fold until retired. before: the task that still may hold the state file."""
        try:
            if before is not None:
                await asyncio.wait((before,))
            if self._retired:
                return
            collector = self._collector = make()
            try:
                await collector.recover(await committed(), lambda: self._retired)
                await self._fold(collector)
            finally:
                self._collector = None  # its groups wait on the partition's next worker
                collector.close()
        except TakenAway:
            logger.info("collect_taken_away partition=%d", self.partition)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            end_for(error, f"collect: partition {self.partition}")

    async def _fold(self, collector: Collector) -> None:
        while not self._retired:
            batch = await self._batch()
            if batch:
                await collector.take([delivery.record for delivery in batch])
                reach("collect.before_ack")
                for delivery in batch:
                    delivery.acknowledge()
                reach("collect.after_ack")
            elif not self._retired:
                await self._tick(collector)

    async def _batch(self) -> list[Delivery]:
        if not self._queue and not await self._wait(IDLE_S):
            return []
        clock = asyncio.get_running_loop().time
        until_s = clock() + LINGER_S
        while 0 < len(self._queue) < BATCH_RECORDS:
            remaining_s = until_s - clock()
            if remaining_s <= 0 or not await self._wait(remaining_s):
                break
        batch = [self._queue.popleft() for _ in range(min(BATCH_RECORDS, len(self._queue)))]
        self._room.set()
        return batch

    async def _wait(self, timeout_s: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
            return True
        except TimeoutError:
            return False

    async def _tick(self, collector: Collector) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._ticked_at_s >= TICK_AGAIN_S and await collector.tick(self._wall_ms()):
            self._ticked_at_s = now_s


class CollectDriver:
    """All partitions of `verified` that this worker holds."""

    name = "collect"

    def __init__(
        self,
        log: Log,
        metrics: Metrics,
        settings: CollectSettings,
        committed: Callable[[int], Awaitable[int]],
        tasks: asyncio.TaskGroup,
        *,
        wall_ms: Callable[[], int] = wall_ms,
    ) -> None:
        """committed: next offset of a partition as the group has it. wall_ms: only says when to append a tick."""
        self._wall_ms = wall_ms
        self._log = log
        self._metrics = metrics
        self._settings = settings
        self._committed = committed
        self._tasks = tasks
        self._inboxes: dict[int, Inbox] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def accept(self, delivery: Delivery) -> None:
        inbox = self._inbox(delivery.record.partition, delivery.generation)
        if inbox is None:
            delivery.abandon()
        else:
            await inbox.put(delivery)

    def assigned(self, partitions: set[int], generation: int) -> None:
        self.retire(generation - 1)  # a short rebalance is over before the worker sees that it has begun
        for partition in partitions:
            self._inbox(partition, generation)

    def retire(self, generation: int | None = None) -> None:
        """A rebalance takes this generation's partitions (None: all): finish the records in progress, hold no others."""
        for inbox in self._inboxes.values():
            if generation is None or inbox.generation <= generation:
                inbox.retire()

    def abandon(self) -> None:
        """Do nothing: the fold in progress is finished."""

    def num_in_flight(self) -> int:
        return sum(inbox.num_queued() for inbox in self._inboxes.values())

    def waiting(self) -> Waiting:
        states = [state for inbox in self._inboxes.values() if (state := inbox.state()) is not None]
        return Waiting(
            groups=sum(state.num_open() for state in states),
            oldest_ms=min((came_ms for state in states if (came_ms := state.oldest_ms())), default=0),
            turns=sum(state.num_held() for state in states),
            feedback=together(state.waits() for state in states),
        )

    def mark(self, partition: int) -> int:
        return self._inboxes[partition].mark() if partition in self._inboxes else -1

    async def finish(self) -> None:
        self.retire()
        if self._running:
            await asyncio.wait(self._running.values())

    def _inbox(self, partition: int, generation: int) -> Inbox | None:
        """The inbox of this generation, begun if need be; None for a delivery of an older one."""
        inbox = self._inboxes.get(partition)
        if inbox is not None and inbox.generation > generation:
            return None
        if inbox is None or inbox.generation < generation:
            if inbox is not None:
                inbox.retire()
            inbox = self._inboxes[partition] = Inbox(partition, generation, self._wall_ms)
            self._running[partition] = self._tasks.create_task(
                inbox.run(
                    lambda: Collector(self._log, self._metrics, partition, self._settings),
                    lambda: self._committed(partition),
                    self._running.get(partition),
                )
            )
        return inbox
