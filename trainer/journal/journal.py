"""The journal (`batches`): the batch of each optimizer step, written before the step, and the lease that protects it.

Guarantees: a step runs only after its batch is confirmed. Records with a token below an earlier fence do not count. The first
record per (token, step) counts. So a trainer that was paused and overtaken changes nothing that counts, and learns of it at its
first write: it reads all records between its own before it trusts the write.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Literal

import msgspec

from infra.log.bus import RecordPosition
from infra.log.log import Log, LogMessage
from schemas import Batch, Fence, PolicyEvent, Rollback, Skip, topics
from schemas.errors import BadFrame, FencedOut
from schemas.journal import Entry, JournalRecord, effective

Fate = Literal["trained", "skipped", "quarantined", "open"]


class Journal(msgspec.Struct, frozen=True):
    """The entries of the journal that count.

    entries: in order. next_offset: where the next read continues. token: highest fence seen.
    """

    entries: tuple[Entry, ...] = ()
    next_offset: int = 0
    token: int = -1


class Lease(msgspec.Struct, frozen=True):
    """The right to write the journal of a run. run: name of the run. token: offset of the lease event in `policies`; a higher
    token takes the right away. owner: instance of the trainer.
    """

    run: str
    token: int
    owner: str


async def take_lease(log: Log, *, policy: str, run: str, owner: str) -> Lease:
    """Announce a new trainer and close the journal to all earlier ones. Raises FencedOut if a newer one came between."""
    event = PolicyEvent(event="lease", policy=policy, owner=owner)
    position = await log.publish(topics.POLICIES, event)
    lease = Lease(run=run, token=position.offset, owner=owner)
    await log.publish(topics.BATCHES, Fence(run=run, token=lease.token, owner=owner))
    return lease


async def read_records(log: Log, start: int, stop: int | None = None) -> AsyncGenerator[LogMessage, None]:
    """Read the journal from offset `start` up to `stop`, by default up to its end at the call. Raises BadFrame with the offset
    of a record that is unreadable or missing, OffsetOutOfRange.
    """
    if stop is None:
        stop = max((await log.bus.end_offsets(log.name(topics.BATCHES))).values())
    offset = start
    async with aclosing(log.scan(topics.BATCHES, {0: start}, {0: stop})) as messages:
        async for message in messages:
            if message.error is not None:
                raise BadFrame(f"journal offset {message.offset}: {message.error}") from message.error
            if message.offset != offset:
                raise BadFrame(f"journal offset {offset}: missing, the next record is at {message.offset}")
            offset = message.offset + 1
            yield message


async def read_journal(log: Log, lease: Lease, *, start: int = 0, token: int = -1) -> Journal:
    """Everything from offset `start` that counts, up to this lease's fence. Raises FencedOut if a newer fence is there."""
    records: list[JournalRecord] = []
    offset = start
    async for message in read_records(log, start):
        offset = message.offset + 1
        if isinstance(message.value, JournalRecord):
            records.append(message.value)
    entries, highest = effective(records, lease.run, token)
    if highest > lease.token:
        raise FencedOut(f"run {lease.run!r}: this trainer holds token {lease.token}, token {highest} has taken over")
    return Journal(entries=tuple(entries), next_offset=offset, token=highest)


class Pending(msgspec.Struct, frozen=True):
    """A journaled batch that a state does not contain yet.

    batch: as journaled. fate: "trained"; "skipped" (not applied); "quarantined" (rolled back later); "open": the last batch,
    whose result is not in the journal yet.
    """

    batch: Batch
    fate: Fate


def pending(entries: Iterable[Entry], after_step: int) -> list[Pending | Rollback]:
    """Return the entries that bring a state at `after_step` to the journal's end, in order. Pure.

    A rollback comes after its quarantined batches; these are not executed, so it leaves the weights unchanged.
    """
    batches: dict[int, Batch] = {}
    fates: dict[int, Fate] = {}
    rollbacks: dict[int, Rollback] = {}
    last = after_step
    for entry in entries:
        if isinstance(entry, Batch) and entry.step > after_step:
            batches.setdefault(entry.step, entry)
            last = max(last, entry.step)
        elif isinstance(entry, Skip):
            fates.setdefault(entry.step, "skipped")
        elif isinstance(entry, Rollback) and entry.to_step > after_step:
            rollbacks[entry.to_step] = entry
            fates |= dict.fromkeys(range(entry.from_step, entry.to_step + 1), "quarantined")
    found: list[Pending | Rollback] = []
    for step in sorted(batches.keys() | rollbacks.keys()):
        if step in batches:
            found.append(Pending(batches[step], fates.get(step, "open" if step == last else "trained")))
        if step in rollbacks:
            found.append(rollbacks[step])
    return found


def is_quarantined(entries: Iterable[Entry], step: int) -> bool:
    """True if a state that ends at `step` holds steps that were taken back later."""
    return any(isinstance(entry, Rollback) and entry.from_step <= step < entry.to_step for entry in entries)


async def append(log: Log, lease: Lease, record: Entry, *, expected: int) -> RecordPosition:
    """Write one record; returns where it lies, once confirmed and known to count.

    expected: offset after the last record known here. Raises FencedOut where a newer fence lies between that and the
    record: then it counts for nothing, and nothing may follow from it.
    """
    position = await log.publish(topics.BATCHES, record)
    async for message in read_records(log, expected, position.offset):
        other = message.value
        if isinstance(other, Fence) and other.run == lease.run and other.token > lease.token:
            raise FencedOut(
                f"run {lease.run!r}: token {lease.token} is held here, {other.owner} took {other.token} and fenced the "
                f"journal at offset {message.offset}"
            )
    return position
