"""The built-in losses. `[trainer.lanes.<lane>] loss` names a function; `trainer.config.LOSSES` lists the names.

Notation, per sampled token: μ behaviour, π_p proximal, π_θ current policy; w = π_θ/μ, ρ = π_p/μ, r = π_θ/π_p; A advantage;
sg(x) is x without a gradient.
"""

from typing import Literal

import numpy as np
import torch

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.offpolicy import (
    DualBound,
    clipped_surrogate,
    deal,
    divergence_mask,
    dual_clip,
    log_linear_proximal,
    means,
    required,
    shared,
    sums,
    surrogate_clips,
    truncated_weight,
)


@needs(ratio=False, advantage=False)
def sft(inputs: LossInputs) -> LossOutput:
    """-log π_θ."""
    return LossOutput(-inputs.logprob)


@needs(ratio=False)
def reinforce(inputs: LossInputs) -> LossOutput:
    """-A·log π_θ, without an off-policy correction: biased by the policy's change since sampling. Williams, 1992."""
    return LossOutput(-inputs.advantage * inputs.logprob)


@needs(asks=("minibatches",))
def grpo(
    inputs: LossInputs,
    *,
    low: float = 0.2,
    high: float = 0.2,
    minibatches: int = 1,
    dual_clip_at: DualBound | None = None,
) -> LossOutput:
    """-min(wA, clip(w, 1-low, 1+high)A). arXiv 2402.03300 eq. 3; the lane's `kl` adds a KL term.

    low: Distance below 1 to which the ratio has a gradient. high: Distance above 1 to which the ratio has a gradient.
    minibatches: Optimizer steps per batch. dual_clip_at: Bound of `dual_clip`, 3 in its paper. Default: none.
    """
    log_weight = inputs.log_weight
    weight = log_weight.exp()
    loss = -dual_clip(clipped_surrogate(weight, inputs.advantage, low, high), inputs.advantage, dual_clip_at)
    return LossOutput(loss, surrogate_clips(weight.detach(), inputs.advantage, low, high, dual_clip_at))


@needs(critic=True, asks=("minibatches",))
def ppo(
    inputs: LossInputs,
    *,
    low: float = 0.2,
    high: float = 0.2,
    minibatches: int = 1,
    dual_clip_at: DualBound | None = None,
) -> LossOutput:
    """-min(wA, clip(w, 1-low, 1+high)A) with A from GAE(γ, λ). arXiv 1707.06347 eq. 7, advantages 1506.02438 eq. 16.

    The old policy is the policy that sampled. low: Distance below 1 to which the ratio has a gradient. high: Distance above 1
    to which the ratio has a gradient. minibatches: Optimizer steps per batch, for policy and critic. dual_clip_at: Bound of
    `dual_clip`, 3 in its paper. Default: none.
    """
    weight = inputs.log_weight.exp()
    loss = -dual_clip(clipped_surrogate(weight, inputs.advantage, low, high), inputs.advantage, dual_clip_at)
    return LossOutput(loss, surrogate_clips(weight.detach(), inputs.advantage, low, high, dual_clip_at))


@needs(mean="sequences", asks=("minibatches",))
def gspo(inputs: LossInputs, *, low: float = 3e-4, high: float = 4e-4, minibatches: int = 1) -> LossOutput:
    """-min(sA, clip(s, 1-low, 1+high)A) with s = (π_θ(y)/μ(y))^(1/|y|), mean over sequences. arXiv 2507.18071 eq. 5, 7.

    The default bounds are the paper's: a mean over tokens varies far less than a single token. low: Distance below 1 to which
    the ratio has a gradient. high: Distance above 1 to which the ratio has a gradient. minibatches: Optimizer steps per batch.
    """
    sequence = required(inputs.sequence, "sequence")
    ratio = means(inputs.log_weight, sequence).exp()
    advantage = shared(inputs.advantage, sequence)
    loss = -clipped_surrogate(ratio, advantage, low, high)
    clipped = surrogate_clips(ratio.detach(), advantage, low, high)
    return LossOutput(deal(loss, sequence), clipped[sequence])


