"""What a record says of where it lies: rows of the index (`infra.ledger.index`), by topic."""

from collections.abc import Iterable

import xxhash

from infra.log.bus import Record
from schemas import Drawn, topics
from schemas.ids import session_of
from schemas.topics import Topic

# Their header or their key is the group, so that no record has to be opened.
KEYED = (topics.EXPERIENCES, topics.EXPERTS, topics.VERIFIED, topics.BUFFER, topics.PROGRESS)


def number(group: str) -> int:
    """A group as 63 bits: an index of a million groups stays small, and what is read back is checked by name."""
    return xxhash.xxh3_64_intdigest(group.encode()) >> 1


def places_of(topic: Topic, records: Iterable[Record]) -> list[tuple[int, str, int, int, int]]:
    """Rows of records about a group, as their header says or else their key; a role's own reports are left out."""
    rows = []
    for record in records:
        headers = dict(record.headers)
        if topic != topics.PROGRESS or headers.get("kind") == b"closure":
            about = headers.get("group", record.key).decode(errors="replace")
            rows.append((number(about), topic.name, record.partition, record.offset, record.timestamp_ms))
    return rows


def is_opened(topic: Topic, record: Record) -> bool:
    """Whether a record says by what it holds, and not by its headers and key alone, what it is about."""
    return topic not in KEYED or (topic is topics.PROGRESS and dict(record.headers).get("kind") == b"drawn")


def given_up_in(
    topic: Topic, records: Iterable[Record], values: Iterable[object]
) -> list[tuple[int, str, int, int, int]]:
    """Rows of the groups that the trainer says it will never train, by what records of any topic hold."""
    return [
        (number(group), topic.name, record.partition, record.offset, record.timestamp_ms)
        for record, value in zip(records, values, strict=True)
        if isinstance(value, Drawn)
        for group in value.dropped
    ]


def keys_of(records: Iterable[Record]) -> list[tuple[str, int, str]]:
    """Key id, group and its session ("" for none) of sealed records, as their Kafka headers tell."""
    headers = [dict(record.headers) for record in records]
    pairs = [(one["key"], one["group"].decode(errors="replace")) for one in headers if "key" in one and "group" in one]
    return [(key.decode(errors="replace"), number(group), session_of(group)) for key, group in pairs]
