"""dedupe: a redelivered experience passes once per partition, as far as its memory reaches."""

from infra.chain.processor import Drop, Memory, processor
from schemas import Experience

DUPLICATE = "duplicate"


def dedupe_key(experience: Experience) -> str:
    """What is remembered of an experience; set it to -1 for those found behind this stage when memory is rebuilt."""
    return f"{experience.id}/{experience.revision}" if experience.revision else experience.id


@processor(version=1, memory=65_536, inline=True)
def dedupe(experience: Experience, *, memory: Memory, record_offset: int) -> Experience | Drop:
    """Drop what came before in another record; the same record again (a retry) is not a duplicate of itself.

    A duplicate needs no drop marker: its first delivery has completed its place in the group.
    """
    key = dedupe_key(experience)
    if key not in memory:
        memory.set(key, record_offset)
        return experience
    if record_offset >= 0 and memory.get(key) == record_offset:
        return experience
    return Drop(DUPLICATE, f"{experience.id} came before")
