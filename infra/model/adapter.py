"""LoRA adapters on a model: the same code for the learner and for the torch engine, through peft.

A model with an adapter keeps its class; its base is frozen. Only the adapter is published, by the names of peft's
own adapter_model.safetensors, so `model_tensors`, `load_into` and `unlike` of `infra.model.model` read and write these names.

Guarantees: B begins as zeros, so that the policy begins as the base; A is the same in every process that puts the same adapter
on. Modules that cannot be adapted are refused by name on the meta device, before weights are loaded.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from infra.model.model import file_tensors, load_model, meta_model, model_folder
from infra.model.names import ACTIVE, adapter_name
from infra.policies.manifest import HashedTensors, sha256_hex
from infra.policies.policy import Adapter
from infra.policies.tensors import Tensor, pieces_of, to_torch
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

ALL_LINEAR = "all-linear"
TENSORS = "adapter_model.safetensors"
METADATA = {"format": "pt"}
REFERENCE = "reference"  # an adapter beside the one that computes
WHERE = "trainer.lora.targets"


def find_adapter(folder: str | Path, *, rank: int, alpha: int, targets: tuple[str, ...]) -> Adapter:
    """The adapter that settings describe, of the model in a folder. Reads all of its weights once, for their hash.

    targets: see `named_adapter`. Raises ConfigError for a target or a model that cannot be adapted.
    """
    adapter = named_adapter(folder, rank=rank, alpha=alpha, targets=targets)
    return msgspec.structs.replace(adapter, base=base_hash(folder))


def named_adapter(folder: str | Path, *, rank: int, alpha: int, targets: tuple[str, ...]) -> Adapter:
    """`find_adapter` without the hash of the base, from config.json alone.

    targets: ends of module names, or "all-linear" for every linear module but the output matrix. Raises ConfigError for
    a target or a model that cannot be adapted.
    """
    module: Any = meta_model(folder)
    within = _text_model(module)
    linear = _linear(module, within)
    if targets == (ALL_LINEAR,):
        targets = tuple(sorted({_ending(name) for name in linear}))
    adapter = Adapter(rank=rank, alpha=alpha, targets=tuple(sorted(set(targets))), base="", within=within)
    _check_targets(module, adapter, linear, folder)
    shapes = adapter_shapes(module, adapter)
    try:
        put_adapter(module, adapter)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{WHERE}: {folder} ({module.config.model_type}): peft cannot adapt it: {error}") from error
    if {name: tuple(value.shape) for name, value in adapter_parameters(module).items()} != shapes:
        raise ConfigError(f"{WHERE}: {folder} ({module.config.model_type}): peft adapts other modules than are named")
    return adapter


def put_adapter(module: "torch.nn.Module", adapter: Adapter, *, with_reference: bool = False, seed: int = 0) -> None:
    """Put an adapter onto a model without one, in the model's dtype and on its device; the base is frozen.

    with_reference: and a second one, REFERENCE, that begins as the first and is neither trained nor published. Raises
    ValueError where peft refuses the model.
    """
    from peft import inject_adapter_in_model

    names = (REFERENCE, ACTIVE) if with_reference else (ACTIVE,)  # peft trains the last
    for name in names:
        if hasattr(module, "peft_config"):
            del module.peft_config  # else peft warns of the second adapter
        inject_adapter_in_model(_peft_config(adapter), module, adapter_name=name)
        _begin(adapter_parameters(module, name), seed)


def _begin(parameters: "Mapping[str, torch.nn.Parameter]", seed: int) -> None:
    import torch

    with torch.no_grad():
        for name, value in parameters.items():
            if ".lora_B." in name:
                value.zero_()
                continue
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)
            # Kaiming's uniform with a = √5, as peft begins A: within 1/√(inputs).
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float32)
            value.copy_((drawn * 2 - 1) / math.sqrt(value.shape[1]))


@contextmanager
def computing_with(module: "torch.nn.Module", name: str) -> Iterator[None]:
    """The model under another of its adapters than ACTIVE. For forwards without gradients: which adapter is trained stays."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._active_adapter = name  # `set_adapter` would also turn gradients on and off
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = ACTIVE


def prepare() -> None:
    """Import peft, which takes seconds, before a pause in which it would be waited for."""
    import peft  # noqa: F401


