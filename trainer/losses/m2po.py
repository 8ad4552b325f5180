"""M2PO: the fewest outlying tokens are masked that bring the second moment of log w below a threshold."""

import numpy as np

from trainer.loss import LossInputs, LossOutput, needs


def second_moment_bound(log_weight: np.ndarray, *, threshold: float = 0.04) -> float:
    """The largest (log w)² that is kept: with the largest ones left out, the mean of the others is at most threshold.

    Over the tokens of the whole step before its first update. arXiv 2510.01161.
    """
    square = np.sort(np.square(np.asarray(log_weight, np.float64)))
    within = np.cumsum(square) <= threshold * np.arange(1, len(square) + 1)
    # Means of ever more of the smallest never fall, so those within the threshold come first.
    kept = int(within.sum())
    return float(square[kept - 1]) if kept else -1.0


@needs(bound=second_moment_bound)
def m2po(inputs: LossInputs, *, threshold: float = 0.04) -> LossOutput:
    """-M·w·A, M = 0 where (log w)² lies above the bound. arXiv 2510.01161.

    Masked tokens stay in the denominator. threshold: read by `second_moment_bound`.
    """
    if inputs.bound is None:
        raise ValueError("bound: got none, expected that of the whole step (second_moment_bound)")
    log_weight = inputs.log_weight
    masked = log_weight.detach().square() > inputs.bound
    return LossOutput(-log_weight.exp() * inputs.advantage * ~masked, masked)
