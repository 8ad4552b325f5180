"""Whether a candidate answers a suite worse than the stable version, or the run worse than it once did. Pure.

Results are samples: of tasks, and at a temperature of answers. Two of the same tasks are compared task by task, so that
only the tasks count which they answer differently: where both are as good, each of these is as likely to speak for the
one as for the other (McNemar, 1947; for several answers a task the same test over signs of differences). Others are
compared as shares, an answer a task.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist

from actors.config import GateSuite
from schemas import EvalResult


def drop(bar: GateSuite, new: EvalResult, old: EvalResult) -> float:
    """By how much `new` is worse; 0 where that is within what may be, or within chance."""
    less = old.accuracy - new.accuracy
    if less <= bar.max_drop + 1e-9:
        return 0.0
    gap, spread = difference(new, old)
    return less if gap > NormalDist().inv_cdf(1.0 - bar.alpha) * math.sqrt(spread) else 0.0


def difference(new: EvalResult, old: EvalResult) -> tuple[float, float]:
    """By how much `old` is better, a half step less since answers are counted, and the variance where both are as good."""
    if pairable(new, old):
        gaps = [one - other for one, other in zip(old.right, new.right, strict=True)]
        answers = new.num_tasks * new.num_samples
        return (sum(gaps) - 1) / answers, sum(gap * gap for gap in gaps) / answers**2
    both = (new.accuracy * new.num_tasks + old.accuracy * old.num_tasks) / (new.num_tasks + old.num_tasks)
    each = 1.0 / new.num_tasks + 1.0 / old.num_tasks
    return old.accuracy - new.accuracy - each / 2, both * (1.0 - both) * each


def pairable(new: EvalResult, old: EvalResult) -> bool:
    """Whether two results are of the same tasks, with as many answers to each."""
    return bool(new.right and new.tasks) and (new.tasks, len(new.right), new.num_samples) == (
        old.tasks, len(old.right), old.num_samples
    )  # fmt: skip


def total_drop(bar: GateSuite, results: Sequence[EvalResult]) -> float:
    """By how much the last `over` results are worse on average than the best `over` in a row before; 0 as in `drop`.

    results: of one suite, by version; those of other tasks than the last one's count for nothing. There are many to be
    the best, so chance is allowed as much more (Bonferroni's bound).
    """
    found = [one for one in results if pairable(one, results[-1])] or list(results)
    shares = [one.accuracy for one in found]
    means = [sum(shares[end - bar.over : end]) / bar.over for end in range(bar.over, len(shares) + 1)]
    if len(means) < 2 or (less := max(means) - means[-1]) <= bar.total_drop + 1e-9:
        return 0.0
    noise = [difference(one, other)[1] / 2.0 for other, one in pairwise(found)]
    spread = 2.0 * math.fsum(noise) / len(noise) / bar.over
    return less if less > NormalDist().inv_cdf(1.0 - bar.alpha / len(means)) * math.sqrt(spread) else 0.0
