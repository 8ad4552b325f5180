"""Dead letters: records that cannot be processed, with where they lay and why."""

from infra.log.bus import Record
from schemas import DeadLetter
from schemas.records import MAX_LETTER_BYTES


def letter_of(record: Record, *, stage: str, reason: str, error: str = "") -> DeadLetter:
    """Of a record of our own topics. reason: a short constant phrase. error: the message that names the field."""
    place = record.topic.partition(".")[2], record.partition, record.offset
    return letter_at(place, stage=stage, reason=reason, error=error, value=record.value, key=record.key)


def letter_at(
    place: tuple[str, int, int], *, stage: str, reason: str, error: str = "", value: bytes = b"", key: bytes = b""
) -> DeadLetter:
    """place: topic, partition and offset. value: as much of it as a letter holds is kept."""
    topic, partition, offset = place
    return DeadLetter(
        topic=topic,
        partition=partition,
        offset=offset,
        stage=stage,
        reason=reason,
        error=error,
        value=value[:MAX_LETTER_BYTES],
        key=key,
    )
