"""Size of a model: its parameters, and the floating-point operations of a token."""

import math
from pathlib import Path
from typing import Any

import msgspec

from infra.model.adapter import adapter_shapes
from infra.model.model import meta_model
from infra.model.names import published
from infra.policies.policy import Adapter


class ModelSize(msgspec.Struct, frozen=True):
    """Numbers of elements. trained: every parameter once, or the adapter's. published: every tensor, tied ones under each name.

    kv: keys and values of one token in all layers. kept: what a forward keeps of one token for the
    backward, one layer (rough). layers: count.
    """

    trained: int
    published: int
    largest: int
    vocabulary: int
    hidden: int
    kv: int
    kept: int
    layers: int
    frozen: int = 0

    @property
    def computed(self) -> int:
        """Every parameter that a forward takes, once."""
        return self.trained + self.frozen


def model_size(folder: str | Path, adapter: Adapter | None = None) -> ModelSize:
    """Size of the model that a folder's config.json describes; nothing else of the folder is read. Raises ConfigError.

    adapter: what is trained of it and published, None for all.
    """
    module: Any = meta_model(folder)
    shapes = {name: tuple(value.shape) for name, value in published(module, module.state_dict()).items()}
    if adapter is not None:
        shapes = adapter_shapes(module, adapter)
    text = module.config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    parameters = dict(module.named_parameters())
    layers = int(text.num_hidden_layers)
    whole, announced = sum(value.numel() for value in parameters.values()), sum(map(math.prod, shapes.values()))
    return ModelSize(
        trained=whole if adapter is None else announced,
        published=announced,
        largest=max(value.numel() for value in parameters.values()),
        vocabulary=int(text.vocab_size),
        hidden=int(text.hidden_size),
        kv=2 * layers * kv_heads * head_dim,
        kept=_kept(text, heads * head_dim, kv_heads * head_dim),
        layers=layers,
        frozen=0 if adapter is None else whole,
    )


def _kept(text: Any, queries: int, keys: int) -> int:
    """Elements of one token that one layer keeps for its backward: what goes into each norm, matrix and product once."""
    used = int(getattr(text, "num_experts_per_tok", 0) or 0)
    width = used * int(getattr(text, "moe_intermediate_size", 0) or 0) or int(text.intermediate_size)
    return 6 * int(text.hidden_size) + 3 * queries + 4 * keys + 4 * width


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
        """Operations of a forward and a backward pass."""
        return FORWARD_AND_BACKWARD * (positions * self.position + pairs * self.pair + read * self.head)


def token_cost(folder: str | Path) -> TokenCost:
    """Cost of a token of the model that a folder's config.json describes: of experts those that a token is sent to. Raises
    ConfigError.
    """
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
    """Peak TFLOP/s of a card by its name, 0 for a card that is not in the table.

    >>> peak_tflops("NVIDIA H100 80GB HBM3")
    989.5
    """
    return next((peak for name, peak in PEAK_TFLOPS.items() if card.startswith(name)), 0.0)
