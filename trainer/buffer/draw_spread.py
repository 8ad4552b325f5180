"""The draw without an issue order: whole groups, least used first, in an order that the seed alone decides. Pure."""

import hashlib
from collections.abc import Sequence

from trainer.buffer.draw import Candidate, Draw
from trainer.buffer.draw_share import NO_LIMITS, ShareLimits, fill


def draw_spread(
    candidates: Sequence[Candidate], *, num_experiences: int, max_uses: int, seed: int, limits: ShareLimits = NO_LIMITS
) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing."""
    usable = [one for one in candidates if one.uses < max_uses]
    if not usable:
        return Draw(wait=True)
    usable.sort(key=lambda one: (one.uses, _shuffled(seed, one.offset)))
    filled = fill(usable, num_experiences, limits)
    return Draw(taken=tuple(usable[place] for place in filled.taken), held_back=filled.held_back)


def _shuffled(seed: int, offset: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{offset}".encode(), digest_size=8).digest()
