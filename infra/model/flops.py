"""How much arithmetic a step of training needs, from config.json alone, and how much a card could do meanwhile.

A product of matrices of m·n and n·k takes 2·m·n·k operations; the backward of a product is two of them (arXiv 2001.08361,
section 2.1). What is computed again, padding, and a prompt computed once for each of its answers are no need: the share of the
card's peak is model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B).
"""

from pathlib import Path
from typing import Any

import msgspec

from infra.model.model import meta_model

FORWARD_AND_BACKWARD = 3

# Dense bfloat16 with float32 sums, TFLOP/s, by what torch.cuda.get_device_name begins with; NVIDIA's data sheets, whose figures
# with sparsity are twice these. The longer name comes first.
PEAK_TFLOPS: dict[str, float] = {
    "NVIDIA B200": 2250.0,  # Blackwell data sheet, HGX B200, per GPU
    "NVIDIA H200 NVL": 835.5,  # H200 data sheet
    "NVIDIA H200": 989.5,
    "NVIDIA H100 NVL": 835.5,  # H100 data sheet
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100": 989.5,
    "NVIDIA A100": 312.0,  # A100 data sheet
    "NVIDIA L40S": 362.0,  # L40S data sheet
    "NVIDIA L4": 121.0,  # L4 data sheet
    "NVIDIA A10": 125.0,  # A10 data sheet
}


class TokenCost(msgspec.Struct, frozen=True):
    """Operations of one forward. position: of every token, without attention and head. pair: of a token and one that it sees,
    itself among these. head: of a token that the output matrix is read for.
    """

    position: float
    pair: float
    head: float

    def step(self, positions: int, pairs: int, read: int) -> float:
        """Of a forward and a backward of so many."""
        return FORWARD_AND_BACKWARD * (positions * self.position + pairs * self.pair + read * self.head)


def token_cost(folder: str | Path) -> TokenCost:
    """Of the model that a folder's config.json describes: of experts those that a token is sent to. Raises ConfigError."""
    module: Any = meta_model(folder)
    text = module.config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    experts = int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0)
    used = int(getattr(text, "num_experts_per_tok", 0) or 0)
    weights = 0.0
    for name, value in module.named_parameters():
        if ".layers." in name and value.dim() > 1:
            weights += value.numel() * (used / experts if ".experts." in name and experts else 1.0)
    return TokenCost(
        position=2 * weights,
        pair=4.0 * int(text.num_hidden_layers) * heads * head_dim,
        head=2.0 * int(text.vocab_size) * int(text.hidden_size),
    )


def peak_tflops(card: str) -> float:
    """Of a card by its name, 0 for one that is not in the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3")
    989.5
    """
    return next((peak for name, peak in PEAK_TFLOPS.items() if card.startswith(name)), 0.0)
