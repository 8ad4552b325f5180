"""The tensors of a model under the names that its folder and engines know them by.

transformers holds all experts of a layer in one parameter. Folders, engines and published versions hold them one by one:

    mlp.experts.gate_up_proj [E, 2F, D]  ──  mlp.experts.0.gate_proj.weight [F, D], mlp.experts.0.up_proj.weight [F, D], …
    mlp.experts.down_proj [E, D, F]      ──  mlp.experts.0.down_proj.weight [D, F], …

Of a model with an adapter (see `infra.model.adapter`) the adapter alone is published, as peft names it in a file:

    model.layers.0.self_attn.q_proj.lora_A.default.weight  ──  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

Guarantees: each named tensor is a view, so that writing to it writes to the model; a model without fused experts keeps its
names. A parameter with two names, such as embeddings that are the output matrix too, has the first alone.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ACTIVE = "default"  # the adapter that computes; peft's own name for it


def published(module: "torch.nn.Module", state: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Views of `state` by the names of folders and engines. state: whole tensors of the model, by the model's own names."""
    if hasattr(module, "peft_config"):
        middle = f".{ACTIVE}."
        lora = (name for name in state if ".lora_" in name and middle in name)
        return {adapter_name(name.replace(middle, ".")): state[name] for name in lora}
    tied = getattr(module, "all_tied_weights_keys", {})  # second names, of transformers
    state = {name: value for name, value in state.items() if name not in tied}
    renamings, experts = _mapping(module)
    if not experts:
        return state
    from transformers.core_model_loading import rename_source_key

    by_pattern = {pattern: expert for expert in experts for pattern in expert.source_patterns}
    views: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        renamed, pattern = rename_source_key(name, renamings, experts, reverse=True)
        if pattern is None:
            views[renamed] = value
            continue
        first, *others = by_pattern[pattern].target_patterns
        patterns = [renamed, *(renamed.replace(first, other) for other in others)]
        for index, expert in enumerate(value.unbind(0)):
            for pattern, matrix in zip(patterns, expert.chunk(len(patterns), 0), strict=True):
                views[pattern.replace("*", str(index))] = matrix
    return views


def adapter_name(name: str) -> str:
    """The name in peft's files of the parameter that the model calls `name`."""
    return f"base_model.model.{name}"


def _mapping(module: Any) -> tuple[list[Any], list[Any]]:
    """Conversions from the model's names to a folder's: renamings and the splitting of experts; none for a model
    without fused experts, whose names stay as they are.
    """
    if not hasattr(module, "config"):
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    changes = get_model_conversion_mapping(module, add_legacy=False)[::-1]
    experts = [step.reverse_transform() for step in changes if isinstance(step, WeightConverter) and _fuses(step)]
    if not experts:
        return [], []
    renamings = [step for step in changes if isinstance(step, WeightRenaming) and not isinstance(step, PrefixChange)]
    return [step.reverse_transform() for step in renamings], experts


def _fuses(converter: Any) -> bool:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(step), step.dim) for step in converter.operations if isinstance(step, MergeModulelist | Concatenate)]
    known = kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    return known and len(kinds) == len(converter.operations)
