"""TIS: the policy gradient with truncated importance weights, nothing masked."""

from trainer.losses.loss import LossInputs, LossOutput
from trainer.losses.offpolicy import truncated_weight


def tis(inputs: LossInputs, *, cap: float = 2.0) -> LossOutput:
    """-sg(min(w, cap))·A·log π_θ. IMPALA's truncation, arXiv 1802.01561; clipped: where the cap acts.

    cap: the largest w.
    """
    log_weight = inputs.log_weight.detach()
    loss = -truncated_weight(log_weight, cap) * inputs.advantage * inputs.logprob
    return LossOutput(loss, log_weight.exp() > cap)
