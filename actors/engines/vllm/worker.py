"""Extension of vLLM's worker in the core process: loads weights and adapters, and reads them back.

vLLM mixes this class into its own worker, hence the prefix of every name. It imports only modules that the worker imports.

Guarantee: if one of several workers cannot load a version, all of them refuse it. A method that loads returns the reason
instead of raising it: vLLM reads the workers' answers up to the first failure, and would take the other answers for its next
call.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.engines.vllm.loading import (
    HoldsOther,
    Stage,
    Sums,
    WeightChecksums,
    can_be_staged,
    load_in_place,
    same,
    sums,
)
from infra.roles.memory import give_back_freed

# It warns of every layer without weights (rotary embeddings) at every reload; the probe checks the loaded model.
_NOISY = "vllm.model_executor.model_loader.reload.layerwise"
GROUP_BYTES = 16 * 2**20  # size of a group in the comparison of a model on a CPU, which takes some milliseconds
_log = logging.getLogger(__name__)
# Milliseconds without a step, or the time at which they began; and the reason to refuse the version, "" for none.
Loaded = tuple[float, str]


class SeededGenerators(dict[int, torch.Generator]):
    """Generators of requests with a seed, by place in the batch. vLLM calls `get` only to set a generator back; it gets the
    default, so every part of a prompt but the last takes a number from its generator.
    """

    def get(self, place: int, default: Any = None) -> Any:
        return default


class WeightsExtension:
    """Methods reached by `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    headrace_held: WeightChecksums
    headrace_groups: list[list[str]]
    headrace_stage_of: Stage | None

    def headrace_leave_out_amx(self) -> None:
        """Before the first step: use the attention kernel without AMX where a CPU has it. In bfloat16 vLLM's other one may end
        the process at a step of several sequences: it clears a tile that it gave no rows (`tilezero`, SIGILL; release 0.32).
        """
        for group in (group for several in self.model_runner.attn_groups for group in several):
            for builder in group.metadata_builders:
                if getattr(builder, "isa", "") == "amx":
                    builder.isa = "vec"
                    builder._set_isa_to_layers(group.layer_names)

    def headrace_keep_seeds(self) -> None:
        """Before the first request: where a prompt comes in parts, vLLM sets the generator of a request with a seed back after
        each part but the last, by an offset that generators of a CPU do not have: its process ended (release 0.32).
        """
        if self.model_runner.device.type == "cpu":
            self.model_runner.input_batch.generators = SeededGenerators()

    def headrace_begin(self) -> tuple[bool, int]:
        """Take checksums of the model, once, before the first load. Returns True if versions can be staged, and the number of
        groups of the comparison.
        """
        logging.getLogger(_NOISY).setLevel(logging.ERROR)
        model = self.model_runner.get_model()
        self.headrace_held = WeightChecksums(model)
        self.headrace_stage_of = None
        is_staged = can_be_staged(model)
        self.headrace_groups = self.headrace_held.groups(GROUP_BYTES if is_staged else math.inf)
        return is_staged, len(self.headrace_groups)

    def headrace_stage(self, path: str, names: list[str], is_first: bool) -> Loaded:
        """Load tensors of a safetensors file between the steps, with all sources of every fused module. Returns the
        milliseconds.
        """
        began_s = time.perf_counter()

        def stage() -> None:
            if is_first:
                self._headrace_leave()
                self.headrace_stage_of = Stage(self.model_runner.get_model(), self.headrace_held)
            assert self.headrace_stage_of is not None
            _with_tensors(path, names, self.headrace_stage_of.load)

        reason = _refused(stage)
        return (time.perf_counter() - began_s) * 1e3, reason

    def headrace_apply(self, path: str, names: list[str], clears: bool) -> Loaded:
        """Take over staged tensors, or load these tensors if none are staged. Returns the start by `time.perf_counter`, which
        all processes of a Linux host share. clears: True to clear keys and values after a refused version, since vLLM's
        attention multiplies values behind the end of a sequence by zero, and NaN would spread.
        """
        began_s = time.perf_counter()

        def apply() -> None:
            if self.headrace_stage_of is not None:
                self.headrace_stage_of.take_over()
            elif names:
                model, held = self.model_runner.get_model(), self.headrace_held
                _with_tensors(path, names, partial(load_in_place, self.vllm_config, model, held))

        reason = _refused(apply)
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self.model_runner, forget)()
        if clears:
            for cache in self.model_runner.kv_caches:
                for part in [cache] if isinstance(cache, torch.Tensor) else cache:
                    part.zero_()
        return began_s, reason

    def headrace_compare(self, group: int) -> Loaded:
        """Compare a group of modules with their checksums; a group beyond this worker's last is empty."""
        began_s = time.perf_counter()
        self._headrace_leave()
        names = self.headrace_groups[group] if group < len(self.headrace_groups) else []
        reason = _refused(lambda: self.headrace_held.check(names))
        return (time.perf_counter() - began_s) * 1e3, reason

    def _headrace_leave(self) -> None:
        if self.headrace_stage_of is not None:
            self.headrace_stage_of.close()
            self.headrace_stage_of = None
            give_back_freed()

    def headrace_add_adapter(self, number: int, name: str, path: str) -> Loaded:
        """Make an adapter ready for requests, from a folder as peft writes it; the milliseconds that it took."""
        from vllm.lora.request import LoRARequest

        began_s = time.perf_counter()
        reason = _refused(lambda: add_adapter(self.model_runner, LoRARequest(name, number, path)))
        return (time.perf_counter() - began_s) * 1e3, reason

    def headrace_not_adapted(self, names: list[str]) -> list[str]:
        """The tensors of an adapter for which this worker's model has no place. names: as peft writes them."""
        model = self.model_runner.get_model()
        places = _places(model)
        return [name for name in names if _parsed_name(model, name)[0] not in places]

    def headrace_memory(self) -> float:
        """Anonymous memory of this process in MB, including unused memory that was not returned to the system."""
        with open("/proc/self/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) * 1024 / 1e6


def _refused(load: Callable[[], None]) -> str:
    """The reason to refuse a version: the error of loading it, "" for none."""
    try:
        load()
    except HoldsOther as error:
        return f"after the load vLLM holds other values in {error}"
    except Exception as error:
        _log.exception("version not loaded")
        return f"vLLM could not load it: {type(error).__name__}: {error}"
    return ""


def _with_tensors(path: str, names: list[str], load: Callable[[dict[str, Any]], None]) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        load({name: file.get_tensor(name) for name in names})


def add_adapter(runner: Any, request: Any) -> None:
    """Make an adapter ready for requests. request: names it and its folder.

    Raises HoldsOther if a matrix differs from the sent matrix, and the errors of vLLM's loader.
    """
    model, manager = runner.get_model(), runner.lora_manager
    lora = manager._load_adapter(request)
    sent = _sent(Path(request.lora_path), manager.lora_config.lora_dtype)
    adapters = model.lora_manager
    adapters.add_adapter(lora)
    adapters.activate_adapter(lora.id)
    held = held_matrices(model, lora.id, {name: shape for name, (shape, _) in sent.items()})
    for name, value in held:
        if not same(sent[name][1], sums(value)):
            raise HoldsOther(name)


def held_matrices(model: Any, number: int, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each matrix of an adapter that this worker's model holds in one piece.

    A worker has no place for a matrix of another worker's layers: `check_adapted` makes sure that some worker has it.
    """
    places = _places(model)
    slot = model.lora_manager.lora_index_to_id.index(number)
    for name, shape in shapes.items():
        module_name, is_a = _parsed_name(model, name)
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


def _parsed_name(model: Any, name: str) -> tuple[str, bool]:
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    module, is_a = parse_fine_tuned_lora_name(name, mapper.get_rename_mapper() if mapper is not None else None)
    return str(module), bool(is_a)
