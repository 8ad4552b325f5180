"""The routers of a mixture of experts: which experts they choose for each token, recorded, or given to them.

Only the choice is replaced: the family's own code computes the gate weights, from the model's own router logits over the
given experts, so that gradients reach the router ("Rollout Routing Replay", Ma et al. 2025, arXiv:2510.11370, section 4).
Guarantee: given the very experts a router would choose, in its order, it computes the same bits, forward and backward.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Given:
    """The experts that the tokens of one forward are routed to, and what the routers would have chosen.

    experts_PLk int64: of token p, in layer l; -1 for a token that goes where its router sends it. differs_LP: filled in as
    layers compute: whether the router's own choice is another set than the given one.
    """

    def __init__(self, experts_PLk: torch.Tensor) -> None:
        self.experts_LPk = experts_PLk.transpose(0, 1)
        num_P, num_L, _ = experts_PLk.shape
        self.differs_LP = torch.zeros((num_L, num_P), dtype=torch.bool, device=experts_PLk.device)

    def shares(self) -> torch.Tensor:
        """Of each token the share of layers whose own choice differs, -1 where none was given, [P] float32."""
        return torch.where(self.experts_LPk[0, :, 0] >= 0, self.differs_LP.float().mean(0), -1.0)


class Taken:
    """The experts that the tokens of one forward went to. of_layers: [P, k] of each layer, as they compute."""

    def __init__(self) -> None:
        self.of_layers: list[torch.Tensor] = []

    def experts(self) -> torch.Tensor:
        """Of all layers, [P, L, k]."""
        return torch.stack(self.of_layers, 1)


class Routers:
    """The routers of a transformers model, in its order. They take or give routing inside `using` alone.

    Known are those that choose by one `topk` and return (logits, weights, experts), as of Mixtral, Qwen-MoE, GPT-OSS, OLMoE.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._use: Given | Taken | None = None
        found = [one for one in module.modules() if _is_router(one)]
        kinds = {(int(one.top_k), int(one.num_experts)) for one in found}
        self.k, self.num_experts = kinds.pop() if len(kinds) == 1 else (0, 0)
        self.num_layers = len(found) if self.k else 0
        for layer, one in enumerate(found[: self.num_layers]):
            one.forward = self._watched(one.forward, layer)

    def using(self, use: Given | Taken | None) -> AbstractContextManager[None]:
        """Forwards inside take their experts from `use`, or leave them there."""
        return nullcontext() if use is None else _Using(self, use)

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of torch's checkpoint: what is computed again in the backward is routed as it was."""
        return nullcontext(), self.using(self._use)

    def _watched(self, forward: Any, layer: int) -> Any:
        def watched(*args: Any, **settings: Any) -> Any:
            use = self._use
            if isinstance(use, Given):
                with _Choice(use, layer):
                    return forward(*args, **settings)
            found = forward(*args, **settings)
            if isinstance(use, Taken):
                use.of_layers.append(found[2])
            return found

        return watched


class _Using(AbstractContextManager[None]):
    """May be entered again: a backward may compute a layer more than once."""

    def __init__(self, routers: Routers, use: Given | Taken) -> None:
        self._routers, self._use = routers, use
        self._before: list[Given | Taken | None] = []

    def __enter__(self) -> None:
        self._before.append(self._routers._use)
        self._routers._use = self._use

    def __exit__(self, *_: object) -> None:
        self._routers._use = self._before.pop()


class _Choice(TorchFunctionMode):
    """Inside the forward of a router: `topk` gives the values at the given experts."""

    def __init__(self, given: Given, layer: int) -> None:
        super().__init__()
        self._given, self._layer = given, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        wanted_Pk = self._given.experts_LPk[self._layer]
        here_P1 = wanted_Pk[:, :1] >= 0
        experts_Pk = torch.where(here_P1, wanted_Pk, found.indices)
        differs_P = (experts_Pk.sort(-1).values != found.indices.sort(-1).values).any(-1)
        self._given.differs_LP[self._layer] = differs_P
        return torch.return_types.topk((args[0].gather(-1, experts_Pk), experts_Pk))


class _Counting(TorchFunctionMode):
    """How often `topk` was asked, and what it said last."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.indices = 0, torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self.num, self.indices = self.num + 1, found.indices
        return found


@torch.no_grad()
def _is_router(one: torch.nn.Module) -> bool:
    weight = getattr(one, "weight", None)
    if not (type(one).__name__.endswith("Router") and isinstance(weight, torch.Tensor) and weight.ndim == 2):
        return False
    if weight.shape[0] != getattr(one, "num_experts", None) or not isinstance(getattr(one, "top_k", None), int):
        return False
    with _Counting() as asked:
        try:
            found = one(weight.new_ones((3, weight.shape[1])))
        except (TypeError, ValueError, IndexError, RuntimeError):  # it asks for more than hidden states
            return False
    return asked.num == 1 and isinstance(found, tuple) and len(found) == 3 and found[2] is asked.indices
