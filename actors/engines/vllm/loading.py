"""Loading a version into vLLM's model with vLLM's own loaders: in place, or on a CPU part by part beside the steps.

    stage(part) ── step ── stage(part) ── step ── take_over ── compare(group) ── step ── compare(group) …
      stand-in of the model: new modules           swap of pointers, in the pause

On a CPU a version is loaded into a stand-in of the model: modules of their own that share what no load changes. Until the model
takes over what was loaded there, a worker holds the weights twice. On a GPU, and where a kernel keeps a state of its own
(quantized matrices, experts), a version is loaded in place, in the pause.

Guarantee: nothing of a version that was replaced or refused stays in memory. A stand-in's modules and parameters refer to each
other (a parameter knows its module's loader), so they are taken apart once the load has ended; Python's collector, which comes
when it likes, would keep several versions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch

from actors.engines.vllm.held import Expected, Held, is_packed, sums, sums_of


class Staged(NamedTuple):
    """New values of one module. kernel: that multiplies with them, None where the module has none."""

    tensors: dict[str, torch.Tensor]
    kernel: Any


class Stage:
    """A version on its way into vLLM's model beside its steps. Nothing of the model changes before `take_over`."""

    def __init__(self, config: Any, model: Any, held: Held) -> None:
        self._config = config
        self._model = model
        self._held = held
        self._staged: dict[str, Staged] = {}
        self._expected: dict[str, Expected] = {}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load some tensors, all sources of every fused module among them."""
        made: dict[int, Any] = {}
        stand_in = _stand_in(self._model, made)
        try:
            modules = {name: made[id(module)] for name, module in self._held.modules.items()}
            expected = load(self._config, stand_in, modules, tensors, self._held)
            self._expected |= expected
            self._staged |= {name: _staged(modules[name]) for name in expected}
        finally:
            _take_apart(set(made.values()))

    def take_over(self) -> None:
        """Have the model compute with what was loaded."""
        for name, staged in self._staged.items():
            module = self._held.modules[name]
            for held in (module._parameters, module._buffers):
                for part, value in held.items():
                    if value is not None and value.numel() and part in staged.tensors:
                        value.data = staged.tensors[part]
            if staged.kernel is not None:
                module.cpu_linear = staged.kernel
        self._held.expect(self._expected)


def load_in_place(config: Any, model: Any, held: Held, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load some tensors into vLLM's model while no step runs."""
    with _experts_packed_again(model):
        held.expect(load(config, model, held.modules, tensors, held))


