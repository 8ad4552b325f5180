"""recency: what older policies sampled is drawn less. Place it behind `prioritize`, whose priority it multiplies."""

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience
from streams.processors.episodes import is_judged
from streams.processors.prioritize import MIN_PRIORITY

NEWEST = "newest version"


@processor(version=1, of="group", memory=1)
def recency(
    group: tuple[Experience, ...], *, memory: Memory, half_life: float = 4.0, min_factor: float = MIN_PRIORITY
) -> tuple[Experience, ...]:
    """Priority times 2^(−age / half_life), at least `min_factor`. age: versions from the group's oldest sampled token to
    the newest that this partition has seen. half_life: versions after which the factor is half. min_factor: the smallest
    factor.
    """
    versions = [span.version for member in group if is_judged(member) for span in member.spans]
    if not versions:
        return group
    before = memory.get(NEWEST, -1)
    assert isinstance(before, int)
    newest = max(before, *versions)
    memory.set(NEWEST, newest)
    factor = max(min_factor, 2.0 ** (-(newest - min(versions)) / half_life))
    return tuple(msgspec.structs.replace(m, priority=m.priority * factor) if is_judged(m) else m for m in group)
