"""PPO: the clipped surrogate on token advantages that a critic estimates (`[trainer.critic]`)."""

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.offpolicy import DualBound, clipped_surrogate, dual_clip, surrogate_clips


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

    The old policy is the one that sampled. low, high: how far below and above 1 the ratio still has a gradient.
    minibatches: optimizer steps per batch, of policy and critic alike. dual_clip_at: see `dual_clip`, 3 in its paper.
    """
    weight = inputs.log_weight.exp()
    loss = -dual_clip(clipped_surrogate(weight, inputs.advantage, low, high), inputs.advantage, dual_clip_at)
    return LossOutput(loss, surrogate_clips(weight.detach(), inputs.advantage, low, high, dual_clip_at))
