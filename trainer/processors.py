"""Built-in processors of stage batch: functions of all experiences that one step draws."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from infra.chain.processor import Drop, processor
from schemas import Experience


def with_weight(experience: Experience, weight: float) -> Experience:
    """The experience with another weight. Raises ValueError for one that is not finite or below 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight: got {weight}, expected a finite number of 0 or more")
    return msgspec.structs.replace(experience, weight=float(weight))


def without_weight(experience: Experience) -> Experience:
    """The experience without a weight: one that came with it from the log does not count."""
    return experience if experience.weight == 1.0 else msgspec.structs.replace(experience, weight=1.0)


@processor(version=2, of="batch", inline=True)
def drop_weak(
    batch: tuple[Experience, ...], *, below: float = 1e-6, mean: Literal["tokens", "sequences"] = "tokens"
) -> tuple[Experience | Drop, ...]:
    """Drop an experience whose advantages, also those of its turns, are smaller than `below` in size; one without passes.

    What is left of a lane weighs less by as much as was dropped, so that each of its tokens adds what it would have added to
    the whole. below: size of an advantage; the default drops what is 0 but for rounding. mean: items that the lanes' losses are
    means over (sequences for gspo, topr and opmd). What a loss adds whatever the advantage (its pull to μ, the lane's kl and
    entropy) is lost with what is dropped.
    """
    gone = [
        experience.advantage is not None
        and max(abs(experience.advantage), *(abs(turn.advantage) for turn in experience.advantages), 0) < below
        for experience in batch
    ]
    sizes = [experience.num_sampled if mean == "tokens" else 1 for experience in batch]
    before, after = Counter[str](), Counter[str]()
    for experience, size, weak in zip(batch, sizes, gone, strict=True):
        before[experience.lane] += size
        after[experience.lane] += 0 if weak else size
    return tuple(
        Drop("weak advantage", f"{experience.advantage:g}, expected at least {below:g} in size")
        if weak
        else experience
        if after[experience.lane] == before[experience.lane]
        else with_weight(experience, experience.weight * after[experience.lane] / before[experience.lane])
        for experience, weak in zip(batch, gone, strict=True)
    )


@processor(version=1, of="batch", inline=True)
def equal_sequences(batch: tuple[Experience, ...]) -> tuple[Experience, ...]:
    """Weight = mean length of its lane / own length, in sampled tokens: a lane's weighted mean over tokens is then the
    mean over its sequences of their token means (arXiv 2402.03300 eq. 3; where DAPO's, 2503.14476, is the unweighted).
    """
    lengths: dict[str, list[int]] = {}
    for experience in batch:
        lengths.setdefault(experience.lane, []).append(experience.num_sampled)
    mean = {lane: sum(of_lane) / len(of_lane) for lane, of_lane in lengths.items()}
    return tuple(with_weight(experience, mean[experience.lane] / experience.num_sampled) for experience in batch)


@processor(version=2, of="batch", inline=True)
def normalize_advantages(
    batch: tuple[Experience, ...], *, center: bool = True, epsilon: float = 1e-8
) -> tuple[Experience, ...]:
    """(A - mean) / (std + epsilon) over the members of a lane that have an advantage; the others pass. REINFORCE++,
    arXiv 2501.03262. A lane's advantages are of its own kind (a task's group, a person's rating): others do not scale them.

    Each sequence counts once, however long; by how much its turns differ from it is not scaled. Fewer than two, or all alike,
    pass unchanged. center: whether the processor subtracts the mean. epsilon: keeps a tiny std from dividing.
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
    """Mean and standard deviation."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _scaled(
    experience: Experience, advantage: float, mean: float, deviation: float, center: bool, epsilon: float
) -> Experience:
    shift = mean if center else 0.0
    return msgspec.structs.replace(experience, advantage=(advantage - shift) / (deviation + epsilon))
