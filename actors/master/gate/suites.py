"""Tests of eval results: is a candidate worse than the stable version, or the run worse than it once was? Pure.

Results are samples: of tasks, and at a temperature of answers. Two results on the same tasks are compared task by task, so that
only tasks count which the versions answer differently (McNemar, 1947; with several answers a task the same test over signs of
differences). Other results are compared as shares, an answer a task.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist

from actors.config import GateSuite
from schemas import EvalResult


def drop(suite: GateSuite, new: EvalResult, old: EvalResult, num_tests: int = 1) -> float:
    """By how much `new` is worse than `old`; 0 unless that is more than `max_drop`, and by more than chance.

    num_tests: tests of one candidate, which share `alpha` (Bonferroni).
    """
    gap, variance = difference(new, old)
    least = suite.max_drop + NormalDist().inv_cdf(1.0 - suite.alpha / num_tests) * math.sqrt(variance)
    return old.accuracy - new.accuracy if gap > least + 1e-9 else 0.0


def difference(new: EvalResult, old: EvalResult) -> tuple[float, float]:
    """Accuracy of `old` minus that of `new`, less half a step (a continuity correction), and the variance of the difference.

    The variance is the larger of two: under equal accuracies, and under the measured accuracies.
    """
    if is_paired(new, old):
        gaps = [before - now for before, now in zip(old.right, new.right, strict=True)]
        answers = new.num_tasks * new.num_samples
        return (sum(gaps) - 1) / answers, sum(gap * gap for gap in gaps) / answers**2
    both = (new.accuracy * new.num_tasks + old.accuracy * old.num_tasks) / (new.num_tasks + old.num_tasks)
    each = 1.0 / new.num_tasks + 1.0 / old.num_tasks
    apart = sum(side.accuracy * (1.0 - side.accuracy) / side.num_tasks for side in (new, old))
    return old.accuracy - new.accuracy - each / 2, max(both * (1.0 - both) * each, apart)


def is_paired(new: EvalResult, old: EvalResult) -> bool:
    """True if two results are of the same tasks, with as many answers to each."""
    return bool(new.right and new.tasks) and (new.tasks, len(new.right), new.num_samples) == (
        old.tasks, len(old.right), old.num_samples
    )  # fmt: skip


def total_drop(suite: GateSuite, passed: Sequence[EvalResult], new: EvalResult, num_tests: int = 1) -> float:
    """By how much the run is worse than its best; 0 unless that is more than `total_drop`, and by more than chance.

    The mean of the last `window` results, `new` among them, is compared with the best such mean of those before. passed: of
    versions that passed, by version: one that was held says nothing of the next. A candidate that is itself within
    `total_drop` of the best is never held, so the run can always come back. Results on other tasks than the newest one's do
    not count; the best is chosen among many, which Bonferroni's bound allows for.

    The variance of the difference is the larger of two: if versions answer independently of each other, and of the tasks' own
    differences, since versions that answer most tasks alike differ less from the one before than from one long ago.
    """
    paired = [result for result in passed if is_paired(result, new)]
    found, size = [*(paired or passed), new], suite.window
    windows = [found[end - size : end] for end in range(size, len(found) + 1)]
    means = [sum(result.accuracy for result in window) / size for window in windows]
    if len(means) < 2:
        return 0.0
    less = max(means) - means[-1]
    if min(less, max(means) - new.accuracy) <= suite.total_drop + 1e-9:
        return 0.0
    noise = [difference(now, before)[1] / 2.0 for before, now in pairwise(found)]
    spread = 2.0 * math.fsum(noise) / len(noise) / size
    if paired:
        by_task = zip(*(result.right for result in (*windows[means.index(max(means))], *windows[-1])), strict=True)
        gaps = [sum(right[:size]) - sum(right[size:]) for right in by_task]
        spread = max(spread, sum(gap * gap for gap in gaps) / (size * new.num_tasks * new.num_samples) ** 2)
    alpha = suite.alpha / num_tests / len(means)
    return less if less > NormalDist().inv_cdf(1.0 - alpha) * math.sqrt(spread) else 0.0
