"""TOPR: good answers are imitated as they are, bad ones pushed down only as long as the policy still gives them."""

import torch

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.sequences import deal, of_each, required, sums


@needs(mean="sequences")
def topr(inputs: LossInputs) -> LossOutput:
    """-c·A·log π_θ(y), c = 1 where A >= 0, else sg(min(π_θ(y)/μ(y), 1)); mean over sequences. arXiv 2503.14286 section 3.

    clipped: sequences whose weight was truncated.
    """
    sequence = required(inputs.sequence, "sequence")
    advantage = of_each(inputs.advantage, sequence)
    ratio = sums(inputs.log_weight.detach(), sequence).exp()
    weight = torch.where(advantage >= 0, 1.0, ratio.clamp(max=1.0))
    loss = -weight * advantage * sums(inputs.logprob, sequence)
    return LossOutput(deal(loss, sequence), ((advantage < 0) & (ratio > 1))[sequence])
