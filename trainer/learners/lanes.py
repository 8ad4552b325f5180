"""The lanes of one microbatch: each token's loss under its lane's objective, summed, and the observations.

Guarantee: every lane is divided by its number of tokens (sequences or pairs, if its loss is a mean over them) in the whole
step, so any cut into microbatches gives one gradient. A step of m minibatches divides each of them by an m-th of that number:
in any minibatch a token weighs m times its weight in one step, and so does a lane in their sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from schemas.fields import LANES, Lane
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.config import TrainerConfig
from trainer.health import Observed
from trainer.learners.learner import Phase
from trainer.losses.loss import LossInputs, Objective, lane_loss, lane_penalty
from trainer.losses.offpolicy import staleness_weight


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that all microbatches of one optimizer step share.

    objectives: by lane. denominators: of each lane, global: see `denominators`. num_tokens: sampled ones of each lane, global.
    version: policy version before the batch. exact: the weights are that version's. staleness_decay: λ of λ^staleness, 1 is
    off. bounds: by lane, the loss's bound over the whole step, or the lane's mean gain where its loss has a teacher.
    """

    objectives: Mapping[Lane, Objective]
    denominators: Mapping[Lane, float]
    num_tokens: Mapping[Lane, float]
    version: int
    exact: bool
    staleness_decay: float = 1.0
    bounds: Mapping[Lane, float] = {}

    @property
    def entropy(self) -> bool:
        """True if some lane of the step needs the entropy of the policy."""
        return any(self.objectives[lane].entropy > 0 for lane in self.num_tokens)


def step_context(
    objectives: Mapping[Lane, Objective],
    batch: PackedBatch,
    parts: int,
    index: int,
    *,
    staleness_decay: float,
    bounds: Mapping[Lane, float],
) -> StepContext:
    """The context of minibatch `index` of `parts`. batch: the whole step."""
    return StepContext(
        objectives=objectives,
        denominators=denominators(objectives, batch, parts),
        num_tokens={lane: tokens / parts for lane, tokens in batch.lane_tokens.items()},
        version=batch.version,
        exact=batch.exact and index == 0,
        staleness_decay=staleness_decay,
        bounds={lane: gain for lane, gain in batch.lane_gains.items() if objectives[lane].teacher} | dict(bounds),
    )


