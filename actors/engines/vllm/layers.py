"""Which tensors a reload must send: vLLM rebuilds a module from all its sources, so layers and modules go whole."""

import re
from collections.abc import Mapping

from infra.policies.tensors import Tensor

_LAYER = re.compile(r"^(.*?\.\d+)\.")
# Above this share of the bytes everything is sent: a partial load makes vLLM complain about each layer left out.
WHOLE_MODEL_SHARE = 0.5


def names_to_send(changed: frozenset[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Every tensor of every layer with a changed one, in the order of `tensors`; all of them where that is most."""
    layers = {layer_of(name) for name in changed}
    names = [name for name in tensors if layer_of(name) in layers]
    total = sum(tensor.num_bytes for tensor in tensors.values())
    if sum(tensors[name].num_bytes for name in names) >= WHOLE_MODEL_SHARE * total:
        return list(tensors)
    return names


def layer_of(name: str) -> str:
    """The layer of a tensor; of one outside the layers, its module.

    >>> layer_of("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3'
    >>> layer_of("model.multi_modal_projector.linear_1.bias")
    'model.multi_modal_projector.linear_1'
    """
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]
