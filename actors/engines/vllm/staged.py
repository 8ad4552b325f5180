"""The next version made ready between the steps, some milliseconds at a time: the pause that follows takes it over.

vLLM's own loaders run on a stand-in of the model: modules of their own that share what no load changes. What the loaders make
there, packed matrices and vectors, the model's modules take over between two steps. Until then a worker holds the weights
twice, which it does on a CPU alone; on a GPU, and with kernels that keep a state of their own (quantized matrices, experts), a
version is loaded in the pause.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch

from actors.engines.vllm.held import Held, Wanted, differs, is_packed
from actors.engines.vllm.turns import InTurns, Turns

Load = Callable[[Any, Mapping[str, Any], Turns[Any]], Wanted]
"""Loads the version into a model, whose modules are given by name too; what its modules should hold then."""


class _Ready(NamedTuple):
    """wanted: what the model should hold. modules: that stand in for its own, by name. kernels: new ones, by the name of their
    module, each compared with what was sent. odd: the first that differs, "" for none.
    """

    wanted: Wanted
    modules: Mapping[str, Any]
    kernels: Mapping[str, Any]
    odd: str


class Staged:
    """model: vLLM's. held: what is known of it. Nothing is done before the first turn."""

    def __init__(self, model: Any, held: Held, load: Load) -> None:
        self._held = held
        self.work = InTurns(lambda turns: self._ready(model, load, turns))

    def take_over(self) -> str:
        """Have the model compute with it; the first module that holds something else then, "" for none. Raises what loading
        raised; the model is as it was then.
        """
        ready = self.work.result()
        if ready.odd:
            return ready.odd
        for name, module in self._held.modules.items():
            _take(module, ready.modules[name])
        self._held.expect(ready.wanted)
        return self._held.unlike(ready.kernels)

    def _ready(self, model: Any, load: Load, turns: Turns[Any]) -> _Ready:
        made: dict[int, Any] = {}
        stand_in = _stand_in(model, made)
        try:
            modules = {name: made[id(module)] for name, module in self._held.modules.items()}
            before = {name: module.cpu_linear for name, module in modules.items() if is_packed(module)}
            wanted = load(stand_in, modules, turns)
        finally:
            _forget(stand_in)
        kernels = {name: modules[name].cpu_linear for name in before if modules[name].cpu_linear is not before[name]}
        odd = (name for name in turns(kernels) if differs(modules[name], *wanted.columns[name]))
        return _Ready(wanted, modules, kernels, next(odd, ""))


def can_be_staged(model: Any) -> bool:
    """Whether all of a model's matrices lie on a CPU, in kernels that vLLM makes anew at each load, and its attention makes
    nothing of them. Towers that see have loaders that are no method of their module, and cannot be a stand-in's.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.models.interfaces import supports_multimodal
    from vllm.v1.attention.backend import AttentionImplBase

    process = "process_weights_after_loading"

    def is_plain(attention: Any) -> bool:
        return type(attention) is Attention and getattr(type(attention.impl), process) is getattr(
            AttentionImplBase, process
        )

    def is_known(module: Any) -> bool:
        method = getattr(module, "quant_method", None)
        known = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return known and (not is_deferred_attention_layer(module) or is_plain(module))

    on_cpu = all(value.device.type == "cpu" for value in model.parameters())
    return on_cpu and not supports_multimodal(model) and all(map(is_known, model.modules()))


def _stand_in(module: Any, made: dict[int, Any]) -> Any:
    """A module with parameters and buffers of its own, and so its children. made: by the id of what each stands for."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if id(module) in made:
        return made[id(module)]
    found = made[id(module)] = object.__new__(type(module))
    transient = module._non_persistent_buffers_set
    found.__dict__.update(module.__dict__)
    found.__dict__["_parameters"] = {name: _copied(value, made) for name, value in module._parameters.items()}
    found.__dict__["_buffers"] = {
        name: value if name in transient else _copied(value, made) for name, value in module._buffers.items()
    }
    found.__dict__["_non_persistent_buffers_set"] = set(transient)
    found.__dict__["_modules"] = {
        name: None if child is None else _stand_in(child, made) for name, child in module._modules.items()
    }
    info, known = get_layerwise_info(found), get_layerwise_info(module)
    parameters, buffers = (
        {name: _unloaded(value, module, found) for name, value in kind.items()} for kind in known.restore_metadata
    )
    info.restore_metadata, info.restore_device = (parameters, buffers), known.restore_device
    return found


def _unloaded(known: torch.Tensor, module: Any, stand_in: Any) -> torch.Tensor:
    """What vLLM begins a load with instead of a parameter of `module`: its shape, and loaders that are the stand-in's."""
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    found: torch.Tensor = to_meta_tensor(known)
    for name, value in vars(found).items():
        while getattr(value, "__name__", "") == "online_process_loader":  # of a load before
            value = value.__wrapped__
        if isinstance(value, MethodType) and (value.__self__ is module or value.__self__ is layer_ref_sentinel):
            value = value.__func__.__get__(stand_in)
        vars(found)[name] = value
    return found


def _forget(stand_in: Any) -> None:
    """What vLLM knows of it would keep it in memory."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for module in stand_in.modules():
        LAYERWISE_INFO.pop(module, None)


def _copied(value: torch.Tensor | None, made: dict[int, Any]) -> Any:
    """Tied ones once."""
    if value is None:
        return None
    if id(value) not in made:
        copy = value.detach().clone()
        made[id(value)] = (
            torch.nn.Parameter(copy, requires_grad=False) if isinstance(value, torch.nn.Parameter) else copy
        )
    return made[id(value)]


def _take(module: Any, ready: Any) -> None:
    """What a load has made of a module's stand-in."""
    for held, made in ((module._parameters, ready._parameters), (module._buffers, ready._buffers)):
        for name, value in held.items():
            if value is not None and value.numel() and value is not made[name]:
                value.data = made[name].data
    if is_packed(module):
        module.cpu_linear = ready.cpu_linear
