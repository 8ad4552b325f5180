"""`audit`: reads the kept log and accounts for every published experience. Safe while everything runs.

The topics are read downstream first, so that what moved on meanwhile shows as pending, never as lost. Where the journal was
trimmed, what was published before the first record that is kept is left out: what became of it was written there.
"""

import asyncio
import errno
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from pathlib import Path

import msgspec

from infra.ledger.account import Account, Ledger, account_of, together
from infra.ledger.facts import Fact, FactReader, group_of_fact
from infra.ledger.spool import ScratchSpool
from infra.log.log import Log, LogMessage
from schemas import topics
from schemas.errors import ConfigError
from schemas.ids import partition_key
from schemas.topics import Topic

# Downstream first: an id that is read here was published before.
ORDER = (
    topics.BATCHES, topics.PROGRESS, topics.BUFFER, topics.DEAD_LETTERS, topics.VERIFIED, topics.EXPERIENCES, topics.EXPERTS,
)  # fmt: skip
PUBLISHED = (topics.EXPERIENCES, topics.EXPERTS)
SAMPLED = 500  # records of a topic
MANY = 100_000  # records of a log that is worth a look at what it needs


class DiskSpace(msgspec.Struct, frozen=True):
    """What an audit takes of a disk while it runs, about, and where; see TMPDIR.

    folder: for temporary files. needed, free: in bytes.

    Example: DiskSpace(folder=Path("/tmp"), needed=1_200_000_000, free=73_000_000_000)
    """

    folder: Path
    needed: int
    free: int

    def __str__(self) -> str:
        return f"{self.folder} ({self.needed / 1e9:.1f} GB, {self.free / 1e9:.1f} GB is free)"


OnReading = Callable[[str, int], None]
"""A topic, and how many of its records are left to read; "" at the end, and how many parts are left to add up."""


async def audit(
    log: Log,
    run: str,
    on_reading: OnReading = lambda topic, left: None,
    on_room: Callable[[DiskSpace], None] = lambda room: None,
    *,
    many: int = MANY,
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Account:
    """The account of the kept log. on_room: called before a log of at least `many` records is read.

    Raises ConfigError where the folder for temporary files has too little room.
    """
    folder = Path(tempfile.gettempdir())
    records = [sum(await _left(log, topic)) for topic in ORDER]
    if sum(records) >= many:
        sizes = [await _bytes_each(log, run, topic) for topic in ORDER]
        needed = round(sum(size * count for size, count in zip(sizes, records, strict=True)))
        room = DiskSpace(folder, needed, free(folder))
        if room.needed > room.free:
            raise ConfigError(f"TMPDIR: the disk is too small for an audit in {room}; set it to a folder with more")
        on_room(room)
    begins = await log.bus.beginning_offsets(log.name(topics.BUFFER))
    with closing(Ledger(run, buffer_begins=min(begins.values()))) as ledger:
        try:
            for topic in ORDER:
                # Asked behind the journal's reading: what was trimmed meanwhile is left out, too.
                since_ms = await _journal_begin_ms(log) if topic in PUBLISHED else 0
                async for message in _messages(log, topic, on_reading):
                    if message.timestamp_ms >= since_ms:
                        ledger.fold(topic.name, message)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(f"TMPDIR: {folder} is full; set it to a folder with more room") from error
        return await _added_up(ledger, on_reading)


async def _journal_begin_ms(log: Log) -> int:
    """When the first kept record of a journal was written that was trimmed; 0 where all of it is kept."""
    begin = (await log.bounds(topics.BATCHES))[0][0]
    found = await log.at(topics.BATCHES, 0, [begin]) if begin else {}
    return found[begin].timestamp_ms if found else 0


async def _messages(log: Log, topic: Topic, on_reading: OnReading) -> AsyncIterator[LogMessage]:
    begins, ends = await log.bounds(topic)
    following = dict(begins)
    on_reading(topic.name, sum(ends.values()) - sum(following.values()))
    async with aclosing(log.chunks(topic, stops=ends)) as chunks:
        async for records in chunks:
            for record in records:
                yield await log.decoded(record)
            following |= {record.partition: record.offset + 1 for record in records}
            on_reading(topic.name, sum(ends.values()) - sum(following.values()))


async def _added_up(ledger: Ledger, on_reading: OnReading) -> Account:
    total, left = account_of((), lambda step: ""), ledger.spool.num_parts
    for part in ledger.parts():
        total, left = together(total, part), left - 1
        on_reading("", left)
        await asyncio.sleep(0)  # an interruption comes through here
    return total


async def _left(log: Log, topic: Topic) -> list[int]:
    begins, ends = await log.bounds(topic)
    return [end - begins[index] for index, end in ends.items()]


async def _bytes_each(log: Log, run: str, topic: Topic) -> float:
    """What a record of the topic takes in a spool, about, by the first of them."""
    reader, facts, num = FactReader(run), list[Fact](), 0
    async with aclosing(log.chunks(topic, max_records=SAMPLED)) as chunks:
        async for records in chunks:
            for record in records:
                facts += reader.facts(topic.name, await log.decoded(record))
            num += len(records)
            if num >= SAMPLED:
                break
    if not facts:
        return 0.0
    # In a part lie those of many sessions, in no order: what is alike among neighbours is not alike there.
    apart = list({partition_key(group_of_fact(fact)): fact for fact in facts}.values())
    random.Random(0).shuffle(apart)
    with closing(ScratchSpool()) as spool:
        return len(spool.packed(apart)) / len(apart) * len(facts) / num
