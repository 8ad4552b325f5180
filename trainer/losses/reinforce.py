"""REINFORCE: the plain policy gradient, as if what was sampled were always fresh."""

from trainer.losses.loss import LossInputs, LossOutput, needs


@needs(ratio=False)
def reinforce(inputs: LossInputs) -> LossOutput:
    """-A·log π_θ, uncorrected: biased by as much as the policy has moved since. Williams, 1992."""
    return LossOutput(-inputs.advantage * inputs.logprob)