def load(
    config: Any, model: Any, modules: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], held: Held
) -> dict[str, Expected]:
    """Load tensors into a model or its stand-in; what each module that was loaded should hold, by name.

    modules: those of the model with parameters. Raises what vLLM's loaders raise, and RuntimeError where a module would keep
    the memory of a tensor that was sent, which is a file's.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
        initialize_layerwise_reload,
    )

    expected: dict[str, Expected] = {}
    with _noting({id(module): name for name, module in modules.items()}, held, expected):
        initialize_layerwise_reload(model)
        model.load_weights(tensors.items())
        infos = {name: get_layerwise_info(module) for name, module in modules.items()}
        loaded = [name for name, info in infos.items() if info.load_numel > 0 or not info.can_load()]
        finalize_layerwise_reload(model, config.model_config)
    for name in loaded:
        if name not in expected:  # vLLM makes nothing of what it was sent
            held_now = sums_of(modules[name])
            for part in held_now:
                value, given = modules[name]._parameters[part], tensors.get(f"{name}.{part}")
                if given is not None and given.shape == value.shape:
                    held_now[part] = sums(given.to(value.dtype))
            expected[name] = Expected(held_now)
    check_copied(tensors.values(), model)
    return expected


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
    known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))

    def is_plain(module: Any) -> bool:
        if is_deferred_attention_layer(module) and (
            type(module) is not Attention
            or getattr(type(module.impl), process) is not getattr(AttentionImplBase, process)
        ):
            return False
        return type(getattr(module, "quant_method", None)) in known

    on_cpu = all(value.device.type == "cpu" for value in model.parameters())
    return on_cpu and not supports_multimodal(model) and all(map(is_plain, model.modules()))


def check_copied(tensors: Iterable[torch.Tensor], model: Any) -> None:
    """Raise RuntimeError where the model has the memory of the file and no copy of it."""
    of_file = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.numel() and value.untyped_storage().data_ptr() in of_file:
            raise RuntimeError(f"{name} lies in the file itself, expected a copy")


@contextmanager
def _noting(names: Mapping[int, str], held: Held, expected: dict[str, Expected]) -> Iterator[None]:
    """Note what each module should hold where vLLM's loaders have filled it: columns before vLLM packs it, sums afterwards."""

    def noting(process: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(module: Any) -> None:
            name = names.get(id(module), "")
            at: tuple[int, ...] = ()
            columns: torch.Tensor | None = None
            if name and is_packed(held.modules[name]):
                at = held.drawn(held.modules[name])
                columns = module.weight.detach()[:, list(at)].clone()
            process(module)
            if name:
                expected[name] = Expected(sums_of(module), at, columns)

        return noted

    methods: dict[int, Any] = {
        id(method): method
        for module in held.modules.values()
        if hasattr(method := getattr(module, "quant_method", None), "process_weights_after_loading")
    }
    for method in methods.values():
        method.process_weights_after_loading = noting(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


@contextmanager
def _experts_packed_again(model: Any) -> Iterator[None]:
    """On a CPU vLLM packs the experts of a layer when it makes their kernel, and a reload keeps the kernel: the new weights
    would be read as if they were packed. So a reloaded layer gets a new kernel; the others keep theirs.
    """
    methods = [
        module.quant_method
        for module in model.modules()
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None
        and all(value.device.type == "cpu" for value in module.parameters(recurse=False))
    ]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _staged(module: Any) -> Staged:
    values = {**module._parameters, **module._buffers}
    tensors = {name: value.data for name, value in values.items() if value is not None and value.numel()}
    return Staged(tensors, getattr(module, "cpu_linear", None))


def _stand_in(module: Any, made: dict[int, Any]) -> Any:
    """A module with parameters and buffers of its own, and so its children. made: by the id of what each stands for."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if id(module) in made:
        return made[id(module)]
    found = made[id(module)] = object.__new__(type(module))
    transient = module._non_persistent_buffers_set
    found.__dict__.update(module.__dict__)
    # Empty: memory that is not written to costs nothing, and vLLM fills those of a module that it loads.
    found.__dict__["_parameters"] = {
        name: None if value is None else _bound(torch.empty_like(value.data), value, module, found)
        for name, value in module._parameters.items()
    }
    found.__dict__["_buffers"] = {
        name: value if value is None or name in transient else value.clone() for name, value in module._buffers.items()
    }
    found.__dict__["_non_persistent_buffers_set"] = set(transient)
    found.__dict__["_modules"] = {
        name: None if child is None else _stand_in(child, made) for name, child in module._modules.items()
    }
    info, known = get_layerwise_info(found), get_layerwise_info(module)
    parameters, buffers = (
        {name: _bound(value.data.to("meta"), value, module, found) for name, value in kind.items()}
        for kind in known.restore_metadata
    )
    info.restore_metadata, info.restore_device = (parameters, buffers), known.restore_device
    return found


def _bound(tensor: torch.Tensor, known: torch.Tensor, module: Any, stand_in: Any) -> torch.Tensor:
    """A tensor with the class and the loaders of another. Loaders that are methods of the module become the stand-in's."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    found = {}
    for name, value in vars(known).items():
        while getattr(value, "__name__", "") == "online_process_loader":  # of an earlier load
            value = value.__wrapped__
        if isinstance(value, MethodType) and (value.__self__ is module or value.__self__ is layer_ref_sentinel):
            value = value.__func__.__get__(stand_in)
        found[name] = value
    tensor.__class__ = known.__class__
    tensor.__dict__ = found
    return tensor


def _take_apart(modules: Iterable[Any]) -> None:
    """Cut the references between modules and their parameters, and what vLLM keeps of them."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for module in modules:
        if (info := LAYERWISE_INFO.pop(module, None)) is not None:
            vars(info).clear()  # it knows loaders that know it
        for name in ("_parameters", "_buffers", "_modules"):
            module.__dict__[name].clear()
        module.__dict__.clear()
