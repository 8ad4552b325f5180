"""How large a model is, from its config.json alone: it is built on torch's meta device, where tensors have no bytes."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from infra.model.adapter import adapter_shapes
from infra.model.model import meta_model
from infra.model.names import published
from infra.policies.adapter import Adapter


class ModelSize(msgspec.Struct, frozen=True):
    """Numbers of elements, if not said otherwise.

    trained: every parameter once, of a model with an adapter the adapter's. frozen: those that are only computed with.
    published: every tensor of a version; tied ones count under each of their names. largest:
    of the parameters. layer: of the largest layer's. vocabulary, hidden: of the output matrix. kv: keys and values of one
    token in all layers. kept: what a forward keeps of one token for the backward, one layer (rough). layers, tensors: counts.

    Example: ModelSize(trained=8_190_735_360, published=8_190_735_360, largest=622_329_856, layer=192_947_456,
                       vocabulary=151_936, hidden=4096, kv=73_728, kept=…, layers=36, tensors=399)
    """

    trained: int
    published: int
    largest: int
    layer: int
    vocabulary: int
    hidden: int
    kv: int
    kept: int
    layers: int
    tensors: int
    frozen: int = 0

    @property
    def computed(self) -> int:
        """Every parameter that a forward takes, once."""
        return self.trained + self.frozen


def model_size(folder: str | Path, adapter: Adapter | None = None) -> ModelSize:
    """Of the model that a folder's config.json describes; nothing else of the folder is read. Raises ConfigError.

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
    per_layer: Counter[str] = Counter()
    for name, value in parameters.items():
        start, dot, rest = name.partition(".layers.")
        if dot:
            per_layer[f"{start}.{rest.partition('.')[0]}"] += value.numel()
    layers = int(text.num_hidden_layers)
    whole, announced = sum(value.numel() for value in parameters.values()), sum(map(math.prod, shapes.values()))
    return ModelSize(
        trained=whole if adapter is None else announced,
        published=announced,
        largest=max(value.numel() for value in parameters.values()),
        layer=max(per_layer.values(), default=0),
        vocabulary=int(text.vocab_size),
        hidden=int(text.hidden_size),
        kv=2 * layers * kv_heads * head_dim,
        kept=_kept(text, heads * head_dim, kv_heads * head_dim),
        layers=layers,
        tensors=len(shapes),
        frozen=0 if adapter is None else whole,
    )


def _kept(text: Any, queries: int, keys: int) -> int:
    """Elements of one token that one layer keeps for its backward: what goes into each norm, matrix and product once."""
    used = int(getattr(text, "num_experts_per_tok", 0) or 0)
    width = used * int(getattr(text, "moe_intermediate_size", 0) or 0) or int(text.intermediate_size)
    return 6 * int(text.hidden_size) + 3 * queries + 4 * keys + 4 * width
