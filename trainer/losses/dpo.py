"""DPO: the chosen answer of a pair is made likelier than the rejected one, as compared with the reference."""

import torch

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.sequences import required, sums


@needs(ratio=False, mean="pairs", reference=True, advantage=False)
def dpo(inputs: LossInputs, *, beta: float = 0.1) -> LossOutput:
    """-log σ(β·(log π_θ(y_w)/π_ref(y_w) - log π_θ(y_l)/π_ref(y_l))), sequence sums, mean over pairs.

    arXiv 2305.18290 eq. 7. Each pair's loss lies in equal parts on the tokens of both sides. beta: a small one lets the policy
    go further from the reference.
    """
    pair = required(inputs.pair, "pair")
    if bool((pair < 0).any()):
        raise ValueError(f"pair: got {int((pair < 0).sum())} tokens outside any pair, expected none: see schemas.pairs")
    reference = required(inputs.reference, "reference")
    sides, side = torch.unique(pair, return_inverse=True)
    if len(sides) % 2 or not bool((sides[0::2] + 1 == sides[1::2]).all()):
        raise ValueError(f"pair: got sides {sides.tolist()}, expected both of every pair")
    margin = sums(inputs.logprob - reference, side).view(-1, 2)
    loss = -torch.nn.functional.logsigmoid(beta * (margin[:, 0] - margin[:, 1]))
    of_token = side // 2
    return LossOutput((loss / torch.bincount(of_token))[of_token])
