"""What vLLM's model holds, read back and compared with what vLLM's loaders made of the tensors that were sent.

    sent ── loaders: fuse, shard ──> plain ── pack, pad, shuffle ──> ready ── copy ──> held ── kernel ──> logits
                                       │                               └─ sums = sums ──┘        │
                                       └─────────── some columns = output of one-hot inputs ─────┘

Sums are exact: of the bits of each row and of each column, as integers, so that no value changes, moves or stays behind unseen.
On a CPU vLLM packs a matrix into a kernel that cannot be read. There the output for a one-hot input is a column of the matrix
to the bit, since all other products are zero; some columns are compared, others at each load. What was not sent again must be
what it was, since the engine started.

Trusted is that vLLM's loaders put a tensor where it belongs: a fault there shows in float32, where the tests of the engine
compare every logprob.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

COLUMNS = 64  # of a packed matrix, per load
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Sums = tuple[torch.Tensor, torch.Tensor]  # [R] of each row, [C] of each column


class Wanted(NamedTuple):
    """What modules should hold. sums: of each part of each. columns: of packed matrices, and which they are."""

    sums: dict[str, dict[str, Sums]]
    columns: dict[str, tuple[tuple[int, ...], torch.Tensor]]


class Held:
    """What the modules of a worker's model should hold. Begins with what they hold. modules: by name, those with parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Not of torch's generator, from which vLLM draws tokens.
        self._random = np.random.default_rng()
        self.modules: dict[str, Any] = {name: one for name, one in model.named_modules() if one._parameters}
        columns_of = {
            name: (at, columns(module, at))
            for name, module in self.modules.items()
            if is_packed(module)
            for at in [self._drawn(module)]
        }
        self._wanted = Wanted({name: _sums_of(module) for name, module in self.modules.items()}, columns_of)

    @contextmanager
    def loading(self, sent: Mapping[str, torch.Tensor], modules: Mapping[str, Any]) -> Iterator[Wanted]:
        """Note what the modules should hold after the load inside the `with`. sent: by the names of vLLM's caller. modules:
        that are loaded, by name: the model's own, or what stands for them.
        """
        wanted = Wanted({name: dict(parts) for name, parts in self._wanted.sums.items()}, dict(self._wanted.columns))
        plain = {name: module for name, module in modules.items() if not _has_method(module)}
        before = {name: _sums_of(module) for name, module in plain.items()}
        methods = {id(module.quant_method): module.quant_method for module in modules.values() if _has_method(module)}
        names = {id(module): name for name, module in modules.items()}
        for method in methods.values():
            method.process_weights_after_loading = self._noting(method.process_weights_after_loading, names, wanted)
        try:
            yield wanted
        finally:
            for method in methods.values():
                del method.process_weights_after_loading
        for name, module in plain.items():
            after = _sums_of(module)
            for part, found in after.items():
                value, given = module._parameters[part], sent.get(f"{name}.{part}")
                if value is not None and given is not None and given.shape == value.shape:
                    wanted.sums[name][part] = sums(given.to(value.dtype))
                elif not same(before[name].get(part), found):
                    wanted.sums[name][part] = found

    def expect(self, wanted: Wanted) -> None:
        """What the modules should hold from now on."""
        self._wanted = wanted

    def unlike(self, compared: Mapping[str, Any] = {}) -> str:
        """The first module that holds something else, "" for none. compared: kernels that need not be, by their module."""
        for name, module in self.modules.items():
            found, expected = _sums_of(module), self._wanted.sums[name]
            if found.keys() != expected.keys() or not all(same(expected[part], one) for part, one in found.items()):
                return name
            is_new = name in self._wanted.columns and module.cpu_linear is not compared.get(name)
            if is_new and differs(module, *self._wanted.columns[name]):
                return name
        return ""

    def _drawn(self, module: Any) -> tuple[int, ...]:
        """The columns that are looked at next."""
        return tuple(self._random.permutation(_width(module))[:COLUMNS].tolist())

    def _noting(
        self, process: Callable[[Any], None], names: Mapping[int, str], wanted: Wanted
    ) -> Callable[[Any], None]:
        """vLLM's last step of loading a module, which packs what its loaders made, with a note of both."""

        def noted(module: Any) -> None:
            name = names.get(id(module), "")
            if name in wanted.columns:
                at = self._drawn(module)
                wanted.columns[name] = at, module.weight.detach()[:, list(at)].clone()
            process(module)
            if name:
                wanted.sums[name] = _sums_of(module)

        return noted


def sums(tensor: torch.Tensor) -> Sums:
    """Of the bits of each row and of each column, modulo 2^64; all but the last dimension are rows."""
    data = tensor.detach().contiguous()
    bits = data.view(INTEGERS[data.element_size()]).reshape(-1, data.shape[-1] if data.dim() else 1)
    return bits.sum(1, dtype=torch.int64).cpu(), bits.sum(0, dtype=torch.int64).cpu()


def columns(module: Any, at: tuple[int, ...]) -> torch.Tensor:
    """Columns of the matrix [N, K] that a module on a CPU computes with, [N, len(at)]."""
    inputs = torch.zeros((len(at), _width(module)), dtype=module.weight.dtype)
    inputs[torch.arange(len(at)), list(at)] = 1
    outputs: torch.Tensor = module.cpu_linear(inputs, module.weight, None)
    return outputs.T.contiguous()


def differs(module: Any, at: tuple[int, ...], wanted: torch.Tensor) -> bool:
    """Whether columns of a packed matrix are others than wanted, [N, len(at)]."""
    return not torch.equal(_normal(wanted), _normal(columns(module, at)))


def is_packed(module: Any) -> bool:
    """Whether vLLM multiplies with a kernel that has a copy of the matrix of its own."""
    return hasattr(module, "cpu_linear") and module.weight.dim() <= 2


def _width(module: Any) -> int:
    """Inputs of a linear module on this worker: vLLM leaves the weight empty once it is packed."""
    if module.weight.dim() == 2:
        return int(module.weight.shape[1])
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _has_method(module: Any) -> bool:
    return hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")


def _sums_of(module: torch.nn.Module) -> dict[str, Sums]:
    return {name: sums(value) for name, value in module._parameters.items() if value is not None and value.numel()}


def same(one: Sums | None, other: Sums | None) -> bool:
    """Whether two sums are of the same bits; None is of nothing."""
    if one is None or other is None:
        return one is other
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def _normal(values: torch.Tensor) -> torch.Tensor:
    """Without what a sum with zeros or a kernel may lose: the sign of a zero, and numbers below the normal ones."""
    return torch.where(values.abs() < torch.finfo(values.dtype).tiny, torch.zeros_like(values), values)
