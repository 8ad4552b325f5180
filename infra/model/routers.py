"""The routers of a mixture of experts, and which experts they choose for each token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Routers:
    """The routers of a transformers model, in its order; none where their way of choosing is not known.

    Known are those that take hidden states alone and return (logits, weights, experts): of Mixtral, Qwen-MoE, GPT-OSS, OLMoE
    and their like. k: experts of a token.
    """

    def __init__(self, module: Any) -> None:
        named = [(name, one) for name, one in module.named_modules() if _is_router(one)]
        found = [one for _, one in named]
        kinds = {(int(one.top_k), int(one.num_experts)) for one in found}
        self.k, self.num_experts = kinds.pop() if len(kinds) == 1 else (0, 0)
        self.modules: tuple[Any, ...] = tuple(found) if self.k else ()
        self.names = tuple(name for name, _ in named) if self.k else ()

    @property
    def num_layers(self) -> int:
        """Layers that route."""
        return len(self.modules)

    @contextmanager
    def recorded(self) -> Iterator[list["torch.Tensor"]]:
        """The experts of each token of a forward inside, [P, k], layer after layer as they compute."""
        taken: list[torch.Tensor] = []
        handles = [one.register_forward_hook(lambda _, given, found: taken.append(found[2])) for one in self.modules]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()


def _is_router(one: Any) -> bool:
    import torch

    weight = getattr(one, "weight", None)
    if not (type(one).__name__.endswith("Router") and isinstance(weight, torch.Tensor) and weight.ndim == 2):
        return False
    k = getattr(one, "top_k", None)
    if not isinstance(k, int) or weight.shape[0] != getattr(one, "num_experts", None):
        return False
    with torch.no_grad():
        try:
            found = one(weight.new_ones((3, weight.shape[1])))
        except (TypeError, ValueError, IndexError, RuntimeError):  # it asks for more than hidden states
            return False
    return isinstance(found, tuple) and len(found) == 3 and found[2].dtype == torch.int64 and found[2].shape == (3, k)
