"""Every built-in loss: a function of what was sampled, named after itself in `[trainer.lanes.<lane>] loss`.

Notation, per sampled token: μ behaviour, π_p proximal, π_θ current policy; w = π_θ/μ, ρ = π_p/μ, r = π_θ/π_p; A advantage;
sg(x) is x without a gradient. `trainer.config.LOSSES` lists the names.
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
    k3,
    log_linear_proximal,
    means,
    required,
    score_function_k1,
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
    """-A·log π_θ, uncorrected: biased by as much as the policy has moved since. Williams, 1992."""
    return LossOutput(-inputs.advantage * inputs.logprob)


@needs(asks=("minibatches", "kl"))
def grpo(
    inputs: LossInputs,
    *,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    estimator: Literal["k1", "k3"] = "k3",
    minibatches: int = 1,
    dual_clip_at: DualBound | None = None,
) -> LossOutput:
    """-min(wA, clip(w, 1-low, 1+high)A) + kl·KL(π_θ, π_ref). arXiv 2402.03300 eq. 3 and 4.

    estimator: k3 is differentiated as written in eq. 4, which is not the gradient of this KL; k1 so, would have no gradient on
    average (2506.09477), so it enters as the weight of log π_θ. The lane's own `kl` serves any loss and is unbiased: prefer it.
    kl: weight of the KL to the reference model, 0 for none. low, high: distances below and above 1 within which the ratio has a
    gradient. minibatches: optimizer steps per batch. dual_clip_at: see `dual_clip`, 3 in its paper.
    """
    log_weight = inputs.log_weight
    weight = log_weight.exp()
    loss = -dual_clip(clipped_surrogate(weight, inputs.advantage, low, high), inputs.advantage, dual_clip_at)
    if kl > 0:
        if inputs.reference is None:
            raise ValueError("reference: got none, expected the reference model's logprobs where kl is above 0")
        if estimator == "k3":
            loss = loss + kl * k3(inputs.reference - inputs.logprob)
        else:
            loss = loss + kl * score_function_k1(inputs.logprob, inputs.reference, weight)
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

    The old policy is the policy that sampled. low, high: distances below and above 1 within which the ratio has a gradient.
    minibatches: optimizer steps per batch, of policy and critic alike. dual_clip_at: see `dual_clip`, 3 in its paper.
    """
    weight = inputs.log_weight.exp()
    loss = -dual_clip(clipped_surrogate(weight, inputs.advantage, low, high), inputs.advantage, dual_clip_at)
    return LossOutput(loss, surrogate_clips(weight.detach(), inputs.advantage, low, high, dual_clip_at))


@needs(mean="sequences", asks=("minibatches",))
def gspo(inputs: LossInputs, *, low: float = 3e-4, high: float = 4e-4, minibatches: int = 1) -> LossOutput:
    """-min(sA, clip(s, 1-low, 1+high)A) with s = (π_θ(y)/μ(y))^(1/|y|), mean over sequences. arXiv 2507.18071 eq. 5, 7.

    The bounds are the paper's: a mean over tokens moves far less than a token does. low, high: distances below and above 1
    within which the ratio has a gradient. minibatches: optimizer steps per batch.
    """
    sequence = required(inputs.sequence, "sequence")
    ratio = means(inputs.log_weight, sequence).exp()
    advantage = shared(inputs.advantage, sequence)
    loss = -clipped_surrogate(ratio, advantage, low, high)
    clipped = surrogate_clips(ratio.detach(), advantage, low, high)
    return LossOutput(deal(loss, sequence), clipped[sequence])


def dppo(inputs: LossInputs, *, delta: float = 0.2, cap: float = 5.0, tau: float = 1e-3) -> LossOutput:
    """-sg(min(w, cap))·A·log π_θ·1[not masked] + τ(log w)². arXiv 2602.04879.

    The weight is a constant: differentiating min(w, cap) instead is flat above the cap, so a bad token that has grown would get
    no push down. delta: bound of the change of a token's probability. cap: the largest w. tau: pulls every token, masked or
    not, towards μ.
    """
    log_weight = inputs.log_weight
    masked = divergence_mask(inputs.logprob.detach(), inputs.behaviour, inputs.advantage, delta)
    weight = truncated_weight(log_weight.detach(), cap)
    gradient_term = -weight * inputs.advantage * inputs.logprob * ~masked
    return LossOutput(gradient_term + tau * log_weight.square(), masked)


