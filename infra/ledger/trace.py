"""`trace`: from an answer to the steps that learned from it, and from a policy to the experiences that it learned from.

Read from the log through the index; nothing is inferred: each line of a trace is a record of the log.
"""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from infra.ledger.index import IndexPlace, LogIndex, TrainedStep
from infra.log.log import Log, LogMessage
from infra.store.seal import FORGOTTEN, Keys, open_text
from schemas import Batch, Block, Closure, Drawn, DropMarker, Experience, Feedback, PolicyEvent, topics
from schemas.errors import BadFrame, NotInLog, Sealed
from schemas.ids import ANSWER_PREFIX, group_of
from schemas.topics import by_name


class TrainedUse(msgspec.Struct, frozen=True):
    """One optimizer step that trained on an answer. version: before it. undone: why it changed nothing in the end."""

    step: int
    time_ms: int
    version: int
    lane: str
    revision: int
    use: int
    advantage: float
    weight: float
    undone: str = ""


class AnswerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the log says about one answer, with times in ms of the broker's clock.

    published: as its explorer or gateway wrote it. judged: as it left verify. buffered: as collect sent it on, by revision.
    given_up: why the trainer will never train the newest copy, "" where it may.
    """

    id: str
    published: Experience | None = None
    published_ms: int = 0
    judged: Experience | None = None
    dropped: str = ""
    feedback: tuple[tuple[int, Feedback], ...] = ()
    closures: tuple[tuple[int, Closure], ...] = ()
    buffered: tuple[tuple[int, Experience], ...] = ()
    uses: tuple[TrainedUse, ...] = ()
    given_up: str = ""
    first_version: int | None = None
    newest_version: int = -1


class PolicyTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a policy: the steps since its parent, and the experiences trained in them.

    lanes, versions: lane or behaviour version → experiences, without tenants: the journal does not hold them.
    """

    version: int
    parent: int
    events: tuple[tuple[int, PolicyEvent], ...]
    steps: tuple[TrainedStep, ...]
    lanes: dict[str, int]
    versions: dict[int, int]
    ids: tuple[str, ...]


async def trace_answer(log: Log, index: LogIndex, ref: str) -> AnswerTrace:
    """The trace of an answer or experience id. Raises NotInLog where the kept log has nothing about it."""
    try:
        group = group_of(ref)
    except ValueError as error:
        raise NotInLog(str(error)) from error
    name = ref.removeprefix(ANSWER_PREFIX)
    by_topic = defaultdict[str, list[tuple[IndexPlace, object]]](list)
    for place, message in await read_at(log, index.places(group)):
        by_topic[place.topic].append((place, message.value))
    verified, progress = by_topic["verified"], by_topic["progress"]
    published = members(by_topic["experiences"] + by_topic["experts"], name)
    judged = members(verified, name)
    buffered = members(by_topic["buffer"], name)
    if not (published or judged or buffered):
        raise NotInLog(f"{ref}: the kept log has no such answer; answers to keys made with --train no are not recorded")
    uses = await uses_of(log, index.steps(group), name)
    said = [
        (place.time_ms, record)
        for place, record in verified
        if isinstance(record, Feedback) and record.ref.removeprefix(ANSWER_PREFIX) == name
    ]
    lasting = [use.step for use in uses if not use.undone]
    return AnswerTrace(
        id=name,
        published=published[0][1] if published else None,
        published_ms=published[0][0] if published else 0,
        judged=judged[0][1] if judged else None,
        dropped=next((drop for _, record in verified if (drop := dropped(record, name))), ""),
        feedback=await asyncio.to_thread(lambda: tuple((time_ms, legible(words, log.keys)) for time_ms, words in said)),
        closures=tuple(
            (place.time_ms, record)
            for place, record in progress
            if isinstance(record, Closure) and record.group == group
        ),
        buffered=tuple(buffered),
        uses=tuple(uses),
        given_up=given_up(progress, group, buffered[-1][0] if buffered else 0),
        first_version=index.first_version_after(lasting[0]) if lasting else None,
        newest_version=index.newest_version(),
    )


