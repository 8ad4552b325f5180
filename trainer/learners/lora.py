"""LoRA in a learner: the adapter that [trainer.lora] describes, and a reference that shares the policy's base."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from infra.model.adapter import REFERENCE, adapter_parameters, computing_with, find_adapter
from infra.policies.adapter import Adapter
from schemas.fields import Lane
from trainer.batch.batch import Microbatch
from trainer.batch.routing import no_experts
from trainer.config import TrainerConfig
from trainer.learners.forward import PackedModel
from trainer.losses.loss import Objective

Run = Callable[[str, Any], Any]


def open_adapter(config: TrainerConfig, model: str) -> Adapter | None:
    """What is trained in place of the model's own weights, None for all of them. Raises ConfigError."""
    lora = config.lora
    return None if lora is None else find_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def compared(objectives: Mapping[Lane, Objective]) -> bool:
    """Whether some lane compares the policy with a reference."""
    return any(one.reference for one in objectives.values())


class ReferenceAdapter:
    """The reference of a policy that is an adapter: the same base, under an adapter that is not trained.

    It takes no second model. Where no warm-up came before training, its B is zero and it is the base itself.
    """

    def __init__(self, policy: PackedModel) -> None:
        self._policy = policy
        self.trained = adapter_parameters(policy.module, REFERENCE)

    def logprobs(self, one: Microbatch) -> torch.Tensor:
        """log π_ref of the sampled tokens, [N] float32; without gradients alone."""
        found: torch.Tensor = self.through(lambda what, of: getattr(self._policy, what)(of))("logprobs", one)
        return found

    def through(self, run: Run) -> Run:
        """`run` on the reference. run: name of a method of PackedModel, and a microbatch; where ranks compute together, the
        engine of all of them.
        """

        def compare(what: str, argument: Any) -> Any:
            # A reference sends its tokens where its own routers do.
            own = msgspec.structs.replace(argument, experts_BTLk=no_experts())
            with computing_with(self._policy.module, REFERENCE):
                return run(what, own)

        return compare


def open_reference(policy: PackedModel, again: Callable[[], PackedModel]) -> PackedModel | ReferenceAdapter:
    """What losses compare with: a second adapter of the policy's, or where it has none a second model. again: opens that."""
    return again() if policy.adapter is None else ReferenceAdapter(policy)
