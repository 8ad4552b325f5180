"""normalize_advantages: advantages of a batch to mean 0 and variance 1, lane by lane, over all that is trained together."""

import math
from collections.abc import Sequence

import msgspec

from infra.chain.processor import processor
from schemas import Experience


@processor(version=2, of="batch", inline=True)
def normalize_advantages(
    batch: tuple[Experience, ...], *, center: bool = True, epsilon: float = 1e-8
) -> tuple[Experience, ...]:
    """(A - mean) / (std + epsilon) over the members of a lane that have an advantage; the others pass. REINFORCE++,
    arXiv 2501.03262. A lane's advantages are of its own kind (a task's group, a person's rating): others do not scale them.

    Each sequence counts once, however long; by how much its turns differ from it is not scaled. Fewer
    than two, or all alike, pass unchanged. center: whether the mean is taken off. epsilon: keeps a tiny std from dividing.
    """
    values: dict[str, list[float]] = {}
    for one in batch:
        if one.advantage is not None:
            values.setdefault(one.lane, []).append(one.advantage)
    moments = {lane: _moments(of_lane) for lane, of_lane in values.items() if max(of_lane) > min(of_lane)}
    return tuple(
        one
        if one.advantage is None or one.lane not in moments
        else _scaled(one, one.advantage, *moments[one.lane], center, epsilon)
        for one in batch
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _scaled(
    one: Experience, advantage: float, mean: float, deviation: float, center: bool, epsilon: float
) -> Experience:
    shift = mean if center else 0.0
    return msgspec.structs.replace(one, advantage=(advantage - shift) / (deviation + epsilon))
