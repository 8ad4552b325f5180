"""Which experts vLLM used: asked of it, and put together for one completion.

vLLM gives them with an answer's end, for each token that was read: those of a cached prefix as they were when it was cached,
and those before a reload as they were before it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import ConfigError

_OF_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\b")


def routing_options(asked: bool, *, on_cpu: bool, known: frozenset[str]) -> Mapping[str, object]:
    """Engine arguments that make vLLM return experts. known: the names it takes. Raises ConfigError where it cannot."""
    if not asked:
        return {}
    if on_cpu:
        raise ConfigError(
            "engine.options.routing: vLLM 0.32 returns experts from its Model Runner V2 alone, which needs Triton, and its CPU "
            'build has none ("Model Runner V2 requires Triton"); leave it out, or use actors.engines.torch:TorchEngine'
        )
    if "enable_return_routed_experts" not in known:
        raise ConfigError("engine.options.routing: this vLLM returns no experts; install 0.32 or later")
    return {"enable_return_routed_experts": True}


def layers_that_route(names: Iterable[str]) -> tuple[int, ...]:
    """The layers that have experts, by the names of the model's tensors: vLLM has a row for every layer, and 0s for others.

    >>> layers_that_route(["model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.up_proj.weight"])
    (1,)
    """
    return tuple(sorted({int(found[1]) for name in names if (found := _OF_EXPERTS.search(name))}))


class RoutedRows(msgspec.Struct):
    """The experts of one completion, which may take several requests.

    layers: those that route; () where none are asked for. rows: [tokens, layers, k] of each request. num: tokens that
    they cover. lost: whether vLLM did not give some.
    """

    layers: tuple[int, ...] = ()
    rows: list[npt.NDArray[np.unsignedinteger[Any]]] = []
    num: int = 0
    lost: bool = False

    def add(self, found: npt.NDArray[np.unsignedinteger[Any]] | None, stop: int) -> None:
        """A request's rows [tokens read, all layers, k], up to `stop`; those that an earlier request gave are kept."""
        if not self.layers or stop <= self.num:
            return
        if found is None or len(found) < stop:
            self.lost = True
            return
        self.rows.append(found[self.num : stop, list(self.layers)])
        self.num = stop

    def all(self) -> npt.NDArray[np.unsignedinteger[Any]] | None:
        """[tokens, layers, k], None where vLLM did not give them all."""
        return np.concatenate(self.rows) if self.rows and not self.lost else None
