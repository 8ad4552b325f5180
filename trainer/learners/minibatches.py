"""The optimizer step of every learner, minibatch after minibatch: all of them, or none.

How one minibatch is taken and what undoes it is the learner's own.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from schemas.fields import Lane
from trainer.batch.batch import PackedBatch
from trainer.batch.split import split
from trainer.config import TrainerConfig
from trainer.health import Observed, diagnose, join
from trainer.learners.lanes import StepContext, step_context
from trainer.learners.learner import StepStats
from trainer.losses.loss import Objective
from trainer.losses.offpolicy import effective_share, ess_learning_rate


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """One minibatch.

    applied: False where its loss or gradient was refused, and it changed nothing. loss, grad_norm, seconds: as in StepStats.
    observed: of its microbatches; of all ranks on rank 0, () on the others.
    """

    applied: bool
    loss: float
    grad_norm: float
    observed: Sequence[Observed]
    seconds: Mapping[str, float] = {}


def minibatches_of(objectives: Mapping[Lane, Objective], batch: PackedBatch, seed: int) -> list[PackedBatch]:
    """The minibatches of a step, as many as the loss that asks for the most."""
    number = max(objectives[lane].minibatches for lane in batch.lane_tokens)
    return [batch] if number == 1 else list(split(batch, number, seed=seed))


def take_all(
    contexts: Sequence[StepContext],
    take: Callable[[int, StepContext], Taken],
    undo: Callable[[], None],
    measured: Callable[[], Mapping[str, float]],
) -> StepStats:
    """Take each minibatch in turn; at one that is refused, `undo` those before it. measured: by the critic, of all."""
    losses, norms, observed = list[float](), list[float](), list[Observed]()
    seconds: dict[str, float] = {}
    for index, context in enumerate(contexts):
        taken = take(index, context)
        if not taken.applied:
            undo()
            return StepStats(finite=False, loss=taken.loss, grad_norm=taken.grad_norm, values={})
        losses.append(taken.loss)
        norms.append(taken.grad_norm)
        observed += taken.observed
        for name, value in taken.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    values = {**(diagnose(join(observed)) if observed else {}), **measured()}
    loss = sum(losses) / len(losses)
    return StepStats(finite=True, loss=loss, grad_norm=max(norms), values=values, seconds=seconds)


def contexts_of(
    config: TrainerConfig,
    objectives: Mapping[Lane, Objective],
    batch: PackedBatch,
    number: int,
    bounds: Mapping[Lane, float],
) -> list[StepContext]:
    """Of each of `number` minibatches of a batch. bounds: what losses measured over the whole step."""
    decay = config.staleness_decay
    return [
        step_context(objectives, batch, number, index, staleness_decay=decay, bounds=bounds) for index in range(number)
    ]


def scaled_rate(config: TrainerConfig, learning_rate: float, observed: Sequence[Observed]) -> float:
    """The learning rate of a minibatch, by its effective sample size where the settings ask for that."""
    if not config.scale_by_ess:
        return learning_rate
    seen = join(observed)
    weight = np.exp(seen.logprob[seen.ratio].astype(np.float64) - seen.behaviour[seen.ratio])
    return ess_learning_rate(learning_rate, effective_share(weight))
