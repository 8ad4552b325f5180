"""Feedback sources: events from outside, read by the user's function, become Feedback in `verified`.

Delivery: at least once; what was published before a crash is published again with the same id, and collect absorbs it.
Order: feedback about one group keeps the order of its events. Loss: an event that raises, hangs or makes no sense is
dead-lettered and counted, and the next one goes on; one whose key was destroyed is counted as forgotten. Privacy: what
people wrote about a production answer goes on sealed, and lies in dead letters as it came (see `infra.seal`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from infra.bus.log import Log
from infra.chain import calls
from infra.metrics import Metrics
from infra.plugin import load
from infra.processor import mark_of
from infra.seal import Keys, open_text, seal_text
from schemas import DeadLetter, Feedback, ids
from schemas.errors import BadFrame, ConfigError, Sealed
from schemas.topics import DEAD_LETTERS, VERIFIED
from streams.config import FeedbackConfig
from streams.stage import MAX_LETTER_BYTES, confirmed

TIMEOUT_S = 10.0
GIVE_UP_S = 120.0
EventOutcome = Literal["accepted", "ignored", "invalid", "failed", "forgotten"]


class EventSource(msgspec.Struct, kw_only=True):
    """One configured source. topic, file or webhook says where it listens. hung: threads of calls that were given up.

    Example: EventSource(name="csat", function=csat, topic="zendesk.closed")
    """

    name: str
    function: Callable[..., Any]
    topic: str = ""
    file: Path | None = None
    webhook: str = ""
    timeout_s: float = TIMEOUT_S
    hung: list[Any] = []


class Event(msgspec.Struct, frozen=True):
    """One event as it came, and where it lay. sealed_for: the answer whose texts in it may be sealed, "" for no such event.

    Example: Event(b'{"answer_id": "hr-a1b2.0-3-0", "csat": 4}', topic="zendesk.closed", partition=3, offset=77)
    """

    value: bytes
    topic: str
    partition: int
    offset: int
    sealed_for: str = ""


class Reading(msgspec.Struct, frozen=True):
    """What became of one event. error: for invalid and failed ones, naming the field."""

    outcome: EventOutcome
    feedback: Feedback | None = None
    error: str = ""


def build_sources(configs: Sequence[FeedbackConfig], folder: Path) -> tuple[EventSource, ...]:
    """The configured sources, their functions loaded; files are relative to `folder`. Raises ConfigError."""
    sources: list[EventSource] = []
    for index, config in enumerate(configs):
        where = f"feedback[{index}]"
        function: Any = load(config.use, config.options, where)
        try:
            kind = mark_of(function).kind
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if kind != "feedback":
            raise ConfigError(f"{where}: {config.use} is marked @{kind}, expected @feedback")
        if any(source.name == config.name for source in sources):
            raise ConfigError(f'{where}.name: a source "{config.name}" is there already')
        webhook = config.from_.webhook
        if webhook and any(source.webhook == webhook for source in sources):
            raise ConfigError(f'{where}.from.webhook: a source listens to "{webhook}" already')
        file = folder / config.from_.file if config.from_.file else None
        topic = config.from_.topic
        sources.append(EventSource(name=config.name, function=function, topic=topic, file=file, webhook=webhook))
    return tuple(sources)


async def run_sources(sources: Sequence[EventSource], log: Log, metrics: Metrics, folder: Path) -> None:
    """Listen to all sources until cancelled; `folder` keeps the positions in files. Raises what a reader raises."""
    from streams.sources.file import run_file
    from streams.sources.received import run_received
    from streams.sources.topic import run_topic

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_received([source for source in sources if source.webhook], log, metrics))
        for source in sources:
            if source.webhook:
                continue
            if source.file is None:
                tasks.create_task(run_topic(source, log, metrics))
            else:
                tasks.create_task(run_file(source, log, metrics, folder / f"feedback-{source.name}"))


async def publish_events(source: EventSource, events: Sequence[Event], log: Log, metrics: Metrics) -> None:
    """Read events and publish what they say; returns once everything is confirmed."""
    readings = await read_events(source, events, log.keys)
    queues: dict[str, list[Callable[[], Awaitable[object]]]] = {}
    for event, reading in zip(events, readings, strict=True):
        metrics.counter("feedback_events", source=source.name, outcome=reading.outcome).inc()
        if reading.feedback is not None:
            group = ids.group_of(reading.feedback.ref)
            queues.setdefault(group, []).append(_publisher(log, reading.feedback))
        elif reading.outcome in ("invalid", "failed"):
            queues.setdefault(f"dead {event.offset}", []).append(_letter_publisher(source, event, reading, log))
    async with asyncio.TaskGroup() as tasks:
        for queue in queues.values():
            tasks.create_task(_in_order(queue))


async def read_events(source: EventSource, events: Sequence[Event], keys: Keys | None = None) -> list[Reading]:
    """What each event says, by the user's function; never raises for what that function does. Raises StoreError."""
    readings: list[Reading | None] = []
    tables: list[object] = []
    for event in events:
        try:
            table = msgspec.json.decode(event.value)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            readings.append(Reading("invalid", error=f"not JSON: {error}"))
            continue
        if not isinstance(table, dict):
            readings.append(Reading("invalid", error=f"got a JSON {type(table).__name__}, expected an object"))
            continue
        if event.sealed_for and keys is not None:
            try:
                table = await asyncio.to_thread(_opened, table, keys, event.sealed_for)
            except BadFrame as error:
                outcome: EventOutcome = "forgotten" if isinstance(error, Sealed) else "invalid"
                readings.append(Reading(outcome, error=str(error)))
                continue
        readings.append(None)
        tables.append(table)
    if asyncio.iscoroutinefunction(getattr(source.function, "func", source.function)):
        answers = await calls.as_tasks(source.function, tables, {}, source.timeout_s)
    else:
        answers = await calls.in_thread(source.function, tables, {}, source.timeout_s, source.hung)
    answered = iter(answers)
    return [_reading(source, next(answered)) if reading is None else reading for reading in readings]


