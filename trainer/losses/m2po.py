"""M2PO: of the tokens a step would push further away, the fewest outliers are masked that bring the second moment of log w
below a threshold.
"""

import numpy as np
import torch

from trainer.losses.loss import LossInputs, LossOutput, needs


def second_moment_bound(log_weight: np.ndarray, advantage: np.ndarray, *, threshold: float = 0.04) -> float:
    """The largest (log w)² that is kept: with the largest ones left out, the mean of the others is at most threshold; inf
    where all are kept.

    Over those tokens of the whole step, before its first update, that could be masked. arXiv 2510.01161.
    """
    pushed = ((advantage > 0) & (log_weight > 0)) | ((advantage < 0) & (log_weight < 0))
    square = np.sort(np.square(np.asarray(log_weight, np.float64)[pushed]))
    within = np.cumsum(square) <= threshold * np.arange(1, len(square) + 1)
    # Means of ever more of the smallest never fall, so those within the threshold come first.
    kept = int(within.sum())
    if kept == len(square):
        return np.inf
    return float(square[kept - 1]) if kept else 0.0


@needs(bound=second_moment_bound)
def m2po(inputs: LossInputs, *, threshold: float = 0.04) -> LossOutput:
    """-M·w·A, M = 0 where (log w)² lies above the bound and the step would make it larger. arXiv 2510.01161.

    That is where A > 0 and w > 1, or A < 0 and w < 1, as the authors' code has it (its bound leaves more: it caps the
    outliers where this takes them away, as the paper's algorithm does); any other outlier would be pulled back by its own
    gradient. Masked tokens stay in the denominator. threshold: read by `second_moment_bound`.
    """
    if inputs.bound is None:
        raise ValueError("bound: got none, expected that of the whole step (second_moment_bound)")
    log_weight = inputs.log_weight
    moved = log_weight.detach()
    pushed = torch.where(inputs.advantage > 0, moved > 0, (inputs.advantage < 0) & (moved < 0))
    masked = pushed & (moved.square() > inputs.bound)
    return LossOutput(-log_weight.exp() * inputs.advantage * ~masked, masked)
