"""What vLLM's model holds, read back and compared with what vLLM's loaders made of the tensors that were sent.

    sent ── loaders: fuse, shard ──> plain ── pack, pad, shuffle ──> ready ── copy ──> held ── kernel ──> logits
                                       │                               └─ sums = sums ──┘        │
                                       └─────────── some columns = output of one-hot inputs ─────┘

Sums are exact: the bits of each row and of each column, added as integers, so that every changed or moved value shows.
On a CPU vLLM packs a matrix into a kernel that cannot be read. There the output for a one-hot input is a column of the matrix
to the bit, since all other products are zero; each load compares other columns. A module that a load does not send must hold
what it held when the engine started.

The comparison trusts vLLM's loaders to put a tensor where it belongs: a fault there shows in float32, where the tests of the
engine compare every logprob.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

COLUMNS = 32  # of a packed matrix, compared at each load
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Sums = tuple[torch.Tensor, torch.Tensor]  # [R] of each row, [C] of each column


class HoldsOther(Exception):
    """A module of vLLM's model, by name, holds something else than was sent."""


class Expected(NamedTuple):
    """What a module should hold: the sums of its parameters; of a packed matrix also columns, and which they are."""

    sums: dict[str, Sums]
    at: tuple[int, ...] = ()
    columns: torch.Tensor | None = None


class WeightChecksums:
    """What the modules of a worker's model should hold; at first what they hold.

    modules: those with parameters, by name. Modules that share one matrix share one kernel too: a model with tied embeddings
    would multiply with its old output matrix otherwise, since vLLM packs again only the module that it loads.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Not torch's generator, from which vLLM draws tokens.
        self._random = np.random.default_rng()
        self.modules: dict[str, Any] = {name: module for name, module in model.named_modules() if module._parameters}
        first: dict[int, str] = {}
        weights = {name: module._parameters.get("weight") for name, module in self.modules.items()}
        self._tied = {  # of two modules with one matrix the second, and the first
            name: source
            for name, weight in weights.items()
            if weight is not None and (source := first.setdefault(id(weight), name)) != name
        }
        self._expected = {name: self._read(module) for name, module in self.modules.items()}
        self.expect({})

    def drawn(self, module: Any) -> tuple[int, ...]:
        """Columns to compare next."""
        return tuple(self._random.permutation(_width(module))[:COLUMNS].tolist())

    def expect(self, loaded: Mapping[str, Expected]) -> None:
        """Note what a load should have left, and have modules that share a matrix compute with the loaded one's."""
        self._expected |= loaded
        for name, source in self._tied.items():
            made, other = (name, source) if name in loaded else (source, name)
            expected = self._expected[made]
            sums_of_both = {**self._expected[other].sums, "weight": expected.sums["weight"]}
            self._expected[other] = Expected(sums_of_both, expected.at, expected.columns)
            if is_packed(self.modules[made]):
                self.modules[other].cpu_linear = self.modules[made].cpu_linear

    def groups(self, num_bytes: float) -> list[list[str]]:
        """All modules, in groups of about so many bytes."""
        found: list[list[str]] = [[]]
        size = 0
        for name, module in self.modules.items():
            if size >= num_bytes:
                found.append([])
                size = 0
            found[-1].append(name)
            size += sum(value.nbytes for value in module._parameters.values() if value is not None)
            if (columns := self._expected[name].columns) is not None:
                size += columns.nbytes // columns.shape[1] * _width(module)
        return found

    def check(self, names: Iterable[str]) -> None:
        """Raise HoldsOther, naming the first of these modules that holds something else."""
        for name in names:
            module, expected = self.modules[name], self._expected[name]
            if _is_same(module, self.modules.get(self._tied.get(name, ""))):
                continue
            found = sums_of(module)
            if found.keys() != expected.sums.keys() or not all(
                same(expected.sums[part], held) for part, held in found.items()
            ):
                raise HoldsOther(name)
            if expected.columns is not None and not torch.equal(
                _normal(expected.columns), _normal(columns(module, expected.at))
            ):
                raise HoldsOther(name)

    def _read(self, module: Any) -> Expected:
        if not is_packed(module):
            return Expected(sums_of(module))
        at = self.drawn(module)
        return Expected(sums_of(module), at, columns(module, at))


def sums(tensor: torch.Tensor) -> Sums:
    """The bits of each row and of each column, added modulo 2^64; all but the last dimension are rows."""
    data = tensor.detach().contiguous()
    bits = data.view(INTEGERS[data.element_size()]).reshape(-1, data.shape[-1] if data.dim() else 1)
    if bits.device.type == "cpu":  # an eighth of torch's time
        rows, columns = (bits.numpy().sum(axis, dtype=np.int64) for axis in (1, 0))
        return torch.from_numpy(rows), torch.from_numpy(columns)
    return bits.sum(1, dtype=torch.int64).cpu(), bits.sum(0, dtype=torch.int64).cpu()


def sums_of(module: Any) -> dict[str, Sums]:
    """The sums of a module's parameters."""
    return {name: sums(value) for name, value in module._parameters.items() if value is not None and value.numel()}


def columns(module: Any, at: Sequence[int]) -> torch.Tensor:
    """Columns of the matrix [N, K] that a module on a CPU computes with, [N, len(at)]."""
    inputs = torch.zeros((len(at), _width(module)), dtype=module.weight.dtype)
    inputs[torch.arange(len(at)), list(at)] = 1
    outputs: torch.Tensor = module.cpu_linear(inputs, module.weight, None)
    return outputs.T.contiguous()


def is_packed(module: Any) -> bool:
    """Whether vLLM multiplies with a kernel that has a copy of the matrix of its own."""
    return hasattr(module, "cpu_linear") and module.weight.dim() <= 2


def same(left: Sums, right: Sums) -> bool:
    """Whether two sums are of the same bits."""
    return torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def _is_same(module: Any, source: Any) -> bool:
    parts = [name for name, value in module._parameters.items() if value is not None]
    return (
        source is not None
        and parts == ["weight"]
        and module.weight is source.weight
        and getattr(module, "cpu_linear", None) is getattr(source, "cpu_linear", None)
    )


def _width(module: Any) -> int:
    """Inputs of a linear module on this worker: vLLM leaves the weight empty once it is packed."""
    if module.weight.dim() == 2:
        return int(module.weight.shape[1])
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _normal(values: torch.Tensor) -> torch.Tensor:
    """Without what a sum with zeros or a kernel may lose: the sign of a zero, and numbers below the normal ones."""
    return torch.where(values.abs() < torch.finfo(values.dtype).tiny, torch.zeros_like(values), values)
