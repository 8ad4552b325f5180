"""The lanes of one microbatch: each token's loss under its lane's objective, summed, and what was observed.

Guarantee: every lane is divided by its tokens in the whole step, so any cut into microbatches gives one gradient.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import torch

from schemas.records import Lane
from trainer.batch import LANES, Microbatch, PackedBatch
from trainer.config import LaneConfig
from trainer.diagnostics import Observed
from trainer.learner import Phase
from trainer.loss import LossInputs, Objective, lane_loss, open_objective
from trainer.offpolicy import staleness_weight


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all microbatches of one optimizer step.

    lane_tokens: global denominators. version: policy version before the batch. exact: the weights are that version's.
    """

    objectives: Mapping[Lane, Objective]
    lane_tokens: Mapping[Lane, int]
    version: int
    exact: bool
    staleness_decay: float = 1.0


def open_objectives(lanes: Mapping[Lane, LaneConfig]) -> dict[Lane, Objective]:
    """The objective of every lane. Raises ConfigError."""
    return {lane: open_objective(config, f"trainer.lanes.{lane}") for lane, config in lanes.items()}


def of_phase(objectives: Mapping[Lane, Objective], phase: Phase) -> Mapping[Lane, Objective]:
    """The objectives with the weights they have in a phase: 1 each in the warm-up."""
    if phase == "train":
        return objectives
    return {lane: msgspec.structs.replace(one, weight=1.0) for lane, one in objectives.items()}


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
            without = (one.lane_N == LANES.index(lane)) & ~one.ratio_N
            if objectives[lane].ratio and without.any():
                raise ValueError(
                    f"batch: got {int(without.sum())} tokens with ratio=False in lane {lane}, whose loss forms importance "
                    'ratios; drop them at the draw or give the lane loss = "sft"'
                )


def microbatch_loss(
    context: StepContext,
    one: Microbatch,
    logprob_N: torch.Tensor,
    *,
    proximal_N: torch.Tensor | None = None,
    reference_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Observed]:
    """What these tokens add to the step's loss, and what was seen of them."""
    device = logprob_N.device
    staleness = context.version - one.version_N
    weight = one.weight_N
    if context.staleness_decay < 1:
        decayed = weight * staleness_weight(staleness, context.staleness_decay)
        weight = np.where(one.ratio_N, decayed, weight).astype(np.float32)
    clipped = np.zeros(len(one.target_N), bool)
    total = logprob_N.new_zeros(())
    for index in np.unique(one.lane_N):
        lane = LANES[index]
        mine = np.flatnonzero(one.lane_N == index)
        at = torch.from_numpy(mine).to(device)

        def part(array: np.ndarray, mine: np.ndarray = mine) -> torch.Tensor:
            return torch.from_numpy(array[mine]).to(device)

        inputs = LossInputs(
            logprob=logprob_N[at],
            behaviour=part(one.behaviour_N),
            advantage=part(one.advantage_N),
            staleness=part(staleness),
            ratio=part(one.ratio_N),
            proximal=None if proximal_N is None else proximal_N[at],
            reference=None if reference_N is None else reference_N[at],
        )
        loss, output = lane_loss(context.objectives[lane], inputs, part(weight), context.lane_tokens[lane])
        total = total + loss
        if output.clipped is not None:
            clipped[mine] = output.clipped.cpu().numpy()
    return total, _observe(context, one, logprob_N, staleness, clipped)


def _observe(
    context: StepContext, one: Microbatch, logprob_N: torch.Tensor, staleness: np.ndarray, clipped: np.ndarray
) -> Observed:
    return Observed(
        logprob=logprob_N.detach().cpu().numpy(),
        behaviour=one.behaviour_N,
        advantage=one.advantage_N,
        staleness=staleness,
        version=one.version_N,
        ratio=one.ratio_N,
        clipped=clipped,
        exact=np.full(len(clipped), context.exact),
        lane=one.lane_N,
        sequence=one.sequence_N,
    )
