"""What key a record has, and key to partition as Kafka's Java client does it, so that every client agrees where it lives."""

import struct

from schemas import Block, Control, DeadLetter, Feedback, Received, Task, Tick
from schemas.ids import group_of, partition_key
from schemas.topics import Topic

SEED = 0x9747B28C
MULTIPLIER = 0x5BD1E995
MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bits unsigned (org.apache.kafka.common.utils.Utils.murmur2)."""
    length = len(data)
    value = SEED ^ length
    whole = length & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        word = word * MULTIPLIER & MASK
        word ^= word >> 24
        value = (value * MULTIPLIER & MASK) ^ (word * MULTIPLIER & MASK)
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * MULTIPLIER & MASK
    value ^= value >> 13
    value = value * MULTIPLIER & MASK
    return value ^ value >> 15


def partition_for(key: bytes, num_partitions: int) -> int:
    """Partition of `key` among `num_partitions`."""
    if num_partitions == 1:
        return 0
    return (murmur2(key) & 0x7FFFFFFF) % num_partitions


def key_of(topic: Topic, record: Control | Block) -> bytes:
    """The key of a record in a topic: what must stay in order with it. One-partition topics need none to be right."""
    if isinstance(record, DeadLetter):
        return record.key
    if isinstance(record, Tick):
        return str(record.partition).encode()
    if isinstance(record, Feedback):
        return partition_key(group_of(record.ref)).encode()
    if isinstance(record, Received):
        return (
            partition_key(group_of(record.ref)) if record.ref else record.path
        ).encode()  # a webhook's events stay in order
    if isinstance(record, Task) and topic.key == "group":
        if record.issued is None:
            raise ValueError(f"task {record.id}: {topic.name} holds issued tasks, and this one is not")
        return record.issued.group.encode()
    if isinstance(record, Task):
        return record.id.encode()
    if (group := getattr(record, "group", None)) is not None:
        return partition_key(str(group)).encode()
    for name in ("run", "policy", "instance"):
        if (key := getattr(record, name, None)) is not None:
            return str(key).encode()
    return topic.key.encode()
