"""normalize_advantages: advantages of a batch to mean 0 and variance 1, over all that will be trained together."""

import math

import msgspec

from infra.processor import processor
from schemas import Experience


@processor(version=1, inline=True)
def normalize_advantages(
    batch: tuple[Experience, ...], *, center: bool = True, epsilon: float = 1e-8
) -> tuple[Experience, ...]:
    """(A - mean) / (std + epsilon) over the members that have an advantage; the others pass. REINFORCE++, arXiv 2501.03262.

    Each sequence counts once, however long. center false leaves the mean. Fewer than two, or all alike, pass unchanged.
    """
    values = [one.advantage for one in batch if one.advantage is not None]
    if len(values) < 2 or max(values) == min(values):
        return batch
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) + epsilon
    shift = mean if center else 0.0
    return tuple(
        one if one.advantage is None else msgspec.structs.replace(one, advantage=(one.advantage - shift) / deviation)
        for one in batch
    )
