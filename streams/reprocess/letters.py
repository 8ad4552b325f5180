"""Dead letters a second time: what decodes goes back to where it came from.

    dead-letters ─> decodes? ─> mark it in dead-letters ─> send to its topic

Delivery: at most once each, over all runs of the command: the mark is confirmed before the send, so a crash between the two
leaves the letter where it was, marked and not sent, and the report of a send that failed names it. What is delivered is
handled like any other delivery: the answer to a group that has closed meanwhile is counted as late.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec

from infra.log.blobs import is_claim
from infra.log.bus import Partition, Record
from infra.log.letters import letter_at
from infra.log.log import Log, LogMessage
from infra.store.seal import open_event
from schemas import DeadLetter, UnknownMajor, decode
from schemas.errors import BadFrame, BrokerUnavailable, OffsetOutOfRange, RecordTooLarge
from schemas.records import MAX_LETTER_BYTES
from schemas.topics import DEAD_LETTERS, by_name
from streams.reprocess.ranges import Range, messages_of
from streams.sources.event import event_table
from streams.stages.verify import REDELIVERED

MARK = "re-delivered"
FEEDBACK = "feedback "
Value = tuple[bytes, bytes]  # key, value


class LettersReport(msgspec.Struct):
    """letters: looked at. done: delivered in an earlier run. delivered: topic to count. refused: reason to count."""

    letters: int = 0
    done: int = 0
    delivered: dict[str, int] = {}
    refused: dict[str, int] = {}
    examples: list[str] = []

    def refuse(self, message: LogMessage, reason: str, detail: str) -> None:
        """Leave a letter where it is."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if len(self.examples) < 10:
            self.examples.append(f"dead-letters/{message.partition}@{message.offset}: {reason}: {detail}")


async def redeliver(log: Log, ranges: Sequence[Range], on_progress: Callable[[int], None]) -> LettersReport:
    """Deliver the letters in the ranges again that were not yet and that decode."""
    report = LettersReport()
    marked = await _marked(log)
    for one in ranges:
        async with aclosing(messages_of(log, one)) as messages:
            async for message in messages:
                on_progress(1)
                letter = message.value
                if not isinstance(letter, DeadLetter) or letter.stage == MARK:
                    continue
                report.letters += 1
                if (message.partition, message.offset) in marked:
                    report.done += 1
                else:
                    await _redeliver(log, report, message, letter)
    return report


async def _redeliver(log: Log, report: LettersReport, message: LogMessage, letter: DeadLetter) -> None:
    is_event = letter.stage.startswith(FEEDBACK)
    try:
        topic = letter.topic if is_event else log.name(by_name(letter.topic))
        await log.bus.partitions(topic)
    except ValueError:
        where = "came from a file: append the event there again" if is_event else "expected a topic of this app"
        report.refuse(message, "no such topic", f"{letter.topic!r} {where}")
        return
    try:
        key, value = await _value(log, letter, topic, is_event)
    except (BadFrame, UnknownMajor) as error:
        report.refuse(message, "still does not decode", str(error))
        return
    mark = letter_at((DEAD_LETTERS.name, message.partition, message.offset), stage=MARK, reason=MARK)
    await log.publish(DEAD_LETTERS, mark)
    try:
        place = f"dead-letters/{message.partition}@{message.offset}".encode()
        await log.bus.send(
            topic, value, key=key, headers=((REDELIVERED, place),), partition=_partition(letter, topic, log)
        )
    except (RecordTooLarge, BrokerUnavailable) as error:
        report.refuse(message, "marked and not sent", str(error))
        return
    report.delivered[letter.topic] = report.delivered.get(letter.topic, 0) + 1


def _partition(letter: DeadLetter, topic: str, log: Log) -> int | None:
    """Its old partition: what has no key of its own would move, and neighbours of its group lie there."""
    return letter.partition if topic.startswith(f"{log.app}.") else None


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
    """The record a letter was written about, if the log still has it."""
    at = Partition(topic, letter.partition)
    if letter.offset >= (await log.bus.end_offsets(topic)).get(at, 0):
        return None
    reader = await log.bus.assigned({at: letter.offset})
    try:
        records: list[Record] = []
        while not records:
            records = await reader.get_many(timeout_s=1.0, max_records=1)
        return records[0] if records[0].offset == letter.offset else None
    except OffsetOutOfRange:
        return None
    finally:
        await reader.close()


async def _marked(log: Log) -> set[tuple[int, int]]:
    """Letters that were delivered again before, by partition and offset."""
    found: set[tuple[int, int]] = set()
    async with aclosing(log.read_all(DEAD_LETTERS)) as messages:
        async for message in messages:
            letter = message.value
            if isinstance(letter, DeadLetter) and letter.stage == MARK:
                found.add((letter.partition, letter.offset))
    return found
