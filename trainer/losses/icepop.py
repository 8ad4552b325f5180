"""IcePop: importance weights outside an interval are dropped, on both sides, not truncated."""

from trainer.losses.loss import LossInputs, LossOutput


def icepop(inputs: LossInputs, *, alpha: float = 0.5, beta: float = 5.0) -> LossOutput:
    """-M(w)·A, M(w) = w within [alpha, beta], else 0, the interval a constant. arXiv 2510.18855, in the form of
    INTELLECT-3, 2512.16144 eq. 1: μ is the engine's policy, w the ratio of the trainer's to it.

    alpha, beta: the smallest and the largest w that is trained on.
    """
    weight = inputs.log_weight.exp()
    dropped = (weight < alpha) | (weight > beta)
    return LossOutput(-weight * inputs.advantage * ~dropped, dropped.detach())