def dppo(inputs: LossInputs, *, delta: float = 0.2, cap: float = 5.0, tau: float = 1e-3) -> LossOutput:
    """-sg(min(w, cap))·A·log π_θ·1[not masked] + τ(log w)². arXiv 2602.04879.

    The weight is a constant: min(w, cap) has no gradient above the cap, so a bad token with a grown probability would not be
    pushed down. delta: Maximum change of a token's probability; beyond it the token is masked. cap: Maximum of w. tau:
    Coefficient τ of the pull of every token, masked or not, towards μ.
    """
    log_weight = inputs.log_weight
    masked = divergence_mask(inputs.logprob.detach(), inputs.behaviour, inputs.advantage, delta)
    weight = truncated_weight(log_weight.detach(), cap)
    gradient_term = -weight * inputs.advantage * inputs.logprob * ~masked
    return LossOutput(gradient_term + tau * log_weight.square(), masked)


def tis(inputs: LossInputs, *, cap: float = 2.0) -> LossOutput:
    """-sg(min(w, cap))·A·log π_θ. IMPALA's truncation, arXiv 1802.01561. Tokens above the cap count as clipped.

    cap: Maximum of w.
    """
    log_weight = inputs.log_weight.detach()
    loss = -truncated_weight(log_weight, cap) * inputs.advantage * inputs.logprob
    return LossOutput(loss, log_weight.exp() > cap)


def cispo(inputs: LossInputs, *, low: float = 1.0, high: float = 4.0) -> LossOutput:
    """-sg(clip(w, 1-low, 1+high))·A·log π_θ. MiniMax-M1, arXiv 2506.13585 eq. 4 and 5. Tokens beyond a bound count as clipped.

    low: Distance of the minimum weight below 1. 1 is no lower bound, as in the paper. high: Distance of the maximum weight
    above 1; the paper gives no value.
    """
    weight = inputs.log_weight.detach().exp()
    bounded = weight.clamp(1 - low, 1 + high)
    return LossOutput(-bounded * inputs.advantage * inputs.logprob, bounded != weight)


def icepop(inputs: LossInputs, *, alpha: float = 0.5, beta: float = 5.0) -> LossOutput:
    """-M(w)·A, M(w) = w within [alpha, beta], else 0, with constant bounds. arXiv 2510.18855, in the form of INTELLECT-3,
    2512.16144 eq. 1: μ is the engine's policy, w the ratio of the trainer's policy to it.

    alpha: Minimum of w for a trained token. beta: Maximum of w for a trained token.
    """
    weight = inputs.log_weight.exp()
    dropped = (weight < alpha) | (weight > beta)
    return LossOutput(-weight * inputs.advantage * ~dropped, dropped.detach())


def second_moment_bound(log_weight: np.ndarray, advantage: np.ndarray, *, threshold: float = 0.04) -> float:
    """The largest (log w)² that is kept: with the largest ones left out, the mean of the others is at most threshold; inf
    where all are kept.

    Over those tokens of the whole step, before its first update, that could be masked. arXiv 2510.01161.
    """
    pushed = ((advantage > 0) & (log_weight > 0)) | ((advantage < 0) & (log_weight < 0))
    square = np.sort(np.square(np.asarray(log_weight, np.float64)[pushed]))
    within = np.cumsum(square) <= threshold * np.arange(1, len(square) + 1)
    # Means of ever more of the smallest never fall, so those within the threshold come first.
    kept = int(within.sum())
    if kept == len(square):
        return np.inf
    return float(square[kept - 1]) if kept else 0.0


@needs(bound=second_moment_bound)
def m2po(inputs: LossInputs, *, threshold: float = 0.04) -> LossOutput:
    """-M·w·A, M = 0 where (log w)² is above the bound and the step would increase it. arXiv 2510.01161.

    The step would increase it if A > 0 and w > 1, or A < 0 and w < 1, as in the authors' code; the gradient of any other
    outlier pulls it back. As in the paper's algorithm the bound masks outliers, while the authors' code caps them. Masked
    tokens stay in the denominator. threshold: Maximum second moment of log w, see `second_moment_bound`.
    """
    if inputs.bound is None:
        raise ValueError("bound: got none, expected that of the whole step (second_moment_bound)")
    log_weight = inputs.log_weight
    moved = log_weight.detach()
    pushed = torch.where(inputs.advantage > 0, moved > 0, (inputs.advantage < 0) & (moved < 0))
    masked = pushed & (moved.square() > inputs.bound)
    return LossOutput(-log_weight.exp() * inputs.advantage * ~masked, masked)


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

    proximal: Proximal policy π_p, the policy before the batch. "recompute": by a forward pass. "log-linear": interpolated in
    log space (arXiv 2512.06547). minibatches: Optimizer steps per batch, at least 2 with "recompute": with 1, r is 1 everywhere
    and no clip acts. Each is a step at the full learning rate, so a version moves further than under a loss with one step. cap:
    Maximum of ρ. The papers do not truncate ρ; AReaL's code drops the tokens above its cap. low: Distance below 1 to which the
    ratio has a gradient. high: Distance above 1 to which the ratio has a gradient.
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


