"""The draw without an issue order: whole groups, least used first, in an order that the seed alone decides. Pure."""

import hashlib

import numpy as np

from trainer.buffer.draw import Draw
from trainer.buffer.draw_share import NO_LIMITS, ShareLimits, filled_from, room_of
from trainer.buffer.pool import Pool, lowest


def draw_spread(pool: Pool, *, num_experiences: int, max_uses: int, seed: int, limits: ShareLimits = NO_LIMITS) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing."""
    usable = pool.chosen(pool.column("uses") < max_uses)
    if not len(usable):
        return Draw(wait=True)
    room = room_of(usable, num_experiences, limits)
    first, filled = filled_from(usable, lambda num: _least_used(usable, seed, num), room)
    order = usable.chosen(first)
    return Draw(taken=tuple(order[place] for place in filled.taken), held_back=filled.held_back)


def _least_used(pool: Pool, seed: int, num: int) -> np.ndarray:
    """Places of at least `num` groups, or all: the least used first, of those used as often in the seed's order."""
    uses_N, mixed_N = pool.column("uses"), shuffled(seed, pool.column("offset"))
    found: list[np.ndarray] = []
    for uses in np.unique(uses_N).tolist():
        members = np.flatnonzero(uses_N == uses)
        found.append(members[lowest(mixed_N[members], num)])
        num -= len(found[-1])
        if num <= 0:
            break
    return np.concatenate(found)


def shuffled(seed: int, offset_N: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each offset, whatever other offsets there are: no two of a seed have the same. [N], uint64.

    The output of SplitMix64 at this place of the seed's sequence (Steele, Lea and Flood, OOPSLA 2014, figure 15).
    """
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest())
    mixed_N = np.uint64(start) + offset_N * np.uint64(0x9E3779B97F4A7C15)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))