def tis(inputs: LossInputs, *, cap: float = 2.0) -> LossOutput:
    """-sg(min(w, cap))·A·log π_θ. IMPALA's truncation, arXiv 1802.01561; clipped: where the cap acts.

    cap: the largest w.
    """
    log_weight = inputs.log_weight.detach()
    loss = -truncated_weight(log_weight, cap) * inputs.advantage * inputs.logprob
    return LossOutput(loss, log_weight.exp() > cap)


def cispo(inputs: LossInputs, *, low: float = 1.0, high: float = 4.0) -> LossOutput:
    """-sg(clip(w, 1-low, 1+high))·A·log π_θ. MiniMax-M1, arXiv 2506.13585 eq. 4 and 5.

    clipped: where a bound acts. low: distance below 1 of the least weight; 1 is no lower bound, as the paper trains. high:
    distance above 1 of the largest weight; the paper gives no value.
    """
    weight = inputs.log_weight.detach().exp()
    bounded = weight.clamp(1 - low, 1 + high)
    return LossOutput(-bounded * inputs.advantage * inputs.logprob, bounded != weight)


def icepop(inputs: LossInputs, *, alpha: float = 0.5, beta: float = 5.0) -> LossOutput:
    """-M(w)·A, M(w) = w within [alpha, beta], else 0, the interval a constant. arXiv 2510.18855, in the form of
    INTELLECT-3, 2512.16144 eq. 1: μ is the engine's policy, w the ratio of the trainer's to it.

    alpha, beta: the smallest and the largest w that is trained on.
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
    """-M·w·A, M = 0 where (log w)² lies above the bound and the step would make it larger. arXiv 2510.01161.

    That is where A > 0 and w > 1, or A < 0 and w < 1, as the authors' code has it (its bound leaves more: it caps the
    outliers where this takes them away, as the paper's algorithm does); any other outlier would be pulled back by its own
    gradient. Masked tokens stay in the denominator. threshold: read by `second_moment_bound`.
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

    proximal: the policy before the batch, by a forward of its own, or interpolated in log space (2512.06547). minibatches:
    optimizer steps per batch, at least 2 with "recompute": with one, r is 1 everywhere and no clip acts. Each is a step at the
    full learning rate, so a version moves further than under a loss that takes one. cap: the largest ρ; neither paper truncates
    ρ; AReaL's code drops the tokens above it. low, high: distances below and above 1 within which the ratio has a gradient.
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
    """-A·log π_θ(y) + τ/2·(log π_θ(y)/μ(y))², mean over sequences. Kimi k1.5, arXiv 2501.12599 section 2.3.2, whose old policy
    is here the one that sampled.

    A is what [collect.advantage] gives. The paper's r - mean(r) is its kind "mean"; the default divides by the group's
    standard deviation s as well, which gives the paper's loss with τ·s, divided by s. tau: weight of the distance, τ.
    """
    sequence = required(inputs.sequence, "sequence")
    advantage = shared(inputs.advantage, sequence)
    distance = sums(inputs.log_weight, sequence)
    loss = -advantage * sums(inputs.logprob, sequence) + tau / 2 * distance.square()
    return LossOutput(deal(loss, sequence))


@needs(mean="sequences")
def topr(inputs: LossInputs) -> LossOutput:
    """-c·A·log π_θ(y), c = 1 where A >= 0, else sg(min(π_θ(y)/μ(y), 1)); mean over sequences. arXiv 2503.14286 section 3.

    Nothing counts as clipped: a truncated weight still pushes down, with weight 1, and about half of the bad sequences of a
    policy that has hardly moved have a ratio above 1.
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

    arXiv 2305.18290 eq. 7. Each pair's loss lies in equal parts on the tokens of both sides. beta: a small one lets the policy
    go further from the reference.
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

    The single-step term of MiniLLM, arXiv 2306.08543 section 2.2; without a discounted rest as in "On-Policy
    Distillation" (Thinking Machines, 2025). b, the mean of log π_T - log μ over the step, is a baseline (Williams, 1992): it
    leaves the expectation, and a teacher far away pushes down only what it likes less than the rest. clipped: where the cap
    acts. cap: the largest w.
    """
    teacher = required(inputs.teacher, "teacher")
    log_weight = inputs.log_weight.detach()
    gain = teacher - inputs.logprob.detach() - (inputs.bound or 0.0)
    loss = -truncated_weight(log_weight, cap) * gain * inputs.logprob
    return LossOutput(loss, log_weight.exp() > cap)
