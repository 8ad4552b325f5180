"""The weight a batch processor gives an experience: it multiplies its loss terms, and is written into the journal."""

import math

import msgspec

from schemas import Experience

KEY = "batch.weight"  # in meta, within the batch chain alone: what came so from the log is taken off before


def with_weight(experience: Experience, weight: float) -> Experience:
    """The experience with another weight. Raises ValueError for one that is not finite or below 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight: got {weight}, expected a finite number of 0 or more")
    return msgspec.structs.replace(experience, meta={**experience.meta, KEY: float(weight)})


def weight_of(experience: Experience) -> float:
    """Its weight, 1 where nobody gave one; not a number where what lies there is none."""
    value = experience.meta.get(KEY, 1.0)
    is_number = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def without_weight(experience: Experience) -> Experience:
    """The experience as it came from the log, without such a key."""
    if KEY not in experience.meta:
        return experience
    meta = {name: value for name, value in experience.meta.items() if name != KEY}
    return msgspec.structs.replace(experience, meta=meta)