def remove_adapter(module: Any) -> None:
    """Give a model back without adapters, its base as it was."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            module.set_submodule(name, layer.get_base_layer())
    if hasattr(module, "peft_config"):
        del module.peft_config


def adapter_parameters(module: "torch.nn.Module", name: str = ACTIVE) -> "dict[str, torch.nn.Parameter]":
    """The parameters of one adapter of a model, by published names."""
    middle = f".{name}."
    return {
        adapter_name(key.replace(middle, ".")): value
        for key, value in module.named_parameters()
        if ".lora_" in key and middle in key
    }


def adapter_shapes(module: "torch.nn.Module", adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an adapter's tensors, of a model (also on the meta device) that has none on it yet."""
    found: dict[str, tuple[int, ...]] = {}
    for name, layer in _matched(module, adapter).items():
        found[adapter_name(f"{name}.lora_A.weight")] = (adapter.rank, layer.in_features)
        found[adapter_name(f"{name}.lora_B.weight")] = (layer.out_features, adapter.rank)
    return found


def merged_model(
    folder: str | Path, adapter: Adapter, tensors: Mapping[str, Tensor], *, dtype: str
) -> "torch.nn.Module":
    """The model of a folder with an adapter added to its weights in float32. Raises ConfigError, ValueError.

    dtype: of the result; see DTYPES.
    """
    import torch

    module = load_model(folder, dtype=dtype)
    if odd := sorted(set(tensors) ^ set(adapter_shapes(module, adapter))):
        raise ValueError(f"adapter: {odd[0]} is not what {folder} has under {adapter} ({len(odd)} names differ)")
    with torch.no_grad():
        for name, layer in _matched(module, adapter).items():
            a, b = (to_torch(tensors[adapter_name(f"{name}.lora_{side}.weight")]).float() for side in "AB")
            layer.weight.copy_(layer.weight.float() + adapter.alpha / adapter.rank * (b @ a))
    return module


def write_adapter_folder(folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft does, into a folder that is there."""
    config = _peft_config(adapter)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    with (folder / TENSORS).open("wb") as file:
        file.writelines(pieces_of(tensors, METADATA))


def base_hash(folder: str | Path) -> str:
    """sha256 over names, dtypes, shapes and data of a folder's tensors, however its files cut them. Raises ConfigError."""
    return sha256_hex(msgspec.json.encode(HashedTensors(file_tensors(model_folder(folder))).entries))


def _text_model(module: Any) -> str:
    """Name of the text model within one that takes pictures too, "" for text alone."""
    if module.config.get_text_config() is module.config:
        return ""
    decoder = module.get_decoder()
    return next((name for name, part in module.named_modules() if part is decoder), "")


def _linear(module: Any, within: str) -> "dict[str, torch.nn.Linear]":
    """Modules that can be adapted, by name: every linear module but the output matrix, of which only the weight is read."""
    import torch

    head = module.get_output_embeddings()
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear) and part is not head and name.startswith(within)
    }


def _ending(name: str) -> str:
    """The end of a module's name that names its kind.

    >>> _ending("model.layers.0.self_attn.q_proj"), _ending("model.layers.0.mlp.0")
    ('q_proj', 'mlp.0')
    """
    *_, before, last = ["", *name.split(".")]
    return f"{before}.{last}" if last.isdigit() else last


def _matched(module: Any, adapter: Adapter) -> dict[str, Any]:
    ends = tuple(f".{target}" for target in adapter.targets)
    return {
        name: part
        for name, part in module.named_modules()
        if f".{name}".endswith(ends) and name.startswith(adapter.within)
    }


def _check_targets(module: Any, adapter: Adapter, linear: Mapping[str, Any], folder: str | Path) -> None:
    """Raise ConfigError for a target that is not a linear module of the model."""
    there = ", ".join(sorted({_ending(name) for name in linear})) or "none"
    what = f"{folder} ({module.config.model_type})"
    for target in adapter.targets:
        found = _matched(module, msgspec.structs.replace(adapter, targets=(target,)))
        if not found:
            raise ConfigError(f'{WHERE}: got "{target}", which names no module of {what}; expected some of {there}')
        if odd := next((name for name in found if name not in linear), ""):
            raise ConfigError(
                f'{WHERE}: got "{target}", and {odd} of {what} is a {type(found[odd]).__name__}; expected linear modules '
                f"other than the output matrix: {there}"
            )
    if not adapter.targets:
        raise ConfigError(f"{WHERE}: got none, expected some of {there}")


def _peft_config(adapter: Adapter) -> Any:
    from peft import LoraConfig, TaskType

    inside = f"(?!{re.escape(adapter.within)}\\.).*" if adapter.within else None
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.targets),
        exclude_modules=inside,
        lora_dropout=0.0,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    )
