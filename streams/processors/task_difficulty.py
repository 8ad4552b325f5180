"""difficulty: 1 − the success rate that came with a task, where it names no difficulty itself.

A rate is a column of the rows, or what another run recorded (`headrace load tasks --rates-from`). What this run measures
needs no processor: the master folds it from the log and orders tasks by it.
"""

import msgspec

from infra.chain.processor import Drop, processor
from schemas import Task

SOLVED = "too easy"
UNSOLVED = "too hard"


@processor(version=1, of="task", inline=True)
def difficulty(task: Task, *, field: str, easiest: float, hardest: float) -> Task | Drop:
    """Set `difficulty` from `meta[field]`, a rate from 0 to 1; drop train tasks outside `easiest` to `hardest`."""
    rate = task.meta.get(field)
    if task.difficulty is None and isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1:
        task = msgspec.structs.replace(task, difficulty=1.0 - rate)
    if task.difficulty is None or task.split != "train":
        return task
    if task.difficulty < easiest:
        return Drop(SOLVED, f"difficulty {task.difficulty:g}, expected {easiest:g} or more")
    if task.difficulty > hardest:
        return Drop(UNSOLVED, f"difficulty {task.difficulty:g}, expected at most {hardest:g}")
    return task
