"""GSPO: one importance ratio per sequence, the geometric mean of its tokens', clipped as a whole."""

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.offpolicy import clipped_surrogate, surrogate_clips
from trainer.losses.sequences import deal, means, of_each, required


@needs(mean="sequences", asks=("minibatches",))
def gspo(inputs: LossInputs, *, low: float = 3e-4, high: float = 4e-4, minibatches: int = 1) -> LossOutput:
    """-min(sA, clip(s, 1-low, 1+high)A) with s = (π_θ(y)/μ(y))^(1/|y|), mean over sequences. arXiv 2507.18071 eq. 5, 7.

    The bounds are the paper's: a mean over tokens moves far less than one token does. low, high: how far below and
    above 1 the ratio still has a gradient. minibatches: optimizer steps per batch.
    """
    sequence = required(inputs.sequence, "sequence")
    ratio = means(inputs.log_weight, sequence).exp()
    advantage = of_each(inputs.advantage, sequence)
    loss = -clipped_surrogate(ratio, advantage, low, high)
    clipped = surrogate_clips(ratio.detach(), advantage, low, high)
    return LossOutput(deal(loss, sequence), clipped[sequence])
