"""Success rates that a run has recorded, for tasks that are loaded again: into another app, for another policy.

Guarantee: the rate travels with the task, in its meta; so the tasks stage makes the same difficulty of it every time.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from actors.master.curriculum import smoothed
from actors.master.evaluation import parse_eval_group
from infra.log.log import Log
from schemas import Closure, Task
from schemas.ids import task_of
from schemas.topics import PROGRESS


async def recorded_rates(log: Log) -> dict[str, float]:
    """Task id to success rate, as the master's curriculum has it, over all closures that the log still holds."""
    rates: dict[str, float] = {}
    async for message in log.read_all(PROGRESS):
        closure = message.value
        if not isinstance(closure, Closure) or closure.lane != "usual" or parse_eval_group(closure.group) is not None:
            continue
        if closure.mean_reward is not None and closure.revision == 0:
            task = task_of(closure.group)
            rates[task] = smoothed(rates.get(task), closure.mean_reward)
    return rates


def rated(tasks: Iterable[Task], rates: Mapping[str, float], field: str) -> Iterator[Task]:
    """The tasks; one that has a recorded rate with it in `meta[field]`, in place of what its row said."""
    for task in tasks:
        if task.id in rates:
            task = msgspec.structs.replace(task, meta={**task.meta, field: rates[task.id]})
        yield task
