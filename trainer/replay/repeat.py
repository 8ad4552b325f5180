"""Journaled steps done again, for a resume and for a replay alike: the journal decides, the kernels only compute.

What was skipped or rolled back is not executed, since it changed nothing that remained; everything else is executed in
order with the items, seeds and rates it had.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from schemas import Rollback
from trainer.batch.batch import TrainItem
from trainer.health.guard import ANY_FINITE, norm_limit, refused, rolled_back
from trainer.journal.journal import Pending
from trainer.learners.learner import StepStats
from trainer.loop.state import Learning
from trainer.loop.step import after, execute

Prepare = Callable[[Pending], Awaitable[list[TrainItem]]]


async def repeat(
    run: Learning,
    todo: Iterable[Pending | Rollback],
    *,
    prepare: Prepare,
    begin_training: Callable[[], Awaitable[None]],
) -> AsyncGenerator[tuple[Pending | Rollback, StepStats | None], None]:
    """Each entry after it was done, with what its step said where one was executed.

    prepare: the items of a batch; asked for every batch in turn. begin_training: what ends the warm-up.
    """
    for one in todo:
        if isinstance(one, Rollback):
            run.advance(step=one.to_step, guard=rolled_back(run.position.guard))
            yield one, None
            continue
        if one.batch.phase == "train" and not run.position.warmed_up:
            await begin_training()
        items = await prepare(one)
        stats = None
        if one.fate in ("trained", "open"):
            limit = norm_limit(run.position.guard, run.config.guard) if one.fate == "open" else ANY_FINITE
            stats = await execute(run, one.batch, items, max_grad_norm=limit)
        if one.fate == "trained" and stats is not None:
            run.advance(guard=after(run, one.batch, stats))
        elif one.fate == "skipped":
            run.advance(step=one.batch.step, guard=refused(run.position.guard))
        yield one, stats
