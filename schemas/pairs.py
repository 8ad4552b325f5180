"""Preference pairs: two answers to one prompt in one group, one marked as chosen, the other as rejected.

The marks lie in `meta`, so a pair is a block like any other: it is complete when both sides are there, drawn whole, and
readers that know nothing of pairs see two experiences. A pair is taken as it is given: nobody scores it.
"""

from collections.abc import Sequence

import numpy as np

from schemas.experience import CHOSEN, PAIR, REJECTED, Experience


def pair_side(experience: Experience) -> str:
    """CHOSEN, REJECTED, or "" for what is no side of a pair."""
    side = experience.meta.get(PAIR)
    return side if isinstance(side, str) and side in (CHOSEN, REJECTED) else ""


def pair_fault(experiences: Sequence[Experience]) -> str:
    """Why these members of a group are no pair that could be learned from, "" if they are one, or none is marked."""
    sides = sorted(pair_side(one) for one in experiences)
    if not any(sides):
        return ""
    if sides != [CHOSEN, REJECTED]:
        return "half a pair"
    one, other = experiences
    num_prompt = one.num_prompt
    if num_prompt != other.num_prompt or not np.array_equal(one.tokens[:num_prompt], other.tokens[:num_prompt]):
        return "pair with different prompts"
    if np.array_equal(one.tokens[num_prompt:], other.tokens[num_prompt:]):
        return "pair with equal sides"
    return ""
