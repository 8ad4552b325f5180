"""Curriculum: which task the next group runs. Pure: the same seed, sequence and record of success choose the same task.

uniform        every task alike
easy_to_hard   from the easiest tenth at first to all tasks after `ramp_groups`
success        in proportion to 1 − success rate, so that what is solved comes back rarely, but does come back
"""

import math
from collections.abc import Callable
from random import Random

from actors.config import CurriculumKind

FLOOR = 0.05  # weight of a task that always succeeds: forgetting must be noticed
FIRST_SHARE = 0.1
SMOOTHING = 0.3
_MAX_TRIES = 256


def choose(
    kind: CurriculumKind,
    *,
    num_tasks: int,
    success: Callable[[int], float | None],
    seed: int,
    sequence: int,
    ramp_groups: int,
) -> int:
    """Index of the task for the group of this `sequence`; tasks are ordered from easy to hard.

    success: success rate of the task at an index, None while it has none (it counts as 0). Raises ValueError without
    tasks.
    """
    if num_tasks < 1:
        raise ValueError("num_tasks: got 0, expected at least one task to choose from")
    random = Random(f"{seed}/{sequence}")
    if kind == "easy_to_hard":
        return random.randrange(easy_pool(num_tasks, sequence=sequence, ramp_groups=ramp_groups))
    index = random.randrange(num_tasks)
    if kind == "success":
        for _ in range(_MAX_TRIES):
            if random.random() < weight(success(index)):
                break
            index = random.randrange(num_tasks)
    return index


def weight(success_rate: float | None) -> float:
    """Relative frequency of a task under `success`, in FLOOR to 1."""
    return max(FLOOR, 1.0 - (success_rate or 0.0))


def easy_pool(num_tasks: int, *, sequence: int, ramp_groups: int) -> int:
    """How many of the easiest tasks `easy_to_hard` draws from."""
    share = FIRST_SHARE + (1.0 - FIRST_SHARE) * min(1.0, sequence / ramp_groups)
    return min(num_tasks, max(1, math.ceil(num_tasks * share)))


def smoothed(success_rate: float | None, mean_reward: float) -> float:
    """Success rate after one more group; rewards outside 0 to 1 are cut to it."""
    value = min(1.0, max(0.0, mean_reward))
    return value if success_rate is None else success_rate + SMOOTHING * (value - success_rate)
