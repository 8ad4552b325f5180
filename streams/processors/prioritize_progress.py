"""progress: tasks whose reward is moving are drawn more. Place it behind `prioritize`, whose priority it multiplies."""

import math

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience
from schemas.ids import task_of
from streams.processors.episodes import is_judged, rewards_of
from streams.processors.prioritize import MIN_PRIORITY

REMEMBERED = 262_144


@processor(version=1, of="group", memory=REMEMBERED)
def progress(
    group: tuple[Experience, ...],
    *,
    memory: Memory,
    fast: float = 0.5,
    slow: float = 0.1,
    full: float = 0.25,
    min_factor: float = MIN_PRIORITY,
) -> tuple[Experience, ...]:
    """Priority times expected learning progress: how far the task's reward has lately moved, up or down.

    |fast − slow| moving average of the mean reward of the task's groups, the slope that Matiisen et al. (arXiv
    1707.00183, section 3) choose tasks by; `full` of it and more is 1, nothing is `min_factor`. A task's first group is 1:
    nothing is known of it. What was forgotten counts too. Followed on this partition; a later revision moves nothing.

    fast, slow: weight of a new group's mean in that average, 0 to 1. full: difference of the two averages
    from which the factor is 1. min_factor: the smallest factor.
    """
    rewards = rewards_of(group).values()
    if not rewards:
        return group
    mean = math.fsum(rewards) / len(rewards)
    task = task_of(group[0].group)
    known = memory.get(task)
    if isinstance(known, list):
        quick, slack = float(known[0]), float(known[1])
        if group[0].revision == 0:
            quick, slack = quick + fast * (mean - quick), slack + slow * (mean - slack)
        factor = min(1.0, max(min_factor, abs(quick - slack) / full))
    else:
        quick, slack, factor = mean, mean, 1.0
    memory.set(task, [quick, slack])
    return tuple(msgspec.structs.replace(m, priority=m.priority * factor) if is_judged(m) else m for m in group)
