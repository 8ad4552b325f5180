"""The optimizer step of every learner, in one process or on ranks together: all of its minibatches, or none.

Guarantee: a step that is refused, because its loss or gradient is not finite or the gradient is too large, changes nothing on
any rank; for that each rank keeps a copy of its own state where a step has several minibatches.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from schemas.fields import Lane
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.batch.split import split
from trainer.config import TrainerConfig
from trainer.health import Observed, diagnose, join
from trainer.learners.channel import Channel, Encoded, decode_array, encode_array
from trainer.learners.critic import CriticEngine, Values
from trainer.learners.forward import PackedModel
from trainer.learners.lanes import StepContext, bounds, compares, looks_ahead, microbatch_loss, read, step_context
from trainer.learners.learner import StepStats
from trainer.learners.orders import Rows, gather_observed
from trainer.losses.loss import Objective


class StepEngine(Protocol):
    """A policy with its optimizer, in one process or on each rank. Calls are collective.

    model: reads rows. stage: of ZeRO; a reference of stage 3 computes on all ranks or on none.
    """

    config: TrainerConfig
    channel: Channel
    model: PackedModel
    stage: int

    @property
    def run(self) -> Callable[[str, Any], Any]:
        """Calls a method of the model with its argument."""

    @property
    def compare(self) -> Callable[[Microbatch], torch.Tensor] | None:
        """log π_ref of the sampled tokens; None without a reference."""

    @property
    def critic(self) -> CriticEngine | None:
        """None where no loss needs one."""

    def clear_gradients(self) -> None:
        """Forget gradients before a minibatch."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the gradient. is_last: no other loss of the minibatch follows."""

    def update(self, learning_rate: float, loss: float, max_grad_norm: float, *, sound: bool) -> tuple[bool, float]:
        """Step the optimizer where loss and gradient allow it; whether it did, and the gradient's norm before clipping.

        sound: the critic's gradient allows it.
        """

    def move_reference(self, decay: float) -> None:
        """Make the reference `decay` of itself and the rest the policy."""

    def keep(self) -> Callable[[], None]:
        """Copy the state; returns a function that restores the copy."""


def minibatches(objectives: Mapping[Lane, Objective], batch: PackedBatch, seed: int) -> list[PackedBatch]:
    """The minibatches of a step, as many as the loss that asks for the most."""
    number = max(objectives[lane].minibatches for lane in batch.lane_tokens)
    return [batch] if number == 1 else list(split(batch, number, seed=seed))


def whole_rows(batch: PackedBatch) -> Rows:
    return Rows(batch.microbatches, len(batch.microbatches), None)


def optimizer_step(
    engine: StepEngine,
    objectives: Mapping[Lane, Objective],
    batch: PackedBatch,
    parts: Sequence[Rows],
    dealt: Sequence[Sequence[Rows]],
    *,
    learning_rate: float,
    max_grad_norm: float,
) -> StepStats:
    """Take each minibatch in turn; at one that is refused, undo those before it.

    batch: counts of the whole step. parts: this rank's rows of each minibatch. dealt: of each minibatch the rows of every rank,
    on rank 0.
    """
    present = [objectives[lane] for lane in batch.lane_tokens]
    ahead = [_ahead(engine, part) for part in parts] if any(map(looks_ahead, present)) else None
    bounded = {} if ahead is None else _bounds(engine, objectives, batch, dealt, ahead)
    proximal = ahead if any(objective.proximal for objective in present) else None
    values = None if engine.critic is None else Values(engine.critic, objectives, parts)
    undo = engine.keep() if len(parts) > 1 else engine.clear_gradients
    losses, norms, observed = list[float](), list[float](), list[Observed]()
    seconds = {"gradients": 0.0, "update": 0.0}
    for index, part in enumerate(parts):
        context = step_context(
            objectives, batch, len(parts), index, staleness_decay=engine.config.staleness_decay, bounds=bounded
        )
        began_s = time.perf_counter()
        engine.clear_gradients()
        advantages = None if values is None else values.advantages(index)
        loss, seen = _backward(engine, context, part, proximal[index] if proximal else None, advantages)
        sound = values is None or values.accumulate(index)
        ready_s = time.perf_counter()
        applied, norm = engine.update(learning_rate, loss, max_grad_norm, sound=sound)
        if values is not None:
            values.finish(applied=applied)
        if not applied:
            undo()
            return StepStats(finite=False, loss=loss, grad_norm=norm, values={})
        if engine.config.reference_decay < 1.0:
            engine.move_reference(engine.config.reference_decay)
        seconds["gradients"] += ready_s - began_s
        seconds["update"] += time.perf_counter() - ready_s
        losses.append(loss)
        norms.append(norm)
        observed += seen
    measured = {**(diagnose(join(observed)) if observed else {}), **({} if values is None else values.measured())}
    mean = sum(losses) / len(losses)
    return StepStats(finite=True, loss=mean, grad_norm=max(norms), values=measured, seconds=seconds)


