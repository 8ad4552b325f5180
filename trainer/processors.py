"""Built-in processors of stage batch: functions of all experiences of a step."""

import math
from collections.abc import Sequence

import msgspec

from infra.chain.processor import processor
from schemas import Experience


def with_weight(experience: Experience, weight: float) -> Experience:
    """Return the experience with another weight. Raises ValueError for a weight that is not finite or below 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight: got {weight}, expected a finite number of 0 or more")
    return msgspec.structs.replace(experience, weight=float(weight))


def without_weight(experience: Experience) -> Experience:
    """The experience without a weight: one that came with it from the log does not count."""
    return experience if experience.weight == 1.0 else msgspec.structs.replace(experience, weight=1.0)


@processor(version=2, of="batch", inline=True)
def normalize_advantages(
    batch: tuple[Experience, ...], *, center: bool = True, epsilon: float = 1e-8
) -> tuple[Experience, ...]:
    """Replace advantages by (A - mean) / (std + epsilon) within each lane (REINFORCE++, arXiv 2501.03262). Members without an
    advantage pass.

    Each sequence counts once, however long; differences between its turns are not scaled. Fewer than two advantages, or equal
    advantages, pass unchanged.

    center: Whether the processor subtracts the mean. epsilon: Constant added to the standard deviation.
    """
    values: dict[str, list[float]] = {}
    for experience in batch:
        if experience.advantage is not None:
            values.setdefault(experience.lane, []).append(experience.advantage)
    moments = {lane: _moments(of_lane) for lane, of_lane in values.items() if max(of_lane) > min(of_lane)}
    return tuple(
        experience
        if experience.advantage is None or experience.lane not in moments
        else _scaled(experience, experience.advantage, *moments[experience.lane], center, epsilon)
        for experience in batch
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _scaled(
    experience: Experience, advantage: float, mean: float, deviation: float, center: bool, epsilon: float
) -> Experience:
    shift = mean if center else 0.0
    return msgspec.structs.replace(experience, advantage=(advantage - shift) / (deviation + epsilon))
