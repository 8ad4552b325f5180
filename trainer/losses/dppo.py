"""DPPO: a policy gradient with a truncated importance weight, masked where a probability already moved far enough."""

from trainer.losses.loss import LossInputs, LossOutput
from trainer.losses.offpolicy import divergence_mask, truncated_weight


def dppo(inputs: LossInputs, *, delta: float = 0.2, cap: float = 5.0, tau: float = 1e-3) -> LossOutput:
    """-sg(min(w, cap))·A·log π_θ·1[not masked] + τ(log w)². arXiv 2602.04879.

    The weight is a constant: differentiating min(w, cap) instead is flat above the cap, so a bad token that has grown
    would get no push down. delta: in probability. cap: the largest w. tau: pulls every token,
    masked or not, towards μ.
    """
    log_weight = inputs.log_weight
    masked = divergence_mask(inputs.logprob.detach(), inputs.behaviour, inputs.advantage, delta)
    weight = truncated_weight(log_weight.detach(), cap)
    gradient_term = -weight * inputs.advantage * inputs.logprob * ~masked
    return LossOutput(gradient_term + tau * log_weight.square(), masked)
