"""Preference pairs: two answers to one prompt in one group, one the chosen, the other the rejected side.

A pair is a block like any other: it is complete when both sides are there, and drawn whole. It is taken as it is given:
no score runs on it.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from schemas.experience import Experience

Side = Literal["chosen", "rejected"]
CHOSEN: Side = "chosen"
REJECTED: Side = "rejected"


def pair_side(experience: Experience) -> Side | None:
    """CHOSEN, REJECTED, or None where it is not a side of a pair."""
    kind = experience.kind
    return kind if kind in (CHOSEN, REJECTED) else None


def pair_fault(experiences: Sequence[Experience]) -> str:
    """Why these members of a group are no pair that could be learned from, "" if they are one, or none is a side."""
    sides = sorted(pair_side(one) or "" for one in experiences)
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
