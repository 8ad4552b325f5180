"""The journal (`batches`): what each optimizer step trains on, written before the step; and the lease that guards it.

Guarantees: a step runs only after its batch is confirmed; records of a token below an earlier fence count for nothing;
the first record per (token, step) wins. So a trainer that was paused and overtaken changes nothing that counts.
"""

from collections.abc import Iterable

import msgspec

from infra.bus.log import Log
from schemas import Batch, Fence, PolicyEvent, Rollback, Skip, topics
from schemas.errors import FencedOut

Entry = Batch | Skip | Rollback


class Journal(msgspec.Struct, frozen=True):
    """What counts in the journal, in order. next_offset: where the next read goes on. token: highest fence seen."""

    entries: tuple[Entry, ...] = ()
    next_offset: int = 0
    token: int = -1


class Lease(msgspec.Struct, frozen=True):
    """The right to write. token: offset of the lease event in `policies`; a higher one takes the right away."""

    run: str
    token: int
    owner: str


def effective(records: Iterable[Fence | Entry], run: str, token: int = -1) -> tuple[list[Entry], int]:
    """Records that count, and the highest fence: pure, the same for every reader.

    token: highest fence before the first record. Steps below one already journaled under an older token are re-executions
    and never journaled again, so (token, step) is unique per reader; a repeated one is a retried send.
    """
    entries: list[Entry] = []
    seen: set[tuple[type, int, int]] = set()
    for record in records:
        if record.run != run:
            continue
        if isinstance(record, Fence):
            token = max(token, record.token)
            continue
        step = record.from_step if isinstance(record, Rollback) else record.step
        key = (type(record), record.token, step)
        if record.token < token or key in seen:
            continue
        seen.add(key)
        entries.append(record)
    return entries, token


async def take_lease(log: Log, *, policy: str, run: str, owner: str) -> Lease:
    """Announce a new trainer and close the journal to all earlier ones. Raises FencedOut if a newer one came between."""
    event = PolicyEvent(event="lease", policy=policy, owner=owner)
    position = await log.publish(topics.POLICIES, event)
    lease = Lease(run=run, token=position.offset, owner=owner)
    await log.publish(topics.BATCHES, Fence(run=run, token=lease.token, owner=owner))
    return lease


async def read_journal(log: Log, lease: Lease, *, start: int = 0, token: int = -1) -> Journal:
    """Everything from offset `start` that counts, up to this lease's fence. Raises FencedOut if a newer fence is there."""
    reader = await log.assigned(topics.BATCHES, {0: start})
    end = max((await log.bus.end_offsets(log.name(topics.BATCHES))).values())
    records: list[Fence | Entry] = []
    offset = start
    try:
        while offset < end:
            for message in await log.read(reader, timeout_s=5.0):
                offset = message.offset + 1
                if isinstance(message.value, Fence | Batch | Skip | Rollback):
                    records.append(message.value)
                elif message.error is not None:
                    raise message.error
    finally:
        await reader.close()
    entries, highest = effective(records, lease.run, token)
    if highest > lease.token:
        raise FencedOut(f"run {lease.run!r}: this trainer holds token {lease.token}, token {highest} has taken over")
    return Journal(entries=tuple(entries), next_offset=offset, token=highest)


def pending_batches(entries: Iterable[Entry], after_step: int) -> list[Batch]:
    """Batches to execute again on a state that ends at `after_step`: journaled later and not rolled back since."""
    batches: dict[int, Batch] = {}
    for entry in entries:
        if isinstance(entry, Batch) and entry.step > after_step:
            batches.setdefault(entry.step, entry)
        elif isinstance(entry, Rollback):
            for step in range(entry.from_step, entry.to_step + 1):
                batches.pop(step, None)
    return [batches[step] for step in sorted(batches)]


async def append(log: Log, record: Entry) -> int:
    """Write one record; returns the journal offset after it, once confirmed."""
    return (await log.publish(topics.BATCHES, record)).offset + 1
