"""GRPO: PPO's clipped surrogate on group advantages, optionally with a KL penalty towards a reference."""

from typing import Literal

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.offpolicy import DualBound, clipped_surrogate, dual_clip, k3, score_function_k1, surrogate_clips


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

    estimator: k3 is differentiated as written in eq. 4, which is not the gradient of this KL; k1 so, would have no
    gradient on average (2506.09477), so it enters as the weight of log π_θ. The lane's own `kl` serves any loss and is
    unbiased: prefer it. kl: weight of the KL to the reference model, 0 for none. low, high: how far below and above 1 the
    ratio still has a gradient. minibatches: optimizer steps per batch. dual_clip_at: see `dual_clip`, 3 in its paper.
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
