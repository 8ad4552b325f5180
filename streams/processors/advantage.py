"""advantage: how much better an episode did than its group, or, alone, than answers like it did lately.

Sources: group mean and std is GRPO's (arXiv 2402.03300, section 4.1.2), leave-one-out RLOO's (arXiv 2402.14740).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.processor import Memory, processor
from schemas import Experience
from streams.processors.episodes import rewards_of

BASELINE_WINDOW = 256  # answers a running baseline averages over, roughly
MAX_BASELINES = 4096
AdvantageKind = Literal["group", "leave_one_out"]


@processor(version=1, memory=MAX_BASELINES)
def advantage(
    group: tuple[Experience, ...], *, memory: Memory, kind: AdvantageKind = "group", epsilon: float = 1e-4
) -> tuple[Experience, ...]:
    """Advantage of each episode, given to all its parts; demonstrations and members without a reward pass unchanged.

    A lone answer (group_size 1) is compared with the running baseline of its tenant and origin, and then joins it; the
    first of its kind has nothing to be compared with and gets 0.
    """
    rewards = rewards_of(group)
    if group[0].group_size == 1:
        key = f"{group[0].tenant}\x00{group[0].origin}"
        advantages = {episode: from_baseline(memory, key, value, epsilon) for episode, value in rewards.items()}
    else:
        values = list(rewards.values())
        each = group_normalized(values, epsilon) if kind == "group" else leave_one_out(values)
        advantages = dict(zip(rewards, each, strict=True))
    return tuple(_with_advantage(member, advantages) for member in group)


def group_normalized(rewards: Sequence[float], epsilon: float) -> list[float]:
    """(r - mean) / (std + epsilon), std over the whole group (divided by n)."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in rewards) / len(rewards))
    return [(value - mean) / (std + epsilon) for value in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the others; 0 where there are none."""
    if len(rewards) < 2:
        return [0.0 for _ in rewards]
    total = math.fsum(rewards)
    return [value - (total - value) / (len(rewards) - 1) for value in rewards]


def from_baseline(memory: Memory, key: str, reward: float, epsilon: float) -> float:
    """(r - mean) / (std + epsilon) of what `memory` saw under `key` before; then r joins it.

    The mean is exact over the first 256 and exponential after.
    """
    known = memory.get(key)
    count, mean, variance = known if isinstance(known, list) else (0, 0.0, 0.0)
    count, mean, variance = int(count), float(mean), float(variance)
    result = 0.0 if count == 0 else (reward - mean) / (math.sqrt(variance) + epsilon) if variance else reward - mean
    share = 1.0 / min(count + 1, BASELINE_WINDOW)
    moved = mean + share * (reward - mean)
    variance = (1.0 - share) * (variance + share * (reward - mean) ** 2)
    memory.set(key, [min(count + 1, BASELINE_WINDOW), moved, variance])
    return result


def _with_advantage(member: Experience, advantages: Mapping[int, float]) -> Experience:
    value = advantages.get(member.episode)
    if value is None or member.is_given:
        return member
    return msgspec.structs.replace(member, advantage=value)
