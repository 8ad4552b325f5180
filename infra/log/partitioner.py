"""Key to partition as Kafka's Java client does it, so that every client and MemoryBus agree where a record lives."""

import struct

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
