"""The draw without an issue order: whole groups, least used first, in an order that the seed alone decides. Pure."""

import hashlib
from collections.abc import Sequence

import numpy as np

from trainer.buffer.draw import Candidate, Draw
from trainer.buffer.draw_share import NO_LIMITS, ShareLimits, fill_by


def draw_spread(
    candidates: Sequence[Candidate], *, num_experiences: int, max_uses: int, seed: int, limits: ShareLimits = NO_LIMITS
) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing."""
    usable = [one for one in candidates if one.uses < max_uses]
    if not usable:
        return Draw(wait=True)
    uses_N = np.fromiter((one.uses for one in usable), np.int64, len(usable))
    offset_N = np.fromiter((one.offset for one in usable), np.uint64, len(usable))
    order = np.lexsort((shuffled(seed, offset_N), uses_N)).tolist()
    filled = fill_by(order, usable, num_experiences, limits)
    return Draw(taken=tuple(usable[order[place]] for place in filled.taken), held_back=filled.held_back)


def shuffled(seed: int, offset_N: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each offset, whatever other offsets there are: no two of a seed have the same. [N], uint64.

    The output of SplitMix64 at this place of the seed's sequence (Steele, Lea and Flood, OOPSLA 2014, figure 15).
    """
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest())
    mixed_N = np.uint64(start) + offset_N * np.uint64(0x9E3779B97F4A7C15)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))
