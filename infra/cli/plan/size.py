"""Size of a model: its parameters, and the elements of a token."""

import math
from pathlib import Path
from typing import Any

import msgspec

from infra.model.adapter import adapter_shapes
from infra.model.model import meta_model
from infra.model.names import published
from infra.policies.policy import Adapter


class ModelSize(msgspec.Struct, frozen=True):
    """Numbers of elements. trained: every parameter once, or the adapter's. published: every tensor, or the adapter's.

    kv: keys and values of one token in all layers. kept: values of one token that a forward keeps for the
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

    adapter: the part that is trained and published, None for the whole model.
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
    """Elements of one token that one layer keeps for its backward: the input of each norm, matrix and product once."""
    used = int(getattr(text, "num_experts_per_tok", 0) or 0)
    width = used * int(getattr(text, "moe_intermediate_size", 0) or 0) or int(text.intermediate_size)
    return 6 * int(text.hidden_size) + 3 * queries + 4 * keys + 4 * width
