"""The draw by priority: whole groups without replacement, each in proportion to its priority. Pure, like `trainer.draw`.

Guarantees: what is drawn follows from the candidates' order, their priorities and the seed; a weight undoes what
priority did to the mean, and is in the candidate, so that the journal holds it.
"""

import math
import random
from collections.abc import Sequence

import msgspec

from trainer.draw import Candidate, Draw

FLOOR = 0.1  # of the highest priority: what is judged useless today comes back, and no weight is above 1 / FLOOR


def draw_by_priority(
    candidates: Sequence[Candidate], *, num_experiences: int, max_uses: int, seed: int, correction: float = 1.0
) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing.

    By rejection: one of those left, all alike, is accepted with its chance. So what a draw costs grows with what is
    drawn, not with what is held. correction: β of the weights (Schaul et al., arXiv 1511.05952, section 3.4).
    """
    draw = random.Random(seed).random
    elsewhere: dict[int, int] = {}  # places of those left that were moved there from the end: no copy of all of them
    num_left = len(candidates)
    taken: list[tuple[Candidate, float]] = []
    total = 0
    while num_left and total < num_experiences:
        at = int(draw() * num_left)
        one = candidates[elsewhere.get(at, at)]
        accepted = chance(one)
        usable = one.uses < max_uses
        if usable and draw() >= accepted:
            continue
        num_left -= 1
        elsewhere[at] = elsewhere.get(num_left, num_left)
        if usable:
            taken.append((one, accepted))
            total += one.num_experiences
    return Draw(taken=weighed(taken, correction), wait=not taken)


def chance(one: Candidate) -> float:
    """How likely a group is accepted when it is looked at: its priority, from `FLOOR` to 1."""
    priority = one.priority
    return FLOOR if priority < FLOOR else min(1.0, priority)


def weighed(taken: Sequence[tuple[Candidate, float]], correction: float) -> tuple[Candidate, ...]:
    """The groups with the weights (1 / chance)^β, over their mean among the experiences drawn: they keep the lane's size."""
    raw = [accepted**-correction for _, accepted in taken]
    total = math.fsum(weight * one.num_experiences for weight, (one, _) in zip(raw, taken, strict=True))
    mean = total / max(1, sum(one.num_experiences for one, _ in taken))
    return tuple(
        msgspec.structs.replace(one, weight=weight / mean) for weight, (one, _) in zip(raw, taken, strict=True)
    )
