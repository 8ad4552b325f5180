"""Decoupled PPO: clipped around a proximal policy, reweighted from the behaviour policy that sampled the tokens."""

from typing import Literal

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.offpolicy import clipped_surrogate, log_linear_proximal, surrogate_clips, truncated_weight


@needs(asks=("minibatches", "proximal"))
def decoupled(
    inputs: LossInputs,
    *,
    low: float = 0.2,
    high: float = 0.28,
    cap: float = 5.0,
    minibatches: int = 2,
    proximal: Literal["recompute", "log-linear"] = "recompute",
) -> LossOutput:
    """-sg(min(ρ, cap))·min(rA, clip(r, 1-low, 1+high)A). arXiv 2110.00641 eq. 4; for LLMs AReaL, 2505.24298 eq. 5.

    proximal: the policy before the batch, by a forward of its own, or interpolated in log space (2512.06547).
    minibatches: optimizer steps per batch, at least 2 with "recompute": with one, r is 1 everywhere and no clip acts. Each
    is a step at the full learning rate, so a version moves further than under a loss that takes one. cap: the largest ρ;
    neither paper truncates ρ; AReaL's code drops the tokens above it. low, high: how far below and above 1 the ratio still
    has a gradient.
    """
    inputs.require_ratio()
    anchor = inputs.proximal
    if proximal == "log-linear":
        anchor = log_linear_proximal(inputs.behaviour, inputs.logprob.detach(), inputs.staleness)
    if anchor is None:
        raise ValueError('proximal: got none, expected logprobs from before the batch, or proximal = "log-linear"')
    ratio = (inputs.logprob - anchor).exp()
    weight = truncated_weight(anchor - inputs.behaviour, cap)
    loss = -weight * clipped_surrogate(ratio, inputs.advantage, low, high)
    return LossOutput(loss, surrogate_clips(ratio.detach(), inputs.advantage, low, high))
