"""What an account needs of a record of the log, in few bytes; every fact names the group it is about.

Ids name their group (see `schemas.ids`), so all facts that decide what became of an experience are about one group.
"""

from collections.abc import Iterator

import msgspec

from infra.log.log import LogMessage
from schemas import Batch, Block, Closure, DeadLetter, Drawn, DropMarker, Rollback, Skip, decode
from schemas.errors import BadFrame, UnknownMajor
from schemas.fields import Outcome
from schemas.journal import Effective, JournalRecord
from schemas.ranges import Ranges


class Published(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """Of `experiences` or `experts`. held_out: kept for validation.

    id: of the experience. group, attempt: of its group.
    """

    id: str
    group: str
    attempt: int
    held_out: bool


class Stub(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A drop marker of `verified`.

    id: of the experience. reason: of the drop.
    """

    id: str
    reason: str


class Letter(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """An experience in a dead letter.

    id: of the experience. reason: of the letter.
    """

    id: str
    reason: str


class Buffered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Of `buffer`.

    id: of the experience. lane: that may train it.
    """

    id: str
    lane: str


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """How a group ended in collect.

    group, attempt: which one. outcome, reason, drops: as in a Closure.
    """

    group: str
    attempt: int
    outcome: Outcome
    reason: str
    drops: dict[str, int]


class GroupDropped(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """A group that the trainer will never train.

    group: which one. reason: why.
    """

    group: str
    reason: str


class Trained(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """An item of a batch that counts. offset: of its block in `buffer`.

    id: of the experience. step: of the optimizer. lane, revision, use: as in a BatchItem.
    """

    id: str
    step: int
    lane: str
    revision: int
    use: int
    offset: int


class LeftOut(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """What a batch names as dropped at the draw, or by its chain.

    id: of the experience. reason: why.
    """

    id: str
    reason: str


class Masked(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """Tokens of a step that were too old to be targets.

    step: of the optimizer. count: how many.
    """

    step: int
    count: int


Fact = Published | Stub | Letter | Buffered | Closed | GroupDropped | Trained | LeftOut | Masked


def group_of_fact(fact: Fact) -> str:
    """What all facts about one experience have in common; a step's own fact goes by its step."""
    if isinstance(fact, Closed | GroupDropped):
        return fact.group
    if isinstance(fact, Masked):
        return str(fact.step)
    # Not `ids.group_of`: that takes what begins with hr- for an answer, and a task may be called so.
    return fact.id.rpartition(".")[0]


class FactReader:
    """Reads the topics of one app, each in its own order; which steps had no effect is known once the journal is read."""

    def __init__(self, run: str) -> None:
        self._journal = Effective(run)
        self._skipped = Ranges()
        self._rolled_back = Ranges()

    def facts(self, topic: str, message: LogMessage) -> Iterator[Fact]:
        """Of a record of a topic, named as in `schemas.topics`; what did not decode is of no experience."""
        value = message.value
        match topic:
            case "experiences" | "experts" if isinstance(value, Block):
                # Evals are not trained and have an account of their own.
                return (
                    Published(one.id, one.group, one.attempt, one.held_out)
                    for one in value.experiences
                    if not one.suite
                )
            case "verified" if isinstance(value, DropMarker):
                return iter((Stub(value.id, value.reason),))
            case "buffer" if isinstance(value, Block):
                return (Buffered(one.id, one.lane) for one in value.experiences)
            case "progress" if isinstance(value, Closure):
                return iter((Closed(value.group, value.attempt, value.outcome, value.reason, value.drops),))
            case "progress" if isinstance(value, Drawn):
                return (GroupDropped(group, reason) for group, reason in value.dropped.items())
            case "batches" if isinstance(value, JournalRecord):
                return self._journaled(value)
            case "dead-letters" if isinstance(value, DeadLetter):
                return letters(value)
        return iter(())

    def without_effect(self, step: int) -> str:
        """Why a step changed nothing, or its change was taken back; "" if it counts."""
        if step in self._rolled_back:
            return "rolled back"
        return "step skipped" if step in self._skipped else ""

    def _journaled(self, record: JournalRecord) -> Iterator[Fact]:
        if not self._journal.counts(record):
            return
        if isinstance(record, Skip):
            self._skipped.add(record.step, record.step)
        elif isinstance(record, Rollback):
            self._rolled_back.add(record.from_step, record.to_step)
        elif isinstance(record, Batch):
            for item in record.items:
                yield Trained(item.id, record.step, item.lane, item.revision, item.use, item.offset)
            for item, reason in zip(record.dropped, record.dropped_because, strict=False):
                yield LeftOut(item.id, reason)
            if record.masked:
                yield Masked(record.step, record.masked)


def letters(record: DeadLetter) -> Iterator[Fact]:
    """What can still be read of a dead letter is accounted for."""
    try:
        inner = decode(record.value)
    except (BadFrame, UnknownMajor):
        return
    if isinstance(inner, Block):
        for one in inner.experiences:
            yield Letter(one.id, record.reason)
