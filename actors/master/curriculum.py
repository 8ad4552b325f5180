"""Curriculum: which task the next group runs. Pure: the same seed, sequence and record of success choose the same task.

uniform        every task alike: each once in a pass over all of them, in an order of the pass's own
success        in proportion to 1 − success rate, at least `floor` and at most `cap`: what is solved comes back rarely,
               but does come back, and what is never solved does not take everything
variance       in proportion to 4 p (1 - p) of the success rate p, within the same bounds: what is solved about half of the
               time, from which a comparison teaches most (learnability of Rutherford et al., arXiv 2408.15099, section 4;
               for language models Foster and Foerster, arXiv 2502.12272); a task that was never tried counts as one half

Each of them times the task's own priority, which a processor of stage tasks may have set; 0 is never drawn. The draws of a
pass fall one into each of as many equal stretches of the summed priorities (systematic sampling, Madow 1949), so that
the tasks of a step differ as far as they can: fewer tasks said twice is less noise in its gradient.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from random import Random

from actors.config import CurriculumKind

SMOOTHING = 0.3
_MAX_TRIES = 256


def choose(
    kind: CurriculumKind,
    *,
    priorities: Sequence[float],
    success: Callable[[int], float | None],
    seed: int,
    sequence: int,
    floor: float = 0.0,
    cap: float = 1.0,
) -> int | None:
    """Index of the task for the group of this `sequence`; None where every task has priority 0.

    priorities: as `running_sum` gives them, of the tasks. success: success rate of the task at an
    index, None while it has none (see `weight` and `learnability`). Raises ValueError without tasks.
    """
    if not priorities:
        raise ValueError("priorities: got none, expected at least one task to choose from")
    random = Random(f"{seed}/{sequence}")
    num_tasks = len(priorities)
    total = priorities[-1]
    if not total:
        return None
    stretch = in_pass(num_tasks, seed=seed, sequence=sequence)
    index = _draw(priorities, (stretch + random.random()) / num_tasks * total)
    if kind in ("success", "variance"):
        weigh = weight if kind == "success" else learnability
        for _ in range(_MAX_TRIES):
            if random.random() * cap < weigh(success(index), floor=floor, cap=cap):
                break
            index = _draw(priorities, random.random() * total)
    return index


def in_pass(num: int, *, seed: int, sequence: int) -> int:
    """A number from 0 to num - 1 for this `sequence`: each comes once in the `num` sequences of a pass.

    Steps around the ring by a width that has no factor in common with `num`, so that nothing is shuffled or kept.
    """
    turn, place = divmod(sequence, num)
    random = Random(f"{seed}/pass/{turn}")
    width = random.randint(1, num)
    while math.gcd(width, num) != 1:
        width = random.randint(1, num)
    return (random.randrange(num) + place * width) % num


def running_sum(priorities: Iterable[float]) -> list[float]:
    """Priorities added up, as `choose` draws from them.

    >>> running_sum([1.0, 0.0, 2.5])
    [1.0, 1.0, 3.5]
    """
    return list(accumulate(priorities))


def weight(success_rate: float | None, *, floor: float, cap: float) -> float:
    """Relative frequency of a task under `success`, in `floor` to `cap`; a task that was never tried counts as unsolved."""
    return min(cap, max(floor, 1.0 - (success_rate or 0.0)))


def learnability(success_rate: float | None, *, floor: float, cap: float) -> float:
    """Relative frequency of a task under `variance`, in `floor` to `cap`."""
    p = 0.5 if success_rate is None else success_rate
    return min(cap, max(floor, 4.0 * p * (1.0 - p)))


def smoothed(success_rate: float | None, mean_reward: float) -> float:
    """Success rate after one more group; rewards outside 0 to 1 are cut to it."""
    value = min(1.0, max(0.0, mean_reward))
    return value if success_rate is None else success_rate + SMOOTHING * (value - success_rate)


def _draw(priorities: Sequence[float], point: float) -> int:
    """The task whose stretch of the running sum holds `point`; a task of priority 0 has none."""
    return min(bisect_right(priorities, point), len(priorities) - 1)