def _opened(table: dict[str, Any], keys: Keys, answer: str) -> dict[str, Any]:
    return {name: open_text(value, keys, answer) if isinstance(value, str) else value for name, value in table.items()}


def feedback_fault(feedback: Feedback) -> str:
    """What is wrong with feedback that a function made, "" for nothing."""
    try:
        msgspec.convert(msgspec.structs.asdict(feedback), Feedback)
        ids.group_of(feedback.ref)
    except msgspec.ValidationError as error:
        return str(error)
    except ValueError as error:
        return f"ref: {error}"
    if not feedback.id:
        return "id: got none, expected one that is unique at its source"
    if feedback.value is not None and not (math.isfinite(feedback.value) and 0 <= feedback.value <= 1):
        return f"value: got {feedback.value!r}, expected a number from 0 to 1"
    if feedback.type == "value" and feedback.value is None:
        return 'value: got none, expected a number from 0 to 1 for type "value"'
    if feedback.type in ("label", "correction") and not feedback.text:
        return f'text: got none, expected one for type "{feedback.type}"'
    return ""


def _reading(source: EventSource, answer: object) -> Reading:
    if answer is None:
        return Reading("ignored")
    if isinstance(answer, calls.Failure):
        return Reading("failed", error=f"{source.name} {answer.kind}: {answer.detail}")
    if not isinstance(answer, Feedback):
        return Reading("invalid", error=f"{source.name} returned {type(answer).__name__}, expected Feedback or None")
    fault = feedback_fault(answer)
    if fault:
        return Reading("invalid", error=f"{source.name}: {fault}")
    return Reading("accepted", msgspec.structs.replace(answer, source=source.name))


def _publisher(log: Log, feedback: Feedback) -> Callable[[], Awaitable[object]]:
    async def publish() -> object:
        kept = feedback
        if feedback.text and log.keys is not None:
            answer = feedback.ref.removeprefix(ids.ANSWER_PREFIX)
            kept = msgspec.structs.replace(
                feedback, text=await asyncio.to_thread(seal_text, feedback.text, log.keys, answer)
            )
        return await log.publish(VERIFIED, kept)

    return lambda: confirmed(publish, "feedback", GIVE_UP_S)


def _letter_publisher(source: EventSource, event: Event, reading: Reading, log: Log) -> Callable[[], Awaitable[object]]:
    letter = DeadLetter(
        topic=event.topic,
        partition=event.partition,
        offset=event.offset,
        stage=f"feedback {source.name}",
        reason=f"event {reading.outcome}",
        error=reading.error,
        value=event.value[:MAX_LETTER_BYTES],
    )
    return lambda: confirmed(lambda: log.publish(DEAD_LETTERS, letter), "dead letter", GIVE_UP_S)


async def _in_order(queue: Sequence[Callable[[], Awaitable[object]]]) -> None:
    for publish in queue:
        await publish()
