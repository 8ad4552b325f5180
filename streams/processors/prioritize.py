"""prioritize: how eagerly the trainer should draw a group, where it draws by priority."""

import math

import msgspec

from infra.chain.processor import processor
from schemas import Experience
from streams.processors.episodes import is_judged, rewards_of

MIN_PRIORITY = 0.1


@processor(version=1, of="group", inline=True)
def prioritize(group: tuple[Experience, ...], *, min_priority: float = MIN_PRIORITY) -> tuple[Experience, ...]:
    """Priority from the spread of the group's rewards: 1 for half right and half wrong, `min_priority` for all alike.

    2·std of rewards in [0, 1], cut to [min_priority, 1]; a lone answer takes its |advantage| cut alike. Whole groups
    are drawn, so all judged members get the same.
    """
    rewards = list(rewards_of(group).values())
    if len(rewards) >= 2:
        mean = math.fsum(rewards) / len(rewards)
        spread = 2 * math.sqrt(math.fsum((value - mean) ** 2 for value in rewards) / len(rewards))
    else:
        spread = max((abs(member.advantage or 0.0) for member in group), default=0.0)
    priority = min(1.0, max(min_priority, spread))
    return tuple(msgspec.structs.replace(m, priority=priority) if is_judged(m) else m for m in group)
