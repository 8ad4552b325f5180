"""Feedback sources: events from outside, read by the user's function, become Feedback in `verified`.

Delivery: at least once; feedback published before a crash is published again with the same id, and collect absorbs it.
Order: feedback about one group keeps the order of its events. Loss: an event that raises, hangs or makes no sense is
dead-lettered and counted, and the next event is read; an event whose key was destroyed, and a text about a forgotten session,
is counted as forgotten. Privacy: for events of every source, the written Feedback or dead letter is redacted and sealed (see
`infra.store.seal`); topics and files of other systems are only read.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from infra.chain import calls
from infra.chain.redact import Redactor
from infra.log.log import Log, letter_at
from infra.observe.metrics import Metrics
from infra.store.seal import MAX_SESSIONS, Keys, open_event, open_text, seal_event, seal_text
from schemas import Feedback, encode, ids
from schemas.errors import BadFrame, RecordTooLarge, Sealed
from schemas.ids import pseudonym
from schemas.records import MAX_LETTER_BYTES
from schemas.topics import DEAD_LETTERS, VERIFIED
from streams.config import LangfuseConfig
from streams.stages.stage import confirmed

TIMEOUT_S = 10.0
AT_ONCE = 1000  # events that are read and published together
MISSING_FIELD = re.compile(r"KeyError: '([A-Za-z_][A-Za-z0-9_.-]{0,63})'")
EventOutcome = Literal["accepted", "ignored", "invalid", "failed", "forgotten"]


class EventSource(msgspec.Struct, kw_only=True):
    """One configured source. It listens where topic, file, webhook or langfuse says, exactly one of them.

    name: of its score. function: the user's, event to Feedback. topic: full name, "" for another kind of source. file: JSONL
    that grows. webhook: path at the gateway. langfuse: where scores are asked for. otlp: a message of the topic holds many
    events. folder: of the TOML. timeout_s: of one call of the function. trouble: calls that hang, and errors that were logged.
    redactor: masks personal data in texts.
    """

    name: str
    function: Callable[..., Any]
    topic: str = ""
    file: Path | None = None
    webhook: str = ""
    langfuse: LangfuseConfig | None = None
    otlp: bool = False
    folder: Path = Path()
    timeout_s: float = TIMEOUT_S
    trouble: calls.Trouble = msgspec.field(default_factory=calls.Trouble)
    redactor: Redactor = msgspec.field(default_factory=Redactor)


class Event(msgspec.Struct, frozen=True):
    """One event as it came, and where it lay.

    value: bytes of a JSON object. topic: full name, or "file:<name>". partition: index, 0 of a file. offset: in bytes for a
    file. sealed_for: the answer whose texts in it may be sealed, "" for another kind of event. ours: the gateway wrote it,
    redacted and sealed.
    """

    value: bytes
    topic: str
    partition: int
    offset: int
    sealed_for: str = ""
    ours: bool = False


class EventReading(msgspec.Struct, frozen=True):
    """The result of reading one event.

    outcome: label of the metric `feedback_events`. feedback: of an accepted event. error: of an invalid or failed event, names
    the field. brief: the error without the text of an exception, which may quote the event.
    """

    outcome: EventOutcome
    feedback: Feedback | None = None
    error: str = ""
    brief: str = ""


async def publish_events(source: EventSource, events: Sequence[Event], log: Log, metrics: Metrics) -> None:
    """Read events and publish their feedback and dead letters, AT_ONCE at a time; returns once everything is confirmed."""
    for start in range(0, len(events), AT_ONCE):
        await _publish_portion(source, events[start : start + AT_ONCE], log, metrics)


async def _publish_portion(source: EventSource, events: Sequence[Event], log: Log, metrics: Metrics) -> None:
    readings = await confirmed(lambda: read_events(source, events, log.keys), "key of an event")
    queues: dict[str, list[Callable[[], Awaitable[EventOutcome]]]] = {}
    for index, (event, reading) in enumerate(zip(events, readings, strict=True)):
        if reading.feedback is not None:
            group = ids.group_of(reading.feedback.ref)
            queues.setdefault(group, []).append(partial(_publish_feedback, source, log, event, reading.feedback))
        elif reading.outcome in ("invalid", "failed"):
            queues[f"dead {index}"] = [partial(_publish_letter, source, log, event, reading)]
        else:
            metrics.counter("feedback_events", source=source.name, outcome=reading.outcome).inc()

    async def publish_in_order(queue: Sequence[Callable[[], Awaitable[EventOutcome]]]) -> None:
        for publish in queue:
            outcome = await confirmed(publish, "feedback")
            metrics.counter("feedback_events", source=source.name, outcome=outcome).inc()

    async with asyncio.TaskGroup() as tasks:
        for queue in queues.values():
            tasks.create_task(publish_in_order(queue))


async def read_events(source: EventSource, events: Sequence[Event], keys: Keys | None = None) -> list[EventReading]:
    """Read each event by the user's function; never raises the function's errors. Raises StoreError."""
    readings: list[EventReading | None] = []
    tables: list[dict[str, Any]] = []
    for event in events:
        try:
            table = await _table(event, keys)
        except BadFrame as error:
            outcome: EventOutcome = "forgotten" if isinstance(error, Sealed) else "invalid"
            readings.append(EventReading(outcome, error=str(error), brief=str(error)))
            continue
        readings.append(None)
        tables.append(table)
    if asyncio.iscoroutinefunction(getattr(source.function, "func", source.function)):
        answers = await calls.as_tasks(source.function, tables, source.timeout_s, source.trouble)
    else:
        answers = await calls.in_thread(source.function, tables, source.timeout_s, source.trouble)
    answered = zip(tables, answers, strict=True)
    read = [_reading(source, *next(answered)) if reading is None else reading for reading in readings]
    return await asyncio.gather(*(_kept_back(*pair, keys) for pair in zip(events, read, strict=True)))


async def _kept_back(event: Event, reading: EventReading, keys: Keys | None) -> EventReading:
    """The reading, or `forgotten` where a text would be sealed anew for a session whose user was forgotten."""
    said = reading.feedback
    if event.ours or keys is None or reading.outcome == "ignored" or (said is not None and not said.text):
        return reading
    about = event.value.decode("utf-8", "replace") if said is None else said.ref
    for session in ids.sessions_in(about)[:MAX_SESSIONS]:
        if await asyncio.to_thread(keys.is_forgotten, session):
            return EventReading("forgotten")
    return reading


async def _table(event: Event, keys: Keys | None) -> dict[str, Any]:
    value = event.value
    if event.ours and keys is not None:
        value = await asyncio.to_thread(open_event, value, keys)
    table = event_table(value)
    if event.sealed_for and keys is not None:
        return await asyncio.to_thread(_opened, table, keys, event.sealed_for)
    return table


def event_table(value: bytes) -> dict[str, Any]:
    try:
        table = msgspec.json.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from error
    if not isinstance(table, dict):
        raise BadFrame(f"got a JSON {type(table).__name__}, expected an object")
    return table


def _opened(table: dict[str, Any], keys: Keys, answer: str) -> dict[str, Any]:
    return {name: open_text(value, keys, answer) if isinstance(value, str) else value for name, value in table.items()}


def feedback_fault(feedback: Feedback) -> str:
    """Return the fault of feedback that a function made, "" for none."""
    try:
        msgspec.convert(msgspec.structs.asdict(feedback), Feedback)
        ids.group_of(feedback.ref)
    except msgspec.ValidationError as error:
        return str(error)
    except ValueError as error:
        return f"ref: {error}"
    if not feedback.id:
        return "id: got none, expected one that is unique at its source"
    if feedback.value is not None and not 0 <= feedback.value <= 1:
        return f"value: got {feedback.value!r}, expected a number from 0 to 1"
    if feedback.type == "value" and feedback.value is None:
        return 'value: got none, expected a number from 0 to 1 for type "value"'
    if feedback.type in ("label", "correction") and not feedback.text:
        return f'text: got none, expected one for type "{feedback.type}"'
    try:
        encode(feedback)
    except ValueError as error:
        return f"no record can hold it: {error}"
    return ""


def _reading(source: EventSource, table: dict[str, Any], answer: object) -> EventReading:
    if answer is None:
        return EventReading("ignored")
    if isinstance(answer, calls.Failure):
        prefix = f"{source.name} {answer.kind}: "
        named, _, _ = answer.detail.partition(":")
        # A field that the event lacks is named: its name is the function's, unlike other words of an exception.
        missing = MISSING_FIELD.fullmatch(answer.detail)
        is_own = missing is not None and missing[1] not in msgspec.json.encode(table).decode()
        brief = answer.detail if is_own else named
        return EventReading("failed", error=prefix + answer.detail, brief=prefix + brief)
    if not isinstance(answer, Feedback):
        fault = f"{source.name} returned {type(answer).__name__}, expected Feedback or None"
        return EventReading("invalid", error=fault, brief=fault)
    if fault := feedback_fault(answer):
        brief = "ref: not the id of an answer" if fault.startswith("ref: ") else fault
        return EventReading("invalid", error=f"{source.name}: {fault}", brief=f"{source.name}: {brief}")
    return EventReading("accepted", msgspec.structs.replace(answer, source=source.name))


async def _publish_feedback(source: EventSource, log: Log, event: Event, feedback: Feedback) -> EventOutcome:
    text = source.redactor.mask(feedback.text)[0] if feedback.text else feedback.text
    names = [name for name in ("id", "rater") if source.redactor.mask(getattr(feedback, name))[1]]
    secret = await asyncio.to_thread(log.keys.app_secret) if names and log.keys is not None else b""
    # A pseudonym, as unique, replaces an id or a rater that is personal data.
    named = {name: pseudonym(secret, "source", source.name, getattr(feedback, name)) for name in names}
    if text and log.keys is not None:
        text = await asyncio.to_thread(seal_text, text, log.keys, feedback.ref.removeprefix(ids.ANSWER_PREFIX))
    try:
        await log.publish(VERIFIED, msgspec.structs.replace(feedback, text=text, **named))
    except RecordTooLarge as error:
        fault = f"{source.name}: {error}"
        return await _publish_letter(source, log, event, EventReading("invalid", error=fault, brief=fault))
    return "accepted"


async def _publish_letter(source: EventSource, log: Log, event: Event, reading: EventReading) -> EventOutcome:
    sessions = ids.sessions_in(event.value.decode("utf-8", "replace"))
    letter = letter_at(
        (event.topic, event.partition, event.offset),
        stage=f"feedback {source.name}",
        reason=f"event {reading.outcome}",
        error=reading.brief if event.ours or sessions else source.redactor.mask(reading.error)[0],
    )
    value = await asyncio.to_thread(_kept, source, event, sessions, log.keys)
    await log.publish(DEAD_LETTERS, msgspec.structs.replace(letter, value=value))  # sealed bytes stay whole
    return reading.outcome


def _kept(source: EventSource, event: Event, sessions: Sequence[str], keys: Keys | None) -> bytes:
    """An event as a dead letter may hold it: that of a topic or a file redacted, and sealed. Blocks; raises StoreError."""
    if event.ours:
        return event.value[:MAX_LETTER_BYTES]
    try:
        masked = msgspec.json.encode(source.redactor.mask_json(msgspec.json.decode(event.value)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        masked = source.redactor.mask(event.value.decode("utf-8", "replace"))[0].encode()
    if len(sessions) > MAX_SESSIONS:
        return b""
    return masked[:MAX_LETTER_BYTES] if keys is None else seal_event(masked[:MAX_LETTER_BYTES], keys, sessions)
