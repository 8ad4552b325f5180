"""CISPO: the policy gradient with importance weights clipped on both sides; no token loses its gradient."""

from trainer.losses.loss import LossInputs, LossOutput


def cispo(inputs: LossInputs, *, low: float = 1.0, high: float = 4.0) -> LossOutput:
    """-sg(clip(w, 1-low, 1+high))·A·log π_θ. MiniMax-M1, arXiv 2506.13585 eq. 4 and 5.

    clipped: where a bound acts. low: how far below 1 the weight may be; 1 is no lower bound, as the paper trains. high: how far
    above 1; the paper gives no value.
    """
    weight = inputs.log_weight.detach().exp()
    bounded = weight.clamp(1 - low, 1 + high)
    return LossOutput(-bounded * inputs.advantage * inputs.logprob, bounded != weight)