def read(
    forward: Callable[[str, Microbatch], torch.Tensor], context: StepContext, rows: Microbatch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log π_θ of the sampled tokens, and the entropy where a lane wants it; both [N]."""
    if not context.entropy:
        return forward("logprobs", rows), None
    logprob_N, entropy_N = forward("logprobs_and_entropy", rows).unbind(0)
    return logprob_N, entropy_N


def phase_objectives(objectives: Mapping[Lane, Objective], phase: Phase) -> Mapping[Lane, Objective]:
    """The objectives with the weights they have in a phase: 1 each in the warm-up."""
    if phase == "train":
        return objectives
    return {lane: msgspec.structs.replace(objective, weight=1.0) for lane, objective in objectives.items()}


def reference_dtype(config: TrainerConfig) -> str:
    """Dtype of the reference: the policy's, but a reference that moves in small steps would not move at all in bfloat16."""
    return config.dtype if config.reference_decay == 1.0 else "float32"


def looks_ahead(objective: Objective) -> bool:
    """True if a loss needs log π_θ of the whole step before it."""
    return objective.proximal == "recompute" or objective.bound is not None


def compares(objectives: Mapping[Lane, Objective], rows: Microbatch) -> bool:
    """True if the loss of a microbatch needs a forward of the reference policy."""
    return any(objectives[LANES[index]].reference for index in np.unique(rows.lane_N))


def denominators(objectives: Mapping[Lane, Objective], batch: PackedBatch, parts: int = 1) -> dict[Lane, float]:
    """Divisor of each lane's sum in each of the step's `parts` minibatches. batch: the whole step."""
    found = {}
    for lane, tokens in batch.lane_tokens.items():
        sequences = batch.lane_sequences[lane]
        found[lane] = {"tokens": tokens, "sequences": sequences, "pairs": sequences // 2}[objectives[lane].mean] / parts
    return found


def bounds(
    objectives: Mapping[Lane, Objective], batch: PackedBatch, logprobs: Sequence[np.ndarray]
) -> dict[Lane, float]:
    """The losses' bounds over the whole step, from log π_θ before it; logprobs: [N] of each microbatch."""
    found = {}
    for lane in batch.lane_tokens:
        measure = objectives[lane].bound
        if measure is not None:
            chosen = [rows.lane_N == LANES.index(lane) for rows in batch.microbatches]
            parts = list(zip(batch.microbatches, logprobs, chosen, strict=True))
            found[lane] = measure(
                np.concatenate([(logprob - rows.behaviour_N)[at] for rows, logprob, at in parts]),
                np.concatenate([rows.advantage_N[at] for rows, _, at in parts]),
            )
    return found


def check_step(objectives: Mapping[Lane, Objective], batch: PackedBatch, learning_rate: float) -> None:
    """ValueError for a batch that no step can be made of; nothing has been computed yet."""
    if not batch.num_tokens:
        raise ValueError("batch: got no sampled tokens, expected at least one")
    if not (learning_rate >= 0 and math.isfinite(learning_rate)):
        raise ValueError(f"learning_rate: got {learning_rate}, expected a finite number of 0 or more")
    for lane in batch.lane_tokens:
        if lane not in objectives:
            raise ValueError(f"batch: got tokens of lane {lane}, expected {', '.join(objectives)}")
    for rows in batch.microbatches:
        for lane in batch.lane_tokens:
            _check_lane(objectives[lane], rows, lane)


def _check_lane(objective: Objective, rows: Microbatch, lane: Lane) -> None:
    mine = rows.lane_N == LANES.index(lane)
    if objective.ratio and (without := mine & ~rows.ratio_N).any():
        raise ValueError(
            f"batch: got {int(without.sum())} tokens with ratio=False in lane {lane}, whose loss forms importance "
            'ratios; drop them at the draw or give the lane loss = "sft"'
        )
    if objective.mean == "pairs" and (mine & (rows.pair_N < 0)).any():
        raise ValueError(
            f"batch: got tokens of lane {lane} outside any pair, expected whole pairs: its loss compares them"
        )
    if objective.teacher and np.isnan(rows.teacher_N[mine]).any():
        raise ValueError(f"batch: got tokens of lane {lane} without a teacher's logprob, expected the section for all")
    if objective.critic and np.isnan(rows.reward_N[mine]).any():
        raise ValueError(
            f"batch: got sequences of lane {lane} without a reward, expected one each: its critic needs them"
        )


def microbatch_loss(
    context: StepContext,
    rows: Microbatch,
    logprob_N: torch.Tensor,
    *,
    proximal_N: torch.Tensor | None = None,
    reference_N: torch.Tensor | None = None,
    entropy_N: torch.Tensor | None = None,
    advantage_N: np.ndarray | None = None,
) -> tuple[torch.Tensor, Observed]:
    """The share of these tokens in the step's loss, and their observations. advantage_N: a critic's, for its lanes."""
    device = logprob_N.device
    staleness = context.version - rows.version_N
    weight = rows.weight_N
    if context.staleness_decay < 1:
        decayed = weight * staleness_weight(staleness, context.staleness_decay)
        weight = np.where(rows.ratio_N, decayed, weight).astype(np.float32)
    clipped = np.zeros(len(rows.target_N), bool)
    kl, entropy = np.full((2, len(rows.target_N)), np.nan, np.float32)
    advantage = rows.advantage_N.copy()
    total = logprob_N.new_zeros(())
    per_token = Tokens(logprob_N, proximal_N, reference_N, entropy_N)
    for index in np.unique(rows.lane_N):
        lane = LANES[index]
        mine = np.flatnonzero(rows.lane_N == index)
        objective = context.objectives[lane]
        if objective.critic and advantage_N is not None:
            advantage[mine] = advantage_N[mine]
        inputs = _inputs(per_token, rows, mine, objective, advantage=advantage, staleness=staleness)
        inputs = msgspec.structs.replace(inputs, bound=context.bounds.get(lane))
        weight_L = torch.from_numpy(weight[mine]).to(device)
        loss, output = lane_loss(objective, inputs, weight_L, context.denominators[lane])
        total = total + loss
        if output.clipped is not None:
            clipped[mine] = output.clipped.cpu().numpy()
        if objective.kl > 0 or objective.entropy > 0:
            penalty = lane_penalty(objective, inputs, weight_L, context.num_tokens[lane])
            total = total + penalty.loss
            for array, values in ((kl, penalty.kl), (entropy, penalty.entropy)):
                array[mine] = np.nan if values is None else values.cpu().numpy()
    return total, Observed(
        logprob=logprob_N.detach().cpu().numpy(),
        behaviour=rows.behaviour_N,
        advantage=advantage,
        staleness=staleness,
        version=rows.version_N,
        ratio=rows.ratio_N,
        clipped=clipped,
        exact=rows.exact_N & context.exact,
        lane=rows.lane_N,
        sequence=rows.sequence_N,
        kl=kl,
        entropy=entropy,
    )


class Tokens(NamedTuple):
    """Results of forwards for the N sampled tokens of a microbatch; [N] each.

    logprob: log π_θ, with its gradient. proximal: log π_p, None where no loss asked for it. reference: log π_ref, None
    likewise. entropy: over the vocabulary, None likewise.
    """

    logprob: torch.Tensor
    proximal: torch.Tensor | None
    reference: torch.Tensor | None
    entropy: torch.Tensor | None


def _inputs(
    given: Tokens,
    rows: Microbatch,
    mine: np.ndarray,
    objective: Objective,
    *,
    advantage: np.ndarray,
    staleness: np.ndarray,
) -> LossInputs:
    """Inputs of one lane's loss: its tokens, at `mine`."""
    device = given.logprob.device
    at = torch.from_numpy(mine).to(device)
    _, sequence = np.unique(rows.sequence_N[mine], return_inverse=True)

    def part(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array[mine]).to(device)

    return LossInputs(
        logprob=given.logprob[at],
        behaviour=part(rows.behaviour_N),
        advantage=part(advantage),
        staleness=part(staleness),
        ratio=part(rows.ratio_N),
        proximal=None if given.proximal is None else given.proximal[at],
        reference=None if given.reference is None else given.reference[at],
        teacher=part(rows.teacher_N) if objective.teacher else None,
        sequence=torch.from_numpy(sequence).to(device),
        pair=part(rows.pair_N),
        entropy=None if given.entropy is None else given.entropy[at],
    )
