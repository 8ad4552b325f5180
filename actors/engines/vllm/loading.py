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

from actors.engines.vllm.weight_checksums import Expected, WeightChecksums, is_packed, sums, sums_of


class Staged(NamedTuple):
    """New values of one module. kernel: that multiplies with them, None where the module has none."""

    tensors: dict[str, torch.Tensor]
    kernel: Any


class Stage:
    """A version on its way into vLLM's model beside its steps. Nothing of the model changes before `take_over`.

    Use `close` at its end, whether the model took over or not.
    """

    def __init__(self, model: Any, held: WeightChecksums) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._held = held
        self._made: dict[int, Any] = {}
        self._stand_in = _stand_in(model, self._made)
        self._modules = {name: self._made[id(module)] for name, module in held.modules.items()}
        layerwise.initialize_layerwise_reload(self._stand_in)
        for module in self._modules.values():  # it keeps what is loaded: nothing has to be copied elsewhere
            layerwise.get_layerwise_info(module).kernel_tensors = None
        self._staged: dict[str, Staged] = {}
        self._expected: dict[str, Expected] = {}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load some tensors, all sources of every fused module among them. Raises what vLLM's loaders raise."""
        from vllm.model_executor.model_loader.reload import layerwise

        new = {name: module for name, module in self._modules.items() if name not in self._staged}
        with noting(new, self._held) as noted:
            self._stand_in.load_weights(tensors.items())
            loaded = _loaded(new)
            for name in loaded:
                info = layerwise.get_layerwise_info(new[name])
                if info.can_load():  # part of it is padding, which no tensor fills
                    layerwise._layerwise_process(new[name], info)
        self._expected |= expected_of(loaded, new, noted, tensors)
        self._staged |= {name: _staged(new[name]) for name in loaded}
        check_copied(tensors.values(), (new[name] for name in loaded))

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

    def close(self) -> None:
        """Cut the references between modules, their parameters and what vLLM knows of them."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for module in set(self._made.values()):
            if (info := LAYERWISE_INFO.pop(module, None)) is not None:
                vars(info).clear()
            for name in ("_parameters", "_buffers", "_modules"):
                module.__dict__[name].clear()
            module.__dict__.clear()
        vars(self).clear()


def load_in_place(config: Any, model: Any, held: WeightChecksums, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load some tensors into vLLM's model while no step runs. Raises what vLLM's loaders raise."""
    from vllm.model_executor.model_loader.reload import layerwise

    with _experts_packed_again(model):
        with noting(held.modules, held) as noted:
            layerwise.initialize_layerwise_reload(model)
            model.load_weights(tensors.items())
            loaded = _loaded(held.modules)
            layerwise.finalize_layerwise_reload(model, config.model_config)
        check_copied(tensors.values(), (held.modules[name] for name in loaded))
        held.expect(expected_of(loaded, held.modules, noted, tensors))


def expected_of(
    loaded: Iterable[str],
    modules: Mapping[str, Any],
    noted: Mapping[str, Expected],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Expected]:
    """What each module that was loaded should hold: as noted, or as it was sent where vLLM makes nothing of it."""
    expected = {name: noted[name] for name in loaded if name in noted}
    for name in loaded:
        if name in noted:
            continue
        found = sums_of(modules[name])
        for part in found:
            value, given = modules[name]._parameters[part], tensors.get(f"{name}.{part}")
            if given is not None and given.shape == value.shape:
                found[part] = sums(given.to(value.dtype))
        expected[name] = Expected(found)
    return expected


def _loaded(modules: Mapping[str, Any]) -> list[str]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = {name: get_layerwise_info(module) for name, module in modules.items()}
    return [name for name, info in infos.items() if info.load_numel > 0 or not info.can_load()]


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


def check_copied(tensors: Iterable[torch.Tensor], modules: Iterable[Any]) -> None:
    """Raise RuntimeError where a module has the memory of the file and no copy of it."""
    of_file = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for module in modules:
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if value.numel() and value.untyped_storage().data_ptr() in of_file:
                raise RuntimeError(f"{name} lies in the file itself, expected a copy")


@contextmanager
def noting(modules: Mapping[str, Any], held: WeightChecksums) -> Iterator[dict[str, Expected]]:
    """Note what each module should hold where vLLM's loaders have filled it: columns before vLLM packs it, sums afterwards."""
    names = {id(module): name for name, module in modules.items()}
    noted: dict[str, Expected] = {}

    def with_a_note(process: Callable[[Any], None]) -> Callable[[Any], None]:
        def processed(module: Any) -> None:
            name = names.get(id(module), "")
            at: tuple[int, ...] = ()
            columns: torch.Tensor | None = None
            if name and is_packed(held.modules[name]):
                at = held.drawn(held.modules[name])
                columns = module.weight.detach()[:, list(at)].clone()
            process(module)
            if name:
                noted[name] = Expected(sums_of(module), at, columns)

        return processed

    methods: dict[int, Any] = {
        id(method): method
        for module in held.modules.values()
        if hasattr(method := getattr(module, "quant_method", None), "process_weights_after_loading")
    }
    for method in methods.values():
        method.process_weights_after_loading = with_a_note(method.process_weights_after_loading)
    try:
        yield noted
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
    buffers = {name: value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set}
    values = {**module._parameters, **buffers}
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
