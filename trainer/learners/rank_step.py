"""A rank's part in the calls of a DeepSpeed learner: its `StepEngine`, and copies of its weights."""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from infra.model.names import published
from infra.policies.tensors import Tensor, from_torch_all
from infra.roles.memory import give_back_freed
from schemas.fields import Lane
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.channel import Channel
from trainer.learners.engines import Opened, RankCritic
from trainer.learners.lanes import phase_objectives
from trainer.learners.learner import Phase, StepStats
from trainer.learners.orders import Order, Rows, deal, receive_rows, send_rows
from trainer.learners.shards import Shards
from trainer.learners.step import optimizer_step, per_sequence
from trainer.losses.loss import Objective


class RankStep:
    """compare: the reference's forward, collective at stage 3. critic: where a loss needs one."""

    def __init__(
        self,
        config: TrainerConfig,
        objectives: Mapping[Lane, Objective],
        *,
        policy: Opened,
        compare: Any | None,
        critic: RankCritic | None,
        shards: Shards,
        channel: Channel,
    ) -> None:
        self.config = config
        self.channel = channel
        self.model = policy.packed
        self.run = policy.run
        self.compare = None if compare is None else functools.partial(compare, "logprobs")
        self.critic = critic
        self.stage = shards.stage
        self.move_reference = shards.move_reference
        self._objectives = objectives
        self._shards = shards

    def step(self, order: Order, phase: Phase, given: Sequence[PackedBatch] | None) -> StepStats | None:
        """One optimizer step over all ranks, on the minibatches that rank 0 is given; its result, on rank 0."""
        assert order.counts is not None
        torch.manual_seed(order.seed)
        dealt = [deal(part, self.channel.world) for part in given or ()]
        parts = [self._rows(dealt, index) for index in range(order.num_parts)]
        stats = optimizer_step(
            self,
            phase_objectives(self._objectives, phase),
            order.counts,
            parts,
            dealt,
            learning_rate=order.learning_rate,
            max_grad_norm=order.max_grad_norm,
        )
        return None if self.channel.rank else stats

    def _rows(self, dealt: Sequence[Sequence[Rows]], index: int) -> Rows:
        """This rank's rows of minibatch `index`. dealt: all rows, on rank 0."""
        return receive_rows(self.channel) if self.channel.rank else send_rows(self.channel, dealt[index])

    def clear_gradients(self) -> None:
        """Nothing: a step and a refusal leave no gradient."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self.run.set_gradient_accumulation_boundary(is_last)
        self.run.backward(loss, scale_wrt_gas=False)

    def keep(self) -> Callable[[], None]:
        held = [self._shards, *([] if self.critic is None else [self.critic.shards])]
        restores = [shards.keep() for shards in held]

        def undo() -> None:
            for restore in restores:
                restore()

        return undo

    def update(self, learning_rate: float, loss: float, max_grad_norm: float, *, sound: bool) -> tuple[bool, float]:
        for group in self.run.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = math.nan
        if not sound or not self.stage or max_grad_norm < sys.float_info.max:
            norm = self._shards.gradient_norm()
            if not (sound and math.isfinite(loss) and math.isfinite(norm) and norm <= max_grad_norm):
                self._shards.forget_gradient()
                return False, norm
        if self.model.device.type == "cpu":
            give_back_freed()  # activations, which would raise the peak of the update
        self.run.step()
        if self.stage:
            if self.run.optimizer.overflow:
                return False, float(self.run.get_global_grad_norm())
            norm = float(self.run.get_global_grad_norm())
        self._shards.count_step()
        return math.isfinite(norm), norm

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """On rank 0 a copy of the policy. At stage 3 each weight in turn is whole on all ranks."""
        found: dict[str, Tensor] = {}
        for name, value in self._published().items():
            with self._shards.gathered(value):
                if not self.channel.rank:
                    found |= from_torch_all(published(self.model.module, {name: value.detach()}))
        return found

    def _published(self) -> dict[str, Any]:
        module = self.model.module
        return {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            if self.model.adapter is None or published(module, {name: value})  # the base is not gathered for nothing
        }

    @torch.no_grad()
    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
        found = tuple(tuple(self.run("sequence_logprobs", tokens)) for tokens in sequences)
        self._shards.repartition()
        return found

    def per_sequence(
        self,
        order: Order,
        given: Sequence[PackedBatch] | None,
        method: str,
        measure: Callable[[Microbatch, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """`trainer.learners.step.per_sequence` over all ranks. given: the batch, on rank 0."""
        assert order.counts is not None
        rows = self._rows([deal(part, self.channel.world) for part in given or ()], 0)
        found = per_sequence(self, rows, order.counts.num_sequences, method, measure)
        self._shards.repartition()
        return found