def dropped(record: object, name: str) -> str:
    """Why a record of `verified` drops an experience, and which processor did; "" where it does not."""
    if not isinstance(record, DropMarker) or record.id != name:
        return ""
    return f"{record.reason} (by {record.processor})" if record.processor else record.reason


async def trace_policy(log: Log, index: LogIndex, version: int) -> PolicyTrace:
    """Experiences that a version learned from since its parent. Raises NotInLog for one that was never published."""
    events = await policy_events(log, index, version)
    own = next((event for _, event in events if event.event == "published"), None)
    if own is None:
        raise NotInLog(f"policy version {version} was never published; the newest is {index.newest_version()}")
    before = [event for _, event in await policy_events(log, index, own.parent) if event.event == "published"]
    steps = index.steps_between(before[0].step + 1 if before else 0, own.step)
    places = [IndexPlace(topics.BATCHES.name, 0, step.offset, step.time_ms) for step in steps if not step.undone]
    items = [
        item
        for _, message in await read_at(log, places)
        if isinstance(message.value, Batch)
        for item in message.value.items
    ]
    return PolicyTrace(
        version=version,
        parent=own.parent,
        events=tuple(events),
        steps=tuple(steps),
        lanes=dict(Counter(item.lane for item in items).most_common()),
        versions=dict(sorted(Counter(item.min_version for item in items).items())),
        ids=tuple(item.id for item in items),
    )


async def policy_events(log: Log, index: LogIndex, version: int) -> list[tuple[int, PolicyEvent]]:
    places = [IndexPlace(topics.POLICIES.name, 0, offset, 0) for offset in index.policy_offsets(version)]
    return [
        (message.timestamp_ms, message.value)
        for _, message in await read_at(log, places)
        if isinstance(message.value, PolicyEvent)
    ]


async def uses_of(log: Log, steps: Sequence[TrainedStep], name: str) -> list[TrainedUse]:
    places = {IndexPlace(topics.BATCHES.name, 0, step.offset, step.time_ms): step for step in steps}
    return [
        TrainedUse(
            step=batch.step,
            time_ms=place.time_ms,
            version=batch.version,
            lane=item.lane,
            revision=item.revision,
            use=item.use,
            advantage=item.advantage,
            weight=item.weight,
            undone=places[place].undone,
        )
        for place, message in await read_at(log, places)
        if isinstance(batch := message.value, Batch)
        for item in batch.items
        if item.id == name
    ]


def members(records: Iterable[tuple[IndexPlace, object]], name: str) -> list[tuple[int, Experience]]:
    """Every copy of an experience in these blocks, with when it was stored, in log order."""
    return [
        (place.time_ms, member)
        for place, record in records
        if isinstance(record, Block)
        for member in record.experiences
        if member.id == name
    ]


def given_up(records: Iterable[tuple[IndexPlace, object]], group: str, since_ms: int) -> str:
    """Why the trainer said, at since_ms or later, that it will never train a group; "" where it did not."""
    found = [
        record.dropped[group]
        for place, record in records
        if isinstance(record, Drawn) and group in record.dropped and place.time_ms >= since_ms
    ]
    return found[-1] if found else ""


async def read_at(log: Log, places: Iterable[IndexPlace]) -> list[tuple[IndexPlace, LogMessage]]:
    """The records at these places, in their order; records that retention has removed since are left out."""
    ordered, found = sorted(places), list[tuple[IndexPlace, LogMessage]]()
    for (topic, partition), group in itertools.groupby(ordered, key=lambda place: (place.topic, place.partition)):
        wanted = {place.offset: place for place in group}
        messages = await log.messages_at(by_name(topic), partition, wanted)
        found += [(place, messages[offset]) for offset, place in wanted.items() if offset in messages]
    return found


def legible(feedback: Feedback, keys: Keys | None) -> Feedback:
    """The feedback with its text as it was written, or with why it cannot be read. Blocks; raises StoreError."""
    if not feedback.text or keys is None:
        return feedback
    try:
        text = open_text(feedback.text, keys, feedback.ref.removeprefix(ANSWER_PREFIX))
    except BadFrame as error:
        text = FORGOTTEN if isinstance(error, Sealed) else str(error)
    return msgspec.structs.replace(feedback, text=text)
