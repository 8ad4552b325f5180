"""OPMD: online policy mirror descent, a policy gradient without ratios, held near the sampler by a squared distance."""

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.sequences import deal, of_each, required, sums


@needs(mean="sequences")
def opmd(inputs: LossInputs, *, tau: float = 0.1) -> LossOutput:
    """-A·log π_θ(y) + τ/2·(log π_θ(y)/μ(y))², mean over sequences. Kimi k1.5, arXiv 2501.12599 section 2.3.2, whose old policy
    is here the one that sampled.

    A is what [collect.advantage] gives. The paper's r - mean(r) is its kind "mean"; the default divides by the group's
    standard deviation s as well, which gives the paper's loss with τ·s, divided by s. tau: weight of the distance, τ.
    """
    sequence = required(inputs.sequence, "sequence")
    advantage = of_each(inputs.advantage, sequence)
    distance = sums(inputs.log_weight, sequence)
    loss = -advantage * sums(inputs.logprob, sequence) + tau / 2 * distance.square()
    return LossOutput(deal(loss, sequence))