@needs(mean="sequences")
def opmd(inputs: LossInputs, *, tau: float = 0.1) -> LossOutput:
    """-A·log π_θ(y) + τ/2·(log π_θ(y)/μ(y))², mean over sequences. Kimi k1.5, arXiv 2501.12599 section 2.3.2, with the policy
    that sampled as the old policy.

    A comes from [collect.advantage]. The paper's r - mean(r) is its kind "mean". The default also divides by the group's
    standard deviation s, which gives the paper's loss with τ·s, divided by s. tau: Coefficient τ of the distance.
    """
    sequence = required(inputs.sequence, "sequence")
    advantage = shared(inputs.advantage, sequence)
    distance = sums(inputs.log_weight, sequence)
    loss = -advantage * sums(inputs.logprob, sequence) + tau / 2 * distance.square()
    return LossOutput(deal(loss, sequence))


@needs(mean="sequences")
def topr(inputs: LossInputs) -> LossOutput:
    """-c·A·log π_θ(y), c = 1 where A >= 0, else sg(min(π_θ(y)/μ(y), 1)); mean over sequences. arXiv 2503.14286 section 3.

    No token counts as clipped: a truncated weight still pushes down, with weight 1, and about half of the bad sequences have a
    ratio above 1 while the policy has hardly changed.
    """
    sequence = required(inputs.sequence, "sequence")
    advantage = shared(inputs.advantage, sequence)
    ratio = sums(inputs.log_weight.detach(), sequence).exp()
    weight = torch.where(advantage >= 0, 1.0, ratio.clamp(max=1.0))
    loss = -weight * advantage * sums(inputs.logprob, sequence)
    return LossOutput(deal(loss, sequence))


@needs(ratio=False, mean="pairs", reference=True, advantage=False)
def dpo(inputs: LossInputs, *, beta: float = 0.1) -> LossOutput:
    """-log σ(β·(log π_θ(y_w)/π_ref(y_w) - log π_θ(y_l)/π_ref(y_l))), sequence sums, mean over pairs.

    arXiv 2305.18290 eq. 7. A pair's loss is divided equally among the tokens of both sides. beta: Coefficient β; a smaller
    value lets the policy move further from the reference.
    """
    pair = required(inputs.pair, "pair")
    if bool((pair < 0).any()):
        raise ValueError(
            f"pair: got {int((pair < 0).sum())} tokens outside any pair, expected none: see schemas.experience"
        )
    reference = required(inputs.reference, "reference")
    sides, side = torch.unique(pair, return_inverse=True)
    if len(sides) % 2 or not bool((sides[0::2] + 1 == sides[1::2]).all()):
        raise ValueError(f"pair: got sides {sides.tolist()}, expected both of every pair")
    margin = sums(inputs.logprob - reference, side).view(-1, 2)
    loss = -torch.nn.functional.logsigmoid(beta * (margin[:, 0] - margin[:, 1]))
    of_token = side // 2
    return LossOutput((loss / torch.bincount(of_token))[of_token])


@needs(teacher=True, advantage=False)
def distill(inputs: LossInputs, *, cap: float = 5.0) -> LossOutput:
    """-sg(min(w, cap)·(log π_T - log π_θ - b))·log π_θ: the gradient of each token's KL(π_θ‖π_T), as a policy gradient.

    The single-step term of MiniLLM, arXiv 2306.08543 section 2.2, without a discounted remainder, as in "On-Policy
    Distillation" (Thinking Machines, 2025). b, the step's mean of log π_T - log μ, is a baseline (Williams, 1992): it does not
    change the expectation. With it, a distant teacher pushes down only tokens that it likes less than the others. Tokens above
    the cap count as clipped. cap: Maximum of w.
    """
    teacher = required(inputs.teacher, "teacher")
    log_weight = inputs.log_weight.detach()
    gain = teacher - inputs.logprob.detach() - (inputs.bound or 0.0)
    loss = -truncated_weight(log_weight, cap) * gain * inputs.logprob
    return LossOutput(loss, log_weight.exp() > cap)
