"""advantage: how much better an episode did than its group, or, alone, than answers like it did lately.

Sources: group mean and std is GRPO's (arXiv 2402.03300, section 4.1.2), the mean alone Dr. GRPO's (arXiv 2503.20783,
section 3.2), leave-one-out RLOO's (arXiv 2402.14740); of lone answers see `streams.processors.baseline`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience
from streams.processors.baseline import MEMORY, compared
from streams.processors.episodes import is_lone, rewards_of
from streams.processors.turns import with_turns

AdvantageKind = Literal["group", "mean", "leave_one_out"]


@processor(version=2, of="group", memory=MEMORY, inline=True)
def advantage(
    group: tuple[Experience, ...],
    *,
    memory: Memory,
    kind: AdvantageKind,
    epsilon: float,
    turns: str,
) -> tuple[Experience, ...]:
    """Advantage of each episode, given to all its parts; demonstrations and members without a reward pass unchanged.

    kind: "mean" divides nothing by a spread. A lone answer, and the only one of several choices of production that was
    rated, is compared with the running baseline of its tenant and origin, and then joins it; the first of its kind has
    nothing to be compared with and gets 0. turns: a score given turn by turn, by which the turns of a group have advantages of
    their own (`streams.processors.turns`).
    """
    rewards = rewards_of(group)
    values = list(rewards.values())
    if is_lone(group, rewards):
        key = f"{group[0].tenant}\x00{group[0].origin}"
        each = [compared(memory, key, group[0].group, value, scaled=kind != "mean") for value in values]
    elif kind == "leave_one_out":
        each = leave_one_out(values)
    else:
        each = group_normalized(values, epsilon) if kind == "group" else less_the_mean(values)
    advantages = dict(zip(rewards, each, strict=True))
    own = with_turns(group, turns, epsilon, scaled=kind == "group") if turns and not is_lone(group, rewards) else {}
    return tuple(own.get(member.id) or _with_advantage(member, advantages) for member in group)


def group_normalized(rewards: Sequence[float], epsilon: float) -> list[float]:
    """(r - mean) / (std + epsilon), std over the whole group (divided by n)."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in rewards) / len(rewards))
    return [(value - mean) / (std + epsilon) for value in rewards]


def less_the_mean(rewards: Sequence[float]) -> list[float]:
    """r - mean: without the division, a question that is nearly always or nearly never answered right weighs no more."""
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [value - mean for value in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the others; 0 where there are none."""
    if len(rewards) < 2:
        return [0.0 for _ in rewards]
    total = math.fsum(rewards)
    return [value - (total - value) / (len(rewards) - 1) for value in rewards]


def _with_advantage(member: Experience, advantages: Mapping[int, float]) -> Experience:
    value = advantages.get(member.episode)
    if value is None or member.is_given:
        return member
    return msgspec.structs.replace(member, advantage=value)
