"""What a lane may add to any loss: a pull to the reference, and a bonus for entropy. Off, nothing is computed.

Both are means over the lane's sampled tokens, with the items' weights, times the lane's weight. The entropy is exact over
the vocabulary, under the temperature each token was sampled with; the KL is estimated from the sampled token.
"""

from typing import NamedTuple

import torch

from trainer.losses.loss import LossInputs, Objective
from trainer.losses.offpolicy import reference_k3, required, truncated_weight

# A larger importance weight is cut to this, as the losses do: beyond it the estimate of the KL is biased, towards 0.
KL_CAP = 5.0


class Penalty(NamedTuple):
    """The penalties of a lane over N tokens.

    loss: what it adds to the step's loss. kl, entropy: [N], as measured, without gradient; None where not asked for.
    """

    loss: torch.Tensor
    kl: torch.Tensor | None
    entropy: torch.Tensor | None


def lane_penalty(objective: Objective, inputs: LossInputs, weight: torch.Tensor, num_tokens: float) -> Penalty:
    """kl·KL(π_θ‖π_ref) - entropy·H(π_θ) of these tokens. weight: [N]. num_tokens: of the lane in the whole step."""
    terms, kl = torch.zeros_like(inputs.logprob), None
    if objective.kl > 0:
        reference = required(inputs.reference, "reference")
        kl = reference_k3(inputs.logprob, reference, importance(inputs))
        terms = terms + objective.kl * kl
    if objective.entropy > 0:
        terms = terms - objective.entropy * required(inputs.entropy, "entropy")
    loss = objective.weight * (terms * weight).sum() / num_tokens
    return Penalty(
        loss, None if kl is None else kl.detach(), None if inputs.entropy is None else inputs.entropy.detach()
    )


def importance(inputs: LossInputs) -> torch.Tensor:
    """min(π_θ/μ, KL_CAP), and 1 where μ is not the policy's own (demonstrations): there the term is no divergence, but
    pulls the token's probability to the reference's, as ½(log(π_θ/π_ref))² does.
    """
    log_weight = (inputs.logprob.detach() - inputs.behaviour).masked_fill(~inputs.ratio, 0.0)
    return truncated_weight(log_weight, KL_CAP)
