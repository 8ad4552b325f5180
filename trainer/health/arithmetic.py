"""What a step needs of arithmetic, and what its card holds: for metrics alone, nothing is decided by it.

Needed is a forward and a backward of the policy over what was trained, a prompt once for all of its answers. A reference, a
critic, a second forward of a loss that looks ahead, padding, and what is computed again are none of it, so that the share of
the cards' peak (MFU, see `infra.model.size`) falls where a step spends time on them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from infra.model.size import FORWARD_AND_BACKWARD, TokenCost, peak_tflops, token_cost
from trainer.batch.batch import TrainItem
from trainer.config import TrainerConfig

WITH_FROZEN_WEIGHTS = 2 / FORWARD_AND_BACKWARD  # of a backward the half that makes gradients of weights is not needed


class Arithmetic(msgspec.Struct, frozen=True):
    """Operations of a step against those that the cards can do.

    cost: of the model. share: of a forward and a whole backward, what is needed. peak: operations a second of all cards
    together, 0 where they are not known.

    Example: Arithmetic(cost=TokenCost(position=1.2e9, pair=1.1e5, head=2.7e8), peak=989.5e12)
    """

    cost: TokenCost
    share: float = 1.0
    peak: float = 0.0

    def needed(self, items: Sequence[TrainItem]) -> float:
        """Operations of a step on these: the last token of an answer is no input."""
        positions = pairs = read = 0
        prompts: set[bytes] = set()
        for one in items:
            tokens = one.experience.tokens
            begin = min((span.start for span in one.experience.spans), default=0)
            prompt = tokens[:begin].tobytes()
            known = begin if prompt in prompts else 0
            prompts.add(prompt)
            inputs = len(tokens) - 1
            positions += inputs - known
            pairs += (inputs * (inputs + 1) - known * (known + 1)) // 2
            read += sum(span.stop - span.start for span in one.experience.spans)
        return self.share * self.cost.step(positions, pairs, read)


def open_arithmetic(folder: str | Path, config: TrainerConfig) -> Arithmetic | None:
    """Of the model in a folder, on this process's card and as many of its kind as there are ranks; None for a model that has
    no attention as it is counted here. Raises ConfigError.
    """
    import torch

    try:
        cost = token_cost(folder)
    except AttributeError:
        return None
    card = torch.cuda.get_device_name() if torch.cuda.is_available() and config.dtype == "bfloat16" else ""
    return Arithmetic(
        cost=cost,
        share=1.0 if config.lora is None else WITH_FROZEN_WEIGHTS,
        peak=peak_tflops(card) * 1e12 * config.ranks,
    )


def card_memory() -> tuple[int, int] | None:
    """Bytes in use on this process's card, by whomever, and all it has; None where this process uses none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free, total
