"""The outbox: a queue of the gateway's records in front of the log, so that serving never waits for the log.

    offer ─> queue (memory, bounded) ─> writer ──broker answers──> log
               │ full                      │ it does not                 ^
               v                           v                             │ oldest first
            shed, counted              spool (disk, bounded) ────────> drain, when it answers again
                                           │ full: shed, counted

Delivery: at least once from the queue on. A send that timed out may have been stored, and a killed gateway resends the oldest
segment; readers drop repeated ids. Confirmed records are not sent again. Order: records on disk are sent as offered, and no
record overtakes them; within a batch of 32, confirmed records precede records that the broker refused. A record whose key is
not in the object store yet waits on disk, with all records behind it. Loss: records in the memory queue at a kill (no client
got "accepted" for them), and shed records, with a reason and a counter. An unreadable segment blocks nothing once the broker
answers: it counts as shed, and stays for the next start. Answers have priority: the outbox yields to the event loop before each
record.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest

import msgspec

from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.spool import Spool, SpoolFull
from infra.log.bus import check_size
from infra.log.log import Log, record_key
from infra.observe.metrics import Metrics
from schemas import Block, Control, decode, encode, kafka_headers
from schemas.errors import BadFrame, BrokerUnavailable, RecordTooLarge, StoreError
from schemas.topics import EXPERIENCES, Topic, by_name

_log = logging.getLogger(__name__)

MAX_BATCH = 256
DRAIN_BATCH = 32  # small, so that serving keeps most of the processor: the drain waits for the broker between batches
PAUSE_S = 1.0  # of the drain, while the broker does not answer


class Outgoing(msgspec.Struct):
    """A record to write. prepare: makes the record, or None to write nothing. num_bytes: its approximate size.

    kept: becomes True once the log or the disk has it, False if the outbox sheds it. topic: its destination.
    """

    topic: Topic
    prepare: Callable[[], Awaitable[Control | Block | None]]
    num_bytes: int
    kept: "asyncio.Future[bool] | None" = None


Spooled = tuple[str, bytes]  # an entry of the spool: name of the topic, frame of the record


class Outbox:
    """One gateway's writer. queue_records, queue_bytes: limits of its queue in memory. send_s: slower brokers are away."""

    def __init__(
        self,
        log: Log,
        spool: Spool,
        metrics: Metrics,
        *,
        held: HeldKeys,
        queue_records: int,
        queue_bytes: int,
        send_s: float,
    ) -> None:
        self._log = log
        self._spool = spool
        self._metrics = metrics
        self._held = held
        self._queue: deque[Outgoing] = deque()
        self._queued_bytes = 0
        self._in_hand = 0
        self._queue_records = queue_records
        self._queue_bytes = queue_bytes
        self._send_s = send_s
        self._offered = asyncio.Event()
        self._disk = asyncio.Lock()
        self._to_drain = asyncio.Event()
        self._confirmed: set[int] = set()  # entries of the oldest segment, by their place in it
        self.direct = False  # until the first drain has found a broker and nothing on disk
        self._to_drain.set()
        self._say_spooled()

    def offer(self, outgoing: Outgoing) -> bool:
        """Take something to write; False where it is shed. Never waits."""
        too_many = len(self._queue) >= self._queue_records
        if too_many or self._queued_bytes + outgoing.num_bytes > self._queue_bytes:
            self._shed([outgoing], "queue full")
            return False
        self._queue.append(outgoing)
        self._queued_bytes += outgoing.num_bytes
        self._offered.set()
        return True

    @property
    def num_waiting(self) -> int:
        """Records in memory, in hand and on disk."""
        return len(self._queue) + self._in_hand + len(self._spool)

    async def write(self) -> None:
        """Write records of the queue until cancelled; records already taken are written first."""
        while True:
            await self._offered.wait()
            writing = asyncio.create_task(self._write_batch())
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing
                raise

    async def drain(self) -> None:
        """Send the records on disk as soon as the broker answers, until cancelled."""
        while True:
            await self._to_drain.wait()
            if not await self._drain_segment():
                await asyncio.sleep(PAUSE_S)

    async def flush(self) -> None:
        """At a stop: everything in memory goes to the log or to the disk."""
        while self._queue:
            await self._write_batch()

    async def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        self._queued_bytes -= sum(outgoing.num_bytes for outgoing in batch)
        self._in_hand = len(batch)
        if not self._queue:
            self._offered.clear()
        direct = self.direct
        ready: list[tuple[Outgoing, Control | Block]] = []
        sending: list[asyncio.Task[bool]] = []
        async with asyncio.TaskGroup() as group:
            for outgoing in batch:
                await asyncio.sleep(0)  # answers first: a batch at a stretch would keep them all waiting
                record = await self._prepared(outgoing)
                if record is not None:
                    ready.append((outgoing, record))
                    direct = direct and not self._held.num_held  # from here on all go by way of the disk
                    if direct:
                        sending.append(group.create_task(self._send(outgoing, record)))
        sent = [task.result() for task in sending]
        if unsent := [pair for pair, is_sent in zip_longest(ready, sent) if not is_sent]:
            await self._to_disk(unsent)
        self._in_hand = 0

    async def _prepared(self, outgoing: Outgoing) -> Control | Block | None:
        try:
            record = await outgoing.prepare()
        except Exception:  # a processor's or our own mistake: this record is lost, the others are not
            _log.exception("outgoing_not_prepared topic=%s", outgoing.topic.name)
            self._shed([outgoing], "not prepared")
            return None
        if record is None:
            _tell(outgoing, False)
        return record

    async def _send(self, outgoing: Outgoing, record: Control | Block) -> bool:
        sent = await self._publish(outgoing.topic, record)
        if sent is not False:
            _tell(outgoing, sent is True)
        return sent is not False

    async def _publish(self, topic: Topic, record: Control | Block) -> bool | None:
        """Publish a record; False if it has to be sent again, None if no log will ever take it."""
        try:
            async with asyncio.timeout(self._send_s):
                await self._log.publish(topic, record)
        except (BrokerUnavailable, StoreError, TimeoutError, OSError) as error:
            _log.debug("outgoing_not_sent topic=%s error=%r", topic.name, error)
            return False
        except (RecordTooLarge, ValueError) as error:
            self._metrics.counter("shed", reason="refused by the log").inc()
            _log.warning("outgoing_refused topic=%s error=%s", topic.name, error)
            return None
        self._metrics.counter("written", topic=topic.name).inc()
        return True

    async def _answers(self) -> bool:
        """Ask for the broker without a record: a record that was given up may yet be sent."""
        try:
            async with asyncio.timeout(self._send_s):
                await self._log.bus.end_offsets(self._log.name(EXPERIENCES))
        except (BrokerUnavailable, TimeoutError, OSError) as error:
            _log.debug("broker_still_away error=%r", error)
            return False
        return True

    async def _deposited(self) -> bool:
        """Deposit held keys; True if the store has all of them."""
        try:
            await asyncio.to_thread(self._held.deposit)
        except (StoreError, OSError) as error:
            _log.warning("keys_held count=%d error=%s", self._held.num_held, error)
            return False
        return True

    async def _to_disk(self, unsent: Sequence[tuple[Outgoing, Control | Block]]) -> None:
        async with self._disk:
            written = await asyncio.to_thread(lambda: [_entry(outgoing.topic, record) for outgoing, record in unsent])
            outgoings = [outgoing for (outgoing, _), entry in zip(unsent, written, strict=True) if entry]
            if refused := [outgoing for (outgoing, _), entry in zip(unsent, written, strict=True) if not entry]:
                self._shed(refused, "refused by the log")
            # Under the lock: otherwise a drain that has just emptied the disk would set `direct` again.
            if self.direct:
                self.direct = False
                why = "store_away" if self._held.num_held else "broker_away"
                _log.warning("%s records=%d go to the spool", why, len(unsent))
            try:
                await asyncio.to_thread(self._spool.append, [entry for entry in written if entry])
            except SpoolFull as error:
                _log.error("%s error=%s", error.reason.replace(" ", "_"), error)
                self._shed(outgoings, error.reason)
            else:
                self._metrics.counter("spooled").inc(len(outgoings))
                for outgoing in outgoings:
                    _tell(outgoing, True)
        self._say_spooled()
        self._to_drain.set()

    async def _drain_segment(self) -> bool:
        """Send the oldest segment, or give it up if it cannot be read; False if the broker does not answer."""
        async with self._disk:
            try:
                oldest = await asyncio.to_thread(self._spool.oldest)
            except OSError as error:
                return await self._leave_oldest(error)
            if oldest is None:  # under the lock, so that nothing was spooled since
                self.direct = True
                self._to_drain.clear()
                _log.info("spool_drained")
                return True
        number, payloads = oldest
        begin = time.monotonic()
        if not await self._answers() or not await self._deposited():
            return False
        left = [place for place in range(len(payloads)) if place not in self._confirmed]
        for start in range(0, len(left), DRAIN_BATCH):
            if not await self._send_spooled(payloads, left[start : start + DRAIN_BATCH]):
                return False
        async with self._disk:
            try:
                await asyncio.to_thread(self._spool.remove, number)
            except OSError as error:
                _log.warning("spool_segment_stays number=%d error=%s", number, error)
        self._confirmed.clear()
        self._say_spooled()
        _log.info("spool_segment_sent records=%d seconds=%.2f", len(payloads), time.monotonic() - begin)
        return True

    async def _leave_oldest(self, error: OSError) -> bool:
        """Go on without a segment that cannot be read; False if the broker is away, too: the disk may come back first."""
        if not await self._answers():
            return False
        count = self._spool.leave_oldest() - len(self._confirmed)  # confirmed records do not count
        self._metrics.counter("shed", reason="spool unreadable").inc(count)
        _log.error("spool_unreadable records=%d stay on disk for the next start: %s", count, error)
        self._confirmed.clear()
        self._say_spooled()
        return True

    async def _send_spooled(self, payloads: Sequence[bytes], places: Sequence[int]) -> bool:
        """Publish entries of the oldest segment; False if the broker did not confirm them all."""
        async with asyncio.TaskGroup() as group:
            for place in places:
                await asyncio.sleep(0)  # answers first, here too
                group.create_task(self._send_entry(payloads[place], place))
        return self._confirmed.issuperset(places)

    async def _send_entry(self, payload: bytes, place: int) -> None:
        found = self._unpacked(payload)
        if found is None or await self._publish(*found) is not False:
            self._confirmed.add(place)

    def _unpacked(self, payload: bytes) -> tuple[Topic, Control | Block] | None:
        try:
            topic, frame = msgspec.msgpack.decode(payload, type=Spooled)
            return by_name(topic), decode(frame)
        except (BadFrame, msgspec.DecodeError, ValueError) as error:
            self._metrics.counter("shed", reason="spool entry unreadable").inc()
            _log.warning("spool_entry_unreadable error=%s", error)
            return None

    def _shed(self, outgoings: Sequence[Outgoing], reason: str) -> None:
        self._metrics.counter("shed", reason=reason).inc(len(outgoings))
        for outgoing in outgoings:
            _tell(outgoing, False)

    def _say_spooled(self) -> None:
        self._metrics.gauge("spool_records").set(len(self._spool))
        self._metrics.gauge("spool_bytes").set(self._spool.num_bytes)


def _entry(topic: Topic, record: Control | Block) -> bytes:
    """The record as the spool keeps it; b"" for one that no log takes."""
    try:
        frame = encode(record)
        if not isinstance(record, Block):  # a large block goes to the store
            check_size(topic.name, record_key(topic, record), frame, kafka_headers(record))
        return msgspec.msgpack.encode((topic.name, frame))
    except (RecordTooLarge, ValueError) as error:
        _log.warning("outgoing_refused topic=%s error=%s", topic.name, error)
        return b""


def _tell(outgoing: Outgoing, kept: bool) -> None:
    if outgoing.kept is not None and not outgoing.kept.done():
        outgoing.kept.set_result(kept)
