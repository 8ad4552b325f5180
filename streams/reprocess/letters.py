"""Redelivers dead letters: sends every letter that decodes to its original topic.

    dead-letters ─> decodes? ─> mark it in dead-letters ─> send to its topic

Delivery: at most once per letter, over all runs, also concurrent ones: the mark is confirmed before the send, and only the
first of two marks, which are in the same partition, may send. After a crash between the two the letter stays, marked and
unsent; the report names a failed send. A redelivered record is handled like any other: an answer to a closed group is counted
as late.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from infra.log.blobs import is_claim
from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log, LogMessage, letter_at, records_at
from infra.store.seal import open_event
from schemas import DeadLetter, Received, UnknownMajor, decode
from schemas.errors import BadFrame, BrokerUnavailable, RecordTooLarge
from schemas.records import MAX_LETTER_BYTES
from schemas.topics import DEAD_LETTERS, FEEDBACK, by_name
from streams.reprocess.ranges import Range, messages_in
from streams.sources.event import event_table
from streams.sources.langfuse import LANGFUSE
from streams.stages.verify import REDELIVERED

MARK = "re-delivered"
EVENT_STAGE = "feedback "
Value = tuple[bytes, bytes]  # key, value


class LettersReport(msgspec.Struct):
    """The result of a redelivery.

    letters: looked at. done: delivered in an earlier run. delivered: topic to count. refused: reason to count. examples: the
    first ten refusals, each with place and detail.
    """

    letters: int = 0
    done: int = 0
    delivered: dict[str, int] = {}
    refused: dict[str, int] = {}
    examples: list[str] = []

    def refuse(self, message: LogMessage, reason: str, detail: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if len(self.examples) < 10:
            self.examples.append(f"dead-letters/{message.partition}@{message.offset}: {reason}: {detail}")


async def redeliver(
    log: Log, ranges: Sequence[Range], on_progress: Callable[[int], None], *, by: str = ""
) -> LettersReport:
    report = LettersReport()
    marks = Marks(log, by)
    try:
        await marks.read_on((await log.bounds(DEAD_LETTERS))[1])
        for part in ranges:
            async with aclosing(messages_in(log, part)) as messages:
                async for message in messages:
                    on_progress(1)
                    letter = message.value
                    if not isinstance(letter, DeadLetter) or letter.stage == MARK:
                        continue
                    report.letters += 1
                    if (message.partition, message.offset) in marks.first:
                        report.done += 1
                    else:
                        await _redeliver(log, report, message, letter, marks)
    finally:
        await marks.close()
    return report


async def _redeliver(log: Log, report: LettersReport, message: LogMessage, letter: DeadLetter, marks: "Marks") -> None:
    is_event = letter.stage.startswith(EVENT_STAGE)
    received = await _received(log, letter) if is_event else None
    try:
        topic = received.topic if received else letter.topic if is_event else log.name(by_name(letter.topic))
        await log.bus.partitions(topic)
    except ValueError:
        where = "expected a topic of this app"
        if letter.topic.startswith(LANGFUSE):
            where = "came from Langfuse: change it there"
        elif is_event:
            where = "came from a file: append the event there again"
        report.refuse(message, "no such topic", f"{letter.topic!r} {where}")
        return
    try:
        key, value = (received.key, received.value) if received else await _value(log, letter, topic, is_event)
    except (BadFrame, UnknownMajor) as error:
        report.refuse(message, "still does not decode", str(error))
        return
    if not await marks.add(message):
        report.done += 1
        return
    try:
        place = f"dead-letters/{message.partition}@{message.offset}".encode()
        partition = letter.partition if topic.startswith(f"{log.app}.") else None
        await log.bus.send(topic, value, key=key, headers=((REDELIVERED, place),), partition=partition)
    except (RecordTooLarge, BrokerUnavailable) as error:
        report.refuse(message, "marked and not sent", str(error))
        return
    report.delivered[letter.topic] = report.delivered.get(letter.topic, 0) + 1


async def _received(log: Log, letter: DeadLetter) -> Record | None:
    """The record of `feedback` whose body the letter holds, None for another letter."""
    topic = log.name(FEEDBACK)
    named = letter.topic in (topic, FEEDBACK.name)  # earlier releases wrote the short name
    record = await _original(log, topic, letter) if named else None
    held = log.decode(record).value if record is not None else None
    return record if isinstance(held, Received) and held.body[:MAX_LETTER_BYTES] == letter.value else None


async def _value(log: Log, letter: DeadLetter, topic: str, is_event: bool) -> Value:
    """Key and bytes to send: the letter's own, or where these are cut the record they were taken from. Raises BadFrame."""
    if is_event:
        return await _event(log, letter, topic)
    if len(letter.value) < MAX_LETTER_BYTES:
        _check_frame(log, letter.value)
        return letter.key, letter.value
    original = await _original(log, topic, letter)
    if original is None or original.value[:MAX_LETTER_BYTES] != letter.value:
        raise BadFrame(f"the letter was cut at {MAX_LETTER_BYTES} bytes, and the log no longer holds the record")
    _check_frame(log, original.value)
    return original.key, original.value


async def _event(log: Log, letter: DeadLetter, topic: str) -> Value:
    """An event as its topic holds it, or else as the letter does, redacted. Raises BadFrame, Sealed where it is forgotten."""
    if topic == log.name(FEEDBACK):
        raise BadFrame("the letter has only the body of what came over HTTP, and the log no longer holds the record")
    held = letter.value if log.keys is None else await asyncio.to_thread(open_event, letter.value, log.keys)
    original = await _original(log, topic, letter)
    value = held if original is None else original.value
    event_table(value)
    return letter.key, value


def _check_frame(log: Log, value: bytes) -> None:
    if is_claim(value):
        found = log.decode(Record(topic="", partition=0, offset=0, timestamp_ms=0, key=b"", value=value))
        if found.error is not None:
            raise found.error
    else:
        decode(value)


async def _original(log: Log, topic: str, letter: DeadLetter) -> Record | None:
    at = Partition(topic, letter.partition)
    return (await records_at(log.bus, at, [letter.offset])).get(letter.offset)


class Marks:
    """Marks of letters that were delivered again. first: partition and offset of a letter to the place of its first mark.
    by: of added marks.
    """

    def __init__(self, log: Log, by: str) -> None:
        self.first: dict[tuple[int, int], tuple[int, int]] = {}
        self._log = log
        self._by = by
        self._reader: Reader | None = None

    async def read_on(self, stops: Mapping[int, int]) -> None:
        """Take in the marks up to `stops`, by partition, at least."""
        if self._reader is None:
            self._reader = await self._log.assigned(DEAD_LETTERS, "beginning")
        awaited = {Partition(self._log.name(DEAD_LETTERS), index): stop for index, stop in stops.items()}
        while any(self._reader.positions().get(at, 0) < stop for at, stop in awaited.items()):
            for message in await self._log.read(self._reader, timeout_s=1.0):
                letter = message.value
                if isinstance(letter, DeadLetter) and letter.stage == MARK:
                    self.first.setdefault((letter.partition, letter.offset), (message.partition, message.offset))

    async def add(self, message: LogMessage) -> bool:
        """Mark a letter; whether this mark is its first."""
        place = message.partition, message.offset
        mark = letter_at((DEAD_LETTERS.name, *place), stage=MARK, reason=MARK, error=self._by)
        at = await self._log.publish(DEAD_LETTERS, mark)
        await self.read_on({at.partition: at.offset + 1})
        return self.first[place] == (at.partition, at.offset)

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()
