"""PPO: the clipped surrogate on token advantages that a critic estimates (`[trainer.critic]`)."""

from trainer.loss import LossInputs, LossOutput, needs
from trainer.offpolicy import clipped_surrogate, surrogate_clips


@needs(critic=True)
def ppo(inputs: LossInputs, *, low: float = 0.2, high: float = 0.2, minibatches: int = 1) -> LossOutput:
    """-min(wA, clip(w, 1-low, 1+high)A) with A from GAE(γ, λ). arXiv 1707.06347 eq. 7, advantages 1506.02438 eq. 16.

    The old policy is the one that sampled. minibatches: optimizer steps per batch, of policy and critic alike.
    """
    weight = inputs.log_weight.exp()
    loss = -clipped_surrogate(weight, inputs.advantage, low, high)
    return LossOutput(loss, surrogate_clips(weight.detach(), inputs.advantage, low, high))
