"""The critic's share of one step on several ranks; `trainer.learners.values` has that of one process.

Guarantee: values, advantages and the value loss are those of one process, whichever rank a sequence is on: a token counts
once, and advantages are scaled by the mean and deviation of all ranks' tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as distributed

from schemas.fields import Lane
from trainer.batch.batch import LANES
from trainer.config import CriticConfig
from trainer.learners.critic import ValueModel, advantages, estimated, spread_of, value_terms
from trainer.learners.orders import Channel, Encoded, Rows, decode_array, encode_array
from trainer.learners.shards import Shards
from trainer.learners.values import measured
from trainer.losses.loss import Objective


class _Totals(msgspec.Struct, frozen=True):
    """Totals over all ranks. counts: chosen tokens of each minibatch. spread: see `spread_of`."""

    counts: tuple[int, ...]
    spread: tuple[float, float] | None


class RankCritic:
    """One rank's part of the critic. engine: what computes its values and steps it. shards: its state on this rank."""

    def __init__(
        self, config: CriticConfig, model: ValueModel, engine: Any, *, shards: Shards, channel: Channel
    ) -> None:
        self.config = config
        self.engine = engine
        self.shards = shards
        self.channel = channel
        self._model = model

    def step(self, objectives: Mapping[Lane, Objective], parts: Sequence[Rows]) -> "RankValues":
        """Estimate a step, whose parts are its minibatches, before the first of them. Collective."""
        return RankValues(self, objectives, parts)

    @torch.no_grad()
    def begin_as(self, policy: Shards) -> None:
        """Take over a policy's body; the head stays. Collective; one weight at a time is whole."""
        for name, value in self._model.packed.module.named_parameters():
            self.shards.take(f"critic/{name}", value, policy.whole(name))
        self.shards.use()


class RankValues:
    """The critic's part in one step; every call is collective."""

    def __init__(self, critic: RankCritic, objectives: Mapping[Lane, Objective], parts: Sequence[Rows]) -> None:
        self._critic = critic
        self._parts = parts
        lanes = [LANES.index(lane) for lane, one in objectives.items() if one.critic]
        self._chosen = [[np.isin(one.lane_N, lanes) for one in part.mine] for part in parts]
        found = [self._valued(part, chosen) for part, chosen in zip(parts, self._chosen, strict=True)]
        totals = self._together(found)
        self._counts = totals.counts
        self._estimates = [
            [estimated(*one, mine, totals.spread) for one, mine in zip(of_part, chosen, strict=True)]
            for of_part, chosen in zip(found, self._chosen, strict=True)
        ]
        # As the lanes' denominators: a token weighs the same whichever minibatch it falls into.
        self._num_tokens = sum(totals.counts) / len(parts)
        self._losses: list[float] = []
        self._pending = False

    def advantages(self, part: int) -> list[np.ndarray]:
        """Advantages of each of this rank's microbatches of a part, [N]; 0 in lanes without a critic."""
        return [one.advantage for one in self._estimates[part]]

    def accumulate(self, part: int) -> bool:
        """The value loss of a part, backward; False where it or its gradient is not finite."""
        if not self._counts[part]:
            return True
        rows, engine = self._parts[part], self._critic.engine
        total = torch.zeros(1, device=engine.device)
        for index in range(rows.most):
            one, real = rows.at(index)
            engine.set_gradient_accumulation_boundary(index == rows.most - 1)
            value_N = engine("all_values", one)[torch.from_numpy(one.predecessor_N).to(engine.device)]
            if real:
                estimate, chosen = self._estimates[part][index], self._chosen[part][index]
                loss = value_terms(value_N, estimate, chosen, self._num_tokens, self._critic.config.value_clip)
                total += loss.detach()
                loss = loss * self._critic.channel.world  # ZeRO averages over ranks
            else:
                loss = value_N.nan_to_num().sum() * 0
            engine.backward(loss, scale_wrt_gas=False)
        distributed.all_reduce(total)
        self._pending = True
        self._losses.append(float(total))
        return math.isfinite(float(total)) and math.isfinite(self._critic.shards.gradient_norm())

    def finish(self, *, applied: bool) -> None:
        """Step with the gradient of the last part, or forget it."""
        if self._pending and applied:
            self._critic.engine.step()
            self._critic.shards.count_step()
        elif self._pending:
            self._critic.shards.forget_gradient()
        self._pending = False

    def measured(self) -> dict[str, float]:
        """See `Values.measured`; nothing on ranks other than 0."""
        mine = [
            (encode_array(one.value[chosen]), encode_array(one.target[chosen]))
            for estimates, masks in zip(self._estimates, self._chosen, strict=True)
            for one, chosen in zip(estimates, masks, strict=True)
        ]
        pairs = [
            (decode_array(value), decode_array(target))
            for data in self._critic.channel.gather(msgspec.msgpack.encode(mine))
            for value, target in msgspec.msgpack.decode(data, type=list[tuple[Encoded, Encoded]])
        ]
        return measured(pairs, self._losses, len(self._parts)) if pairs else {}

    @torch.no_grad()
    def _valued(self, part: Rows, chosen: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Values and advantages of this rank's microbatches of a part."""
        found = []
        for index in range(part.most):
            one, real = part.at(index)
            every = self._critic.engine("all_values", one).double().cpu().numpy()
            if real:
                found.append(advantages(one, every, chosen[index], self._critic.config))
        return found

    def _together(self, found: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]) -> _Totals:
        """Computed on rank 0 from the tokens of all ranks, and broadcast."""
        channel = self._critic.channel
        mine = [
            [encode_array(advantage[at]) for (_, advantage), at in zip(of_part, chosen, strict=True)]
            for of_part, chosen in zip(found, self._chosen, strict=True)
        ]
        every = [
            [
                [decode_array(one) for one in of_part]
                for of_part in msgspec.msgpack.decode(data, type=list[list[Encoded]])
            ]
            for data in channel.gather(msgspec.msgpack.encode(mine))
        ]
        totals = None
        if not channel.rank:
            counts = [sum(len(one) for of_rank in every for one in of_rank[part]) for part in range(len(found))]
            flat = [one for of_rank in every for of_part in of_rank for one in of_part]
            spread = spread_of(flat) if self._critic.config.normalize and flat else None
            totals = msgspec.msgpack.encode(_Totals(tuple(counts), spread))
        return msgspec.msgpack.decode(channel.broadcast(totals), type=_Totals)
