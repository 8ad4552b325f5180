"""The next version made ready beside the steps: the pause that follows takes it over, and loads nothing.

vLLM's own loaders run in a thread, on a stand-in of the model: modules of their own that share what no load changes. What
the loaders make there, packed matrices and vectors, the model's modules take over between two steps. For that moment a worker
holds the weights twice, which it does on a CPU alone; on a GPU, and with kernels that keep a state of their own (quantized
matrices, experts), a version is loaded in the pause.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch

from actors.engines.vllm.held import Held, Wanted, is_packed

Load = Callable[[Any, Mapping[str, Any]], Wanted]
"""Loads the version into a model, whose modules are given by name too; what its modules should hold then."""


class Staged:
    """model: vLLM's. held: what is known of it. Begins at once."""

    def __init__(self, model: Any, held: Held, load: Load) -> None:
        self._held = held
        self._made: Future[tuple[Wanted, Mapping[str, Any]]] = Future()
        Thread(target=self._make, args=(model, load), name="staged", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Whether `take_over` has nothing to wait for."""
        return self._made.done()

    def take_over(self) -> str:
        """Have the model compute with it; the first module that holds something else then, "" for none. Raises what loading
        raised; the model is as it was then.
        """
        wanted, ready = self._made.result()
        for name, module in self._held.modules.items():
            _take(module, ready[name])
        self._held.expect(wanted)
        return self._held.unlike()

    def _make(self, model: Any, load: Load) -> None:
        try:
            made: dict[int, Any] = {}
            stand_in = _stand_in(model, made)
            modules = {name: made[id(module)] for name, module in self._held.modules.items()}
            self._made.set_result((load(stand_in, modules), modules))
        except BaseException as error:
            self._made.set_exception(error)


def can_be_staged(model: Any) -> bool:
    """Whether all of a model's matrices lie on a CPU, in kernels that vLLM makes anew at each load."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return all(value.device.type == "cpu" for value in model.parameters()) and all(
        method is None or type(method) in known for method in methods
    )


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
    info.restore_metadata, info.restore_device = known.restore_metadata, known.restore_device
    return found


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
