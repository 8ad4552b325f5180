"""An adapter put into a slot of vLLM's model, and read back there.

The comparison is of exact sums of the bits of every matrix that this worker has whole (`weight_checksums`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from actors.engines.vllm.weight_checksums import HoldsOther, Sums, same, sums


def add_adapter(runner: Any, request: Any) -> None:
    """Make an adapter ready for requests. request: names it and its folder.

    Raises HoldsOther where a matrix is not what was sent, and what vLLM's loader raises.
    """
    model, manager = runner.get_model(), runner.lora_manager
    lora = manager._load_adapter(request)
    sent = _sent(Path(request.lora_path), manager.lora_config.lora_dtype)
    adapters = model.lora_manager
    adapters.add_adapter(lora)
    adapters.activate_adapter(lora.id)
    held = slot_of(model, lora.id, {name: shape for name, (shape, _) in sent.items()})
    for name, value in held:
        if not same(sent[name][1], sums(value)):
            raise HoldsOther(name)


def not_adapted(model: Any, names: list[str]) -> list[str]:
    """The matrices of an adapter for which a model has no place. names: as peft writes them."""
    places = _places(model)
    return [name for name in names if _module_of(model, name)[0] not in places]


def slot_of(model: Any, number: int, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model computes with for each matrix of an adapter, where it has it in one piece.

    A worker has no place for a matrix of another worker's layers: `check_adapted` has made sure that one of them has it.
    """
    places = _places(model)
    slot = model.lora_manager.lora_index_to_id.index(number)
    for name, shape in shapes.items():
        module_name, is_a = _module_of(model, name)
        if module_name not in places:
            continue
        module, index = places[module_name]
        stacked = module.lora_a_stacked if is_a else module.lora_b_stacked
        held = stacked[index][slot, 0, : shape[0], : shape[1]]
        if held.shape == shape:
            yield name, held


def _sent(folder: Path, dtype: torch.dtype) -> dict[str, tuple[torch.Size, Sums]]:
    """The matrices of an adapter folder as vLLM computes with them: B has the scaling in it."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    found = {}
    for name, value in load_file(folder / "adapter_model.safetensors").items():
        value = value.to(dtype)
        value = value * scaling if ".lora_B." in name and scaling != 1 else value
        found[name] = value.shape, sums(value)
    return found


def _places(model: Any) -> dict[str, tuple[Any, int]]:
    adapters = model.lora_manager
    return {
        part: (module, index)
        for whole, module in adapters.modules.items()
        for index, part in enumerate(adapters.packed_modules.get(whole, [whole]))
    }


def _module_of(model: Any, name: str) -> tuple[str, bool]:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    module, is_a = parse_fine_tuned_lora_name(name, mapper.get_rename_mapper() if mapper is not None else None)
    return str(module), bool(is_a)
