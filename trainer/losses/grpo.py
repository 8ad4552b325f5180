"""GRPO: PPO's clipped surrogate on group advantages, optionally with a KL penalty towards a reference."""

from trainer.loss import LossInputs, LossOutput
from trainer.offpolicy import clipped_surrogate, k3, surrogate_clips


def grpo(
    inputs: LossInputs, *, low: float = 0.2, high: float = 0.2, kl: float = 0.0, minibatches: int = 1
) -> LossOutput:
    """-min(wA, clip(w, 1-low, 1+high)A) + kl·k3(π_θ, π_ref). arXiv 2402.03300 eq. 3 and 4.

    minibatches: optimizer steps per batch (read by the learner).
    """
    weight = inputs.log_weight.exp()
    loss = -clipped_surrogate(weight, inputs.advantage, low, high)
    if kl > 0:
        if inputs.reference is None:
            raise ValueError("reference: got none, expected the reference model's logprobs where kl is above 0")
        loss = loss + kl * k3(inputs.reference - inputs.logprob)
    return LossOutput(loss, surrogate_clips(weight.detach(), inputs.advantage, low, high))
