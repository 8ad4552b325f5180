"""The lanes of one microbatch: each token's loss under its lane's objective, summed, and what was observed.

Guarantee: every lane is divided by its tokens (sequences, pairs: what its loss is a mean over) in the whole step, so any
cut into microbatches gives one gradient. A step of m minibatches divides each of them by an m-th of that: a token weighs
m times what it weighs in one step, whichever minibatch it falls into, and so does a lane in their sum.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from schemas.fields import Lane
from trainer.batch import LANES, Microbatch, PackedBatch
from trainer.config import TrainerConfig
from trainer.diagnostics import Observed
from trainer.learner import Phase
from trainer.loss import LossInputs, Objective, lane_loss
from trainer.offpolicy import staleness_weight


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all microbatches of one optimizer step.

    denominators: of each lane, global: see `denominators`. version: policy version before the batch. exact: the weights
    are that version's. bounds: what losses measured over the whole step.
    """

    objectives: Mapping[Lane, Objective]
    denominators: Mapping[Lane, float]
    version: int
    exact: bool
    staleness_decay: float = 1.0
    bounds: Mapping[Lane, float] = {}


def of_phase(objectives: Mapping[Lane, Objective], phase: Phase) -> Mapping[Lane, Objective]:
    """The objectives with the weights they have in a phase: 1 each in the warm-up."""
    if phase == "train":
        return objectives
    return {lane: msgspec.structs.replace(one, weight=1.0) for lane, one in objectives.items()}


def reference_dtype(config: TrainerConfig) -> str:
    """Of the reference: the policy's, but one that moves in small steps would not move at all in bfloat16."""
    return config.dtype if config.reference_decay == 1.0 else "float32"


def looks_ahead(objective: Objective) -> bool:
    """Whether a loss wants to know log π_θ of the whole step before it."""
    return objective.proximal == "recompute" or objective.bound is not None


def denominators(objectives: Mapping[Lane, Objective], batch: PackedBatch, parts: int = 1) -> dict[Lane, float]:
    """What each lane's sum is divided by in each of the step's `parts` minibatches. batch: the whole step."""
    found = {}
    for lane, tokens in batch.lane_tokens.items():
        sequences = batch.lane_sequences[lane]
        found[lane] = {"tokens": tokens, "sequences": sequences, "pairs": sequences // 2}[objectives[lane].mean] / parts
    return found


def bounds(
    objectives: Mapping[Lane, Objective], batch: PackedBatch, logprobs: Sequence[np.ndarray]
) -> dict[Lane, float]:
    """What losses measure over the whole step, from log π_θ before it; logprobs: [N] of each microbatch."""
    found = {}
    for lane in batch.lane_tokens:
        measure = objectives[lane].bound
        if measure is not None:
            chosen = [one.lane_N == LANES.index(lane) for one in batch.microbatches]
            parts = zip(batch.microbatches, logprobs, chosen, strict=True)
            found[lane] = measure(np.concatenate([(logprob - one.behaviour_N)[at] for one, logprob, at in parts]))
    return found


def check_step(objectives: Mapping[Lane, Objective], batch: PackedBatch, learning_rate: float) -> None:
    """ValueError for what no step could be made of; nothing has been computed yet."""
    if not batch.num_tokens:
        raise ValueError("batch: got no sampled tokens, expected at least one")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise ValueError(f"learning_rate: got {learning_rate}, expected a finite number above 0")
    for lane in batch.lane_tokens:
        if lane not in objectives:
            raise ValueError(f"batch: got tokens of lane {lane}, expected {', '.join(objectives)}")
    for one in batch.microbatches:
        for lane in batch.lane_tokens:
            _check_lane(objectives[lane], one, lane)


def _check_lane(objective: Objective, one: Microbatch, lane: Lane) -> None:
    mine = one.lane_N == LANES.index(lane)
    if objective.ratio and (without := mine & ~one.ratio_N).any():
        raise ValueError(
            f"batch: got {int(without.sum())} tokens with ratio=False in lane {lane}, whose loss forms importance "
            'ratios; drop them at the draw or give the lane loss = "sft"'
        )
    if objective.mean == "pairs" and (mine & (one.pair_N < 0)).any():
        raise ValueError(
            f"batch: got tokens of lane {lane} outside any pair, expected whole pairs: its loss compares them"
        )
    if objective.teacher and np.isnan(one.teacher_N[mine]).any():
        raise ValueError(f"batch: got tokens of lane {lane} without a teacher's logprob, expected the section for all")
    if objective.critic and np.isnan(one.reward_N[mine]).any():
        raise ValueError(
            f"batch: got sequences of lane {lane} without a reward, expected one each: its critic needs them"
        )


def microbatch_loss(
    context: StepContext,
    one: Microbatch,
    logprob_N: torch.Tensor,
    *,
    proximal_N: torch.Tensor | None = None,
    reference_N: torch.Tensor | None = None,
    advantage_N: np.ndarray | None = None,
) -> tuple[torch.Tensor, Observed]:
    """What these tokens add to the step's loss, and what was seen of them. advantage_N: a critic's, for its lanes."""
    device = logprob_N.device
    staleness = context.version - one.version_N
    weight = one.weight_N
    if context.staleness_decay < 1:
        decayed = weight * staleness_weight(staleness, context.staleness_decay)
        weight = np.where(one.ratio_N, decayed, weight).astype(np.float32)
    clipped = np.zeros(len(one.target_N), bool)
    advantage = one.advantage_N.copy()
    total = logprob_N.new_zeros(())
    for index in np.unique(one.lane_N):
        lane = LANES[index]
        mine = np.flatnonzero(one.lane_N == index)
        at = torch.from_numpy(mine).to(device)

        def part(array: np.ndarray, mine: np.ndarray = mine) -> torch.Tensor:
            return torch.from_numpy(array[mine]).to(device)

        objective = context.objectives[lane]
        if objective.critic and advantage_N is not None:
            advantage[mine] = advantage_N[mine]
        _, sequence = np.unique(one.sequence_N[mine], return_inverse=True)
        inputs = LossInputs(
            logprob=logprob_N[at],
            behaviour=part(one.behaviour_N),
            advantage=part(advantage),
            staleness=part(staleness),
            ratio=part(one.ratio_N),
            proximal=None if proximal_N is None else proximal_N[at],
            reference=None if reference_N is None else reference_N[at],
            teacher=part(one.teacher_N) if objective.teacher else None,
            sequence=torch.from_numpy(sequence).to(device),
            pair=part(one.pair_N),
            bound=context.bounds.get(lane),
        )
        loss, output = lane_loss(objective, inputs, part(weight), context.denominators[lane])
        total = total + loss
        if output.clipped is not None:
            clipped[mine] = output.clipped.cpu().numpy()
    return total, Observed(
        logprob=logprob_N.detach().cpu().numpy(),
        behaviour=one.behaviour_N,
        advantage=advantage,
        staleness=staleness,
        version=one.version_N,
        ratio=one.ratio_N,
        clipped=clipped,
        exact=np.full(len(clipped), context.exact),
        lane=one.lane_N,
        sequence=one.sequence_N,
    )
