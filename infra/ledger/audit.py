"""`audit`: reads the kept log and accounts for every published experience. Safe while everything runs.

The topics are read downstream first, so that what moved on meanwhile shows as pending, never as lost. Where the journal was
trimmed, what was published before its first kept record is left out: its fate was written in the trimmed part.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing

from infra.ledger.account import Account, Ledger
from infra.log.log import Log, LogMessage
from schemas import topics
from schemas.topics import Topic

# Downstream first: an id that is read here was published before.
ORDER = (
    topics.BATCHES, topics.PROGRESS, topics.BUFFER, topics.DEAD_LETTERS, topics.VERIFIED, topics.EXPERIENCES, topics.EXPERTS,
)  # fmt: skip
PUBLISHED = (topics.EXPERIENCES, topics.EXPERTS)

OnReading = Callable[[str, int], None]
"""A topic, and how many of its records are left to read; "" once all are read."""


async def audit(log: Log, run: str, on_reading: OnReading = lambda topic, left: None) -> Account:
    """The account of the kept log. Raises ConfigError where the disk of temporary files is full."""
    begins = await log.bus.beginning_offsets(log.name(topics.BUFFER))
    with closing(Ledger(run, buffer_begins=min(begins.values()))) as ledger:
        for topic in ORDER:
            # Read after the journal, so that what was trimmed meanwhile is left out, too.
            since_ms = await _journal_begin_ms(log) if topic in PUBLISHED else 0
            async for message in _messages(log, topic, on_reading):
                if message.timestamp_ms >= since_ms:
                    ledger.fold(topic.name, message)
        on_reading("", 0)
        return ledger.account()


async def _journal_begin_ms(log: Log) -> int:
    """Time of the first kept record of a trimmed journal; 0 where all of it is kept."""
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
