"""The weight a batch processor gives an experience: it multiplies its loss terms, and is written into the journal."""

import math

import msgspec

from schemas import Experience


def with_weight(experience: Experience, weight: float) -> Experience:
    """The experience with another weight. Raises ValueError for one that is not finite or below 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight: got {weight}, expected a finite number of 0 or more")
    return msgspec.structs.replace(experience, weight=float(weight))


def without_weight(experience: Experience) -> Experience:
    """The experience without a weight: one that came with it from the log does not count."""
    return experience if experience.weight == 1.0 else msgspec.structs.replace(experience, weight=1.0)
