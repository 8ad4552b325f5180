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
        named = [(name, part) for name, part in module.named_modules() if _is_router(part)]
        found = [router for _, router in named]
        kinds = {(int(router.top_k), int(router.num_experts)) for router in found}
        self.k, self.num_experts = kinds.pop() if len(kinds) == 1 else (0, 0)
        self.modules: tuple[Any, ...] = tuple(found) if self.k else ()
        self.names = tuple(name for name, _ in named) if self.k else ()

    @property
    def num_layers(self) -> int:
        return len(self.modules)

    @contextmanager
    def recorded(self) -> Iterator[list["torch.Tensor"]]:
        """The experts of each token of a forward inside, [P, k], layer after layer as they compute."""
        taken: list[torch.Tensor] = []
        handles = [
            router.register_forward_hook(lambda _, given, found: taken.append(found[2])) for router in self.modules
        ]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()


def _is_router(module: Any) -> bool:
    import torch

    weight = getattr(module, "weight", None)
    if not (type(module).__name__.endswith("Router") and isinstance(weight, torch.Tensor) and weight.ndim == 2):
        return False
    k = getattr(module, "top_k", None)
    if not isinstance(k, int) or weight.shape[0] != getattr(module, "num_experts", None):
        return False
    with torch.no_grad():
        try:
            found = module(weight.new_ones((3, weight.shape[1])))
        except (TypeError, ValueError, IndexError, RuntimeError):  # it asks for more than hidden states
            return False
    return isinstance(found, tuple) and len(found) == 3 and found[2].dtype == torch.int64 and found[2].shape == (3, k)
