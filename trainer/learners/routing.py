"""Routing replay: a token goes to the experts that it was sampled with, not to those its router chooses here.

Only the choice is replaced: the family's own code computes the gate weights, from the learner's router logits over the given
experts, so that gradients reach the router ("Rollout Routing Replay", Ma et al. 2025, arXiv:2510.11370).
Guarantee: given the very experts a router would choose, in its order, it computes the same bits, forward and backward.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from infra.model.model import meta_model
from infra.model.routers import Routers
from schemas.errors import ConfigError

TOPK = (torch.topk, torch.Tensor.topk)


class Given:
    """The experts that the tokens of one forward are sent to, and where their routers would have sent them.

    experts_PLk int64: of token p, in layer l; -1 for a token that goes where its router sends it. differs_LP: filled in as
    layers compute: whether the router's own choice is another set than the given one.
    """

    def __init__(self, experts_PLk: torch.Tensor) -> None:
        self.experts_LPk = experts_PLk.transpose(0, 1)
        num_P, num_L, _ = experts_PLk.shape
        self.differs_LP = torch.zeros((num_L, num_P), dtype=torch.bool, device=experts_PLk.device)

    def shares(self) -> torch.Tensor:
        """For each token the share of layers whose own choice differs, -1 where none was given, [P] float32."""
        return torch.where(self.experts_LPk[0, :, 0] >= 0, self.differs_LP.float().mean(0), -1.0)


class Replay:
    """The routers of a model, which take their choice from elsewhere inside `given` alone. folder: for the error.

    Raises ConfigError for a model without routers that are known to choose by one `topk`.
    """

    def __init__(self, module: Any, folder: str) -> None:
        routers = Routers(meta_model(folder))  # of weights in shards the shapes say nothing
        if not routers.num_layers or not all(_chooses_once(router) for router in routers.modules):
            raise ConfigError(
                f'trainer.routing: got "replay" with {folder} ({module.config.model_type}), expected a mixture of experts '
                'whose routers are known (Mixtral, Qwen-MoE, GPT-OSS, OLMoE); say "own"'
            )
        self.num_layers, self.k, self.num_experts = routers.num_layers, routers.k, routers.num_experts
        self._given: list[Given | None] = [None]
        for layer, name in enumerate(routers.names):
            router = module.get_submodule(name)
            router.forward = self._watched(router.forward, layer)

    def given(self, given: Given | None) -> AbstractContextManager[None]:
        """Forwards inside send their tokens there; None: where the routers send them."""
        return _Inside(self._given, given)

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of torch's checkpoint: what is computed again in the backward is sent where it was."""
        return nullcontext(), self.given(self._given[-1])

    def _watched(self, forward: Any, layer: int) -> Any:
        def watched(*args: Any, **settings: Any) -> Any:
            given = self._given[-1]
            with nullcontext() if given is None else _Choice(given, layer):
                return forward(*args, **settings)

        return watched


class _Inside(AbstractContextManager[None]):
    """May be entered again: a backward may compute a layer more than once."""

    def __init__(self, stack: list[Given | None], given: Given | None) -> None:
        self._stack, self._mine = stack, given

    def __enter__(self) -> None:
        self._stack.append(self._mine)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class _Choice(TorchFunctionMode):
    """Inside the forward of a router: `topk` gives the values at the given experts."""

    def __init__(self, given: Given, layer: int) -> None:
        super().__init__()
        self._given, self._layer = given, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return found
        wanted_Pk = self._given.experts_LPk[self._layer]
        experts_Pk = torch.where(wanted_Pk[:, :1] >= 0, wanted_Pk, found.indices)
        differs_P = (experts_Pk.sort(-1).values != found.indices.sort(-1).values).any(-1)
        self._given.differs_LP[self._layer] = differs_P
        return torch.return_types.topk((args[0].gather(-1, experts_Pk), experts_Pk))


class _Asked(TorchFunctionMode):
    """Records the results of `topk` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in TOPK:
            self.indices.append(found.indices)
        return found


@torch.no_grad()
def _chooses_once(router: Any) -> bool:
    with _Asked() as asked:
        _, _, experts = router(router.weight.new_ones((3, router.weight.shape[1])))
    return len(asked.indices) == 1 and experts is asked.indices[0]