@torch.no_grad()
def per_sequence(
    engine: StepEngine,
    rows: Rows,
    num_sequences: int,
    method: str,
    measure: Callable[[Microbatch, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Sum of a measure over the tokens of each sequence, over all ranks. measure: from a forward's values, [N] each."""
    sums = np.zeros(num_sequences)
    for index in range(rows.most):
        microbatch, real = rows.at(index)
        values_N = engine.run(method, microbatch).double().cpu().numpy()
        if real:
            sums += np.bincount(microbatch.sequence_N, weights=measure(microbatch, values_N), minlength=len(sums))
    total = torch.from_numpy(sums).to(engine.model.device)
    engine.channel.sum(total)
    found: np.ndarray = total.cpu().numpy()
    return found


def miss(rows: Microbatch, hit_N: np.ndarray) -> np.ndarray:
    return np.asarray(hit_N == 0)


def log_distance(rows: Microbatch, logprob_N: np.ndarray) -> np.ndarray:
    """|log π_θ - log μ| of the tokens that have a ratio."""
    return np.where(rows.ratio_N, np.abs(logprob_N - rows.behaviour_N), 0.0)


@torch.no_grad()
def _ahead(engine: StepEngine, part: Rows) -> list[torch.Tensor]:
    """log π_θ of this rank's microbatches before the step."""
    found = [engine.run("logprobs", part.at(index)[0]) for index in range(part.most)]
    return found[: len(part.mine)]


def _bounds(
    engine: StepEngine,
    objectives: Mapping[Lane, Objective],
    batch: PackedBatch,
    dealt: Sequence[Sequence[Rows]],
    ahead: Sequence[Sequence[torch.Tensor]],
) -> dict[Lane, float]:
    """The losses' bounds for the whole step. Rank 0, which has the rows, computes them from all ranks' logprobs."""
    mine = [encode_array(logprob.cpu().numpy()) for part in ahead for logprob in part]
    every = engine.channel.gather(msgspec.msgpack.encode(mine))
    found: dict[Lane, float] | None = None
    if not engine.channel.rank:
        microbatches = [rows for rank in range(engine.channel.world) for part in dealt for rows in part[rank].mine]
        arrays = [decode_array(array) for data in every for array in msgspec.msgpack.decode(data, type=list[Encoded])]
        whole = msgspec.structs.replace(batch, microbatches=tuple(microbatches))
        found = {lane: float(value) for lane, value in bounds(objectives, whole, arrays).items()}
    sent = engine.channel.broadcast(None if found is None else msgspec.msgpack.encode(found))
    return msgspec.msgpack.decode(sent, type=dict[Lane, float])


def _backward(
    engine: StepEngine,
    context: StepContext,
    part: Rows,
    proximal: Sequence[torch.Tensor] | None,
    advantages: Sequence[np.ndarray] | None,
) -> tuple[float, list[Observed]]:
    """Forward and backward of this rank's rows; the loss over all ranks and, on rank 0, the observations of all."""
    total = torch.zeros(1, device=engine.model.device)
    observed = []
    for index in range(part.most):
        rows, real = part.at(index)
        is_last = index == part.most - 1
        logprob_N, entropy_N = read(engine.run, context, rows)
        loss, seen = microbatch_loss(
            context,
            rows,
            logprob_N,
            proximal_N=None if proximal is None else proximal[index] if real else logprob_N.detach(),
            reference_N=_reference(engine, context, rows),
            entropy_N=entropy_N,
            advantage_N=advantages[index] if real and advantages is not None else None,
        )
        if real:
            observed.append(seen)
            total += loss.detach()
        # ZeRO averages over ranks; the lanes are divided by global counts already, so their sum is wanted.
        loss = loss * engine.channel.world if real else loss.nan_to_num() * 0
        if is_last:
            engine.channel.sum(total)
            # ZeRO refuses a step by its gradient's norm alone, so a loss that is not finite must show there.
            loss = loss if math.isfinite(float(total)) else loss * math.nan
        engine.backward(loss, is_last=is_last)
    return float(total), gather_observed(engine.channel, observed)


@torch.no_grad()
def _reference(engine: StepEngine, context: StepContext, rows: Microbatch) -> torch.Tensor | None:
    """log π_ref where some lane compares with it; a sharded reference computes on all ranks or on none."""
    mine = compares(context.objectives, rows)
    somewhere = any(context.objectives[lane].reference for lane in context.num_tokens)
    if engine.compare is None or not (mine or (engine.stage == 3 and somewhere)):
        return None
    found = engine.compare(rows)
    return found if mine else None
