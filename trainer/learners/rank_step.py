"""What every rank does in a step of a DeepSpeed learner, all of them together: forward, backward, and one optimizer step.

Guarantee: a step that is refused, because it or its gradient is not finite or the gradient is too large, changes nothing on
any rank; for that each keeps a copy of its own shards where a step has several minibatches.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as distributed

from infra.model.names import published
from infra.policies.share import HashedTensors, VersionTensors
from infra.policies.tensors import CopiedTensors
from infra.roles.memory import give_back_freed
from infra.store.rooms import Rooms
from schemas.fields import Lane
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.config import TrainerConfig
from trainer.health import Observed
from trainer.learners.card.tensors import CardCopies, CardTensors
from trainer.learners.engines import Opened
from trainer.learners.forward import PackedModel
from trainer.learners.lanes import (
    StepContext,
    bounds,
    compares,
    looks_ahead,
    microbatch_loss,
    of_phase,
    read,
)
from trainer.learners.learner import Phase, StepStats
from trainer.learners.minibatches import Taken, contexts_of, scaled_rate, take_all
from trainer.learners.orders import (
    Channel,
    Encoded,
    Order,
    Rows,
    deal,
    decode_array,
    decode_observed,
    encode_array,
    encode_observed,
    receive_rows,
    send_rows,
)
from trainer.learners.rank_values import RankCritic
from trainer.learners.rank_weights import owners
from trainer.learners.sequence_parallel import SequenceGroup
from trainer.learners.shards import Shards, num_bytes
from trainer.losses.loss import Objective


class RankStep:
    """One rank's part. Everything it is made of is the learner's own. compare: the reference's forward, collective at stage
    3. critic: where a loss wants one. group: the ranks that compute the same rows.
    """

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
        group: SequenceGroup,
    ) -> None:
        self._config = config
        self._objectives = objectives
        self._model: PackedModel = policy.packed
        self._compare = compare
        self._critic = critic
        self._engine = policy.run
        self._shards = shards
        self._channel = channel
        self._group = group
        self._stage = shards.stage
        self._rooms = Rooms()
        self._copies = CardCopies(self._model.device, wanted=config.weights_on_card)

    def step(self, order: Order, phase: Phase, given: Sequence[PackedBatch] | None) -> StepStats | None:
        """One optimizer step over all ranks, of the minibatches that rank 0 is given; what it did, on rank 0."""
        assert order.counts is not None
        torch.manual_seed(order.seed)
        batch = order.counts.batch()
        dealt = [deal(part, self._group.groups) for part in given or ()]
        parts = [self._rows(dealt, index) for index in range(order.num_parts)]
        objectives = of_phase(self._objectives, phase)
        present = [objectives[lane] for lane in batch.lane_tokens]
        ahead = [self._ahead(part) for part in parts] if any(looks_ahead(one) for one in present) else None
        bounded = self._bounds(objectives, batch, dealt, ahead) if ahead is not None else {}
        values = None if self._critic is None else self._critic.step(objectives, parts)
        held = [self._shards, *([] if self._critic is None else [self._critic.shards])]
        put_back = [one.keep() for one in held] if len(parts) > 1 else []

        def take(index: int, context: StepContext) -> Taken:
            proximal = ahead[index] if ahead is not None and any(one.proximal for one in present) else None
            advantages = None if values is None else values.advantages(index)
            loss, seen = self._backward(context, parts[index], proximal, advantages)
            sound = values is None or values.accumulate(index)
            applied, norm = self._apply(order, self._rate(order.learning_rate, seen), loss, sound=sound)
            if values is not None:
                values.finish(applied=applied)
            if applied and self._config.reference_decay < 1.0:
                self.move_reference(self._config.reference_decay)
            return Taken(applied=applied, loss=loss, grad_norm=norm, observed=seen)

        def undo() -> None:
            for put in put_back:
                put()

        contexts = contexts_of(self._config, objectives, batch, len(parts), bounded)
        stats = take_all(contexts, take, undo, dict[str, float] if values is None else values.measured)
        self._copies.stepped = True
        return None if self._channel.rank else stats

    def _rows(self, dealt: Sequence[Sequence[Rows]], index: int) -> Rows:
        """This rank's rows of minibatch `index`. dealt: of every minibatch, on rank 0."""
        return receive_rows(self._channel) if self._channel.rank else send_rows(self._channel, dealt[index])

    @torch.no_grad()
    def _ahead(self, part: Rows) -> list[torch.Tensor]:
        """log π_θ of this rank's microbatches before the step."""
        found = [self._engine("logprobs", part.at(index)[0]) for index in range(part.most)]
        return found[: len(part.mine)]

    def _bounds(
        self,
        objectives: Mapping[Lane, Objective],
        batch: PackedBatch,
        dealt: Sequence[Sequence[Rows]],
        ahead: Sequence[Sequence[torch.Tensor]],
    ) -> dict[Lane, float]:
        """What losses measure over the whole step: from all ranks' logprobs, on rank 0, which has the rows."""
        mine = [encode_array(logprob.cpu().numpy()) for part in ahead for logprob in part if self._group.counts]
        every = self._channel.gather(msgspec.msgpack.encode(mine))
        found: dict[Lane, float] | None = None
        if not self._channel.rank:
            microbatches = [one for group in range(self._group.groups) for part in dealt for one in part[group].mine]
            arrays = [decode_array(one) for data in every for one in msgspec.msgpack.decode(data, type=list[Encoded])]
            whole = msgspec.structs.replace(batch, microbatches=tuple(microbatches))
            found = {lane: float(value) for lane, value in bounds(objectives, whole, arrays).items()}
        sent = self._channel.broadcast(None if found is None else msgspec.msgpack.encode(found))
        return msgspec.msgpack.decode(sent, type=dict[Lane, float])

    def move_reference(self, decay: float) -> None:
        """The reference as `decay` of itself and the rest the policy. Collective."""
        self._shards.move_reference(decay)

    def _backward(
        self,
        context: StepContext,
        part: Rows,
        proximal: Sequence[torch.Tensor] | None,
        advantages: Sequence[np.ndarray] | None,
    ) -> tuple[float, list[Observed]]:
        """Forward and backward of this rank's rows; the loss over all ranks and, on rank 0, what all of them observed."""
        total = torch.zeros(1, device=self._model.device)
        observed = []
        for index in range(part.most):
            one, real = part.at(index)
            self._engine.set_gradient_accumulation_boundary(index == part.most - 1)
            logprob_N, entropy_N = read(self._engine, context, one)
            rerouted_N = self._model.rerouted(one)
            loss, seen = microbatch_loss(
                context,
                one,
                logprob_N,
                proximal_N=None if proximal is None else proximal[index] if real else logprob_N.detach(),
                reference_N=self._of_reference(context, one),
                entropy_N=entropy_N,
                advantage_N=advantages[index] if real and advantages is not None else None,
                rerouted_N=rerouted_N,
            )
            if real and self._group.counts:
                observed.append(seen)
                total += loss.detach()
            # ZeRO averages over ranks; the lanes are divided by global counts already, so their sum is wanted.
            loss = loss * self._channel.world if real else loss.nan_to_num() * 0
            if index == part.most - 1:
                distributed.all_reduce(total)
                # A step is refused by its gradient's norm alone, so a loss that is not finite must show there.
                loss = loss if math.isfinite(float(total)) else loss * math.nan
            self._engine.backward(loss, scale_wrt_gas=False)
        return float(total), decode_observed(self._channel.gather(encode_observed(observed)))

    @torch.no_grad()
    def _of_reference(self, context: StepContext, one: Microbatch) -> torch.Tensor | None:
        """log π_ref where some lane compares with it; a sharded one computes on all ranks or on none."""
        mine = compares(context.objectives, one)
        somewhere = any(context.objectives[lane].reference for lane in context.num_tokens)
        if self._compare is None or not (mine or (self._stage == 3 and somewhere)):
            return None
        found: torch.Tensor = self._compare("logprobs", one)
        return found if mine else None

    def _rate(self, learning_rate: float, observed: list[Observed]) -> float:
        """The learning rate for what was observed, which rank 0 knows."""
        if not self._config.scale_by_ess:
            return learning_rate
        rate = 0.0 if self._channel.rank else scaled_rate(self._config, learning_rate, observed)
        sent = self._channel.broadcast(None if self._channel.rank else msgspec.msgpack.encode(rate))
        return msgspec.msgpack.decode(sent, type=float)

    def _apply(self, order: Order, learning_rate: float, loss: float, *, sound: bool) -> tuple[bool, float]:
        """One optimizer step, where its gradient may make one; whether it did, and the gradient's norm before clipping.

        sound: the critic's gradient may too.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = math.nan
        if not sound or not self._stage or order.max_grad_norm < sys.float_info.max:
            norm = self._shards.gradient_norm()
            if not (sound and math.isfinite(loss) and math.isfinite(norm) and norm <= order.max_grad_norm):
                self._shards.forget_gradient()
                return False, norm
        if self._model.device.type == "cpu":
            give_back_freed()  # activations, which would raise the peak of the update
        self._engine.step()
        if self._stage:
            if self._engine.optimizer.overflow:
                return False, float(self._engine.get_global_grad_norm())
            norm = float(self._engine.get_global_grad_norm())
        self._shards.count_step()
        return math.isfinite(norm), norm

    def tensors(self) -> CopiedTensors:
        """On rank 0 a copy of the policy."""
        found = CopiedTensors()
        self._copy_into(found, self._published(), ranks=1)
        return found

    def weights(self) -> VersionTensors:
        """On each rank a copy of its part of the policy, by bytes as large as another's."""
        values, world = self._published(), self._channel.world
        size = sum(map(num_bytes, values.values())) // world
        found = self._copies.begin(size) or CopiedTensors()
        self._copy_into(found, values, ranks=world)
        return HashedTensors(found) if isinstance(found, CopiedTensors) else found

    def _published(self) -> dict[str, Any]:
        """The weights that are published, by the model's own names."""
        module = self._model.module
        return {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            if self._model.adapter is None or published(module, {name: value})  # the base is not gathered for nothing
        }

    @torch.no_grad()
    def _copy_into(self, found: CopiedTensors | CardTensors, values: Mapping[str, Any], *, ranks: int) -> None:
        """Copy this rank's share. One weight at a time is whole on a rank that does not hold it."""
        shares = owners(map(num_bytes, values.values()), ranks)
        for (name, value), rank in zip(values.items(), shares, strict=True):
            with self._shards.gathered(value):
                if rank == self._channel.rank:
                    found.add(published(self._model.module, {name: value.detach()}), self._rooms)
        self._rooms.clear()

    @torch.no_grad()
    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
        """Logprobs of each sequence's tokens."""
        found = tuple(tuple(self._engine("sequence_logprobs", one)) for one in sequences)
        self._shards.let_go()
        return found

    @torch.no_grad()
    def per_sequence(
        self,
        order: Order,
        given: Sequence[PackedBatch] | None,
        name: str,
        of_tokens: Callable[[Microbatch, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Sum over the tokens of each sequence of what is made of a forward's values, over all ranks."""
        assert order.counts is not None
        rows = self._rows([deal(part, self._group.groups) for part in given or ()], 0)
        sums = np.zeros(order.counts.num_sequences)
        for index in range(rows.most):
            one, real = rows.at(index)
            found = self._engine(name, one).double().cpu().numpy()
            if real and self._group.counts:
                sums += np.bincount(one.sequence_N, weights=of_tokens(one, found), minlength=len(sums))
        self._shards.let_go()
        total = torch.from_numpy(sums).to(self._model.device)
        distributed.all_reduce(total)
        return np.asarray(total.cpu().numpy())
