"""The critic: values of states, and advantages of tokens over them.

Guarantees: the critic computes values when the trainer consumes a batch, and reads no recorded values. Only sampled tokens are
steps, so observations between turns neither discount nor decay. The return of a sequence is its reward or, if the batch was
packed so, the value of its last state, never both. Any number of ranks computes the values, advantages and value loss of one
process: a token counts once, and advantages are scaled by the mean and deviation of all ranks' tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from schemas.errors import ConfigError
from schemas.fields import LANES, Lane
from trainer.batch.batch import Microbatch
from trainer.config import CriticConfig, TrainerConfig
from trainer.learners.channel import Channel, Encoded, decode_array, encode_array
from trainer.learners.forward import PackedModel
from trainer.learners.orders import Rows
from trainer.losses.loss import Objective


class Estimate(msgspec.Struct, frozen=True):
    """The critic's numbers for N sampled tokens, all [N] float32.

    value: before the step. target: of the value loss. advantage: of the token.
    """

    value: np.ndarray
    target: np.ndarray
    advantage: np.ndarray


def gae(
    reward: np.ndarray,
    value: np.ndarray,
    bootstrap: np.ndarray,
    sequence: np.ndarray,
    *,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} - V_t, over the tokens of each sequence. arXiv 1506.02438 eq. 16.

    All [N] float64, tokens of a sequence in order and next to each other. value: V of the state a token is chosen in.
    bootstrap: V after a sequence's last token, read there alone; 0 where it ended.
    """
    advantage = np.zeros(len(reward))
    if not len(reward):
        return advantage
    start = np.flatnonzero(np.append(True, sequence[1:] != sequence[:-1]))
    length = np.diff(np.append(start, len(reward)))
    following, carried = bootstrap[start + length - 1].astype(np.float64), np.zeros(len(start))
    for back in range(1, int(length.max()) + 1):
        has = length >= back
        at = (start + length - back)[has]
        delta = reward[at] + gamma * following[has] - value[at]
        carried[has] = delta + gamma * gae_lambda * carried[has]
        following[has] = value[at]
        advantage[at] = carried[has]
    return advantage


def advantages(
    rows: Microbatch, value_P: np.ndarray, chosen: np.ndarray, config: CriticConfig
) -> tuple[np.ndarray, np.ndarray]:
    """V of the state each sampled token was chosen in, and its advantage; both [N]. value_P: V of all positions, [B*T].

    chosen: [N] bool, tokens whose rewards count.
    """
    value = value_P[rows.predecessor_N]
    bootstrap = np.where(rows.bootstrap_N >= 0, value_P[rows.bootstrap_N], 0.0)
    reward = np.where(chosen, rows.reward_N, 0.0).astype(np.float64)
    found = gae(reward, value, bootstrap, rows.sequence_N, gamma=config.gamma, gae_lambda=config.gae_lambda)
    return value, found


def value_loss(value: torch.Tensor, old: torch.Tensor, target: torch.Tensor, clip: float) -> torch.Tensor:
    """½·max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²), [N]; clip 0 is ½(V - R)². See arXiv 2005.12729."""
    plain = (value - target).square()
    if clip <= 0:
        return 0.5 * plain
    near = old + (value - old).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - target).square())


def value_terms(
    value_N: torch.Tensor, estimate: Estimate, chosen: np.ndarray, num_tokens: float, clip: float
) -> torch.Tensor:
    """The chosen tokens' ([N] bool) share of the value loss, a mean over `num_tokens`."""
    old, target = (torch.from_numpy(array).to(value_N.device) for array in (estimate.value, estimate.target))
    terms = value_loss(value_N, old, target, clip)
    return (terms * torch.from_numpy(chosen).to(value_N.device)).sum() / num_tokens


class ValueModel:
    """The body of a policy's model, and a scalar head that begins at 0; see `trainer.learners.forward` for the body."""

    def __init__(self, packed: PackedModel) -> None:
        self.packed = packed
        body = packed.module
        output = body.get_output_embeddings()
        output.requires_grad_(output.weight is body.get_input_embeddings().weight)  # one that is not tied is never read
        size = int(body.config.get_text_config().hidden_size)
        self.head = torch.nn.Linear(size, 1, device=packed.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.module = torch.nn.ModuleDict({"body": body, "head": self.head})

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        body = {name: value for name, value in self.packed.module.named_parameters() if value.requires_grad}
        return body | {f"head.{name}": value for name, value in self.head.named_parameters()}

    def all_values(self, rows: Microbatch) -> torch.Tensor:
        """V of every position, [B*T]."""
        found: torch.Tensor = self.head(self.packed.states(rows)).squeeze(-1)
        return found

    def find_reading(self) -> None:
        self.packed.find_reading()


class CriticEngine(Protocol):
    """A value model with its optimizer, in one process or on each rank. Calls are collective.

    collective: a backward of every microbatch is needed, also of one without chosen tokens.
    """

    config: CriticConfig
    channel: Channel
    device: torch.device
    collective: bool

    def all_values(self, rows: Microbatch) -> torch.Tensor:
        """V of every position, [B*T]."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the gradient. is_last: no other loss of the minibatch follows."""

    def gradient_norm(self) -> float:
        """Norm over all ranks before clipping."""

    def finish(self, *, applied: bool) -> None:
        """Step with the gradient, or forget it."""


class Critic:
    """The critic of a learner of one process, whose optimizer steps it too."""

    collective = False

    def __init__(self, folder: str, config: CriticConfig, *, device: str) -> None:
        self.config = config
        self.channel = Channel(alone=True)
        self._model = ValueModel(PackedModel(folder, dtype="float32", device=device))
        self.device = self._model.packed.device

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._model.named_parameters()

    @torch.no_grad()
    def begin_as(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over a policy's body, by its names; the head stays."""
        for name, value in self._model.packed.module.named_parameters():
            value.copy_(weights[name])

    def all_values(self, rows: Microbatch) -> torch.Tensor:
        return self._model.all_values(rows)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        torch.autograd.backward(loss)

    def gradient_norm(self) -> float:
        """Norm of the gradient, which is clipped then."""
        return float(torch.nn.utils.clip_grad_norm_(self.named_parameters().values(), self.config.gradient_clip))

    def finish(self, *, applied: bool) -> None:
        """Nothing: the policy's optimizer has stepped, or clears the gradient."""


def open_critic(
    folder: str, config: TrainerConfig, objectives: Mapping[Lane, Objective], *, device: str
) -> Critic | None:
    """The critic of the losses that need one, or None. Raises ConfigError as `check_critic` does."""
    check_critic(config, objectives)
    return None if config.critic is None else Critic(folder, config.critic, device=device)


def check_critic(config: TrainerConfig, objectives: Mapping[Lane, Objective]) -> None:
    """Raise ConfigError where a critic is configured and no loss needs it, or the other way round."""
    wanting = [lane for lane, objective in objectives.items() if objective.critic]
    if wanting and config.critic is None:
        raise ConfigError(f"trainer.critic: missing, expected a table: the loss of lane {wanting[0]} needs values")
    if config.critic is not None and not wanting:
        raise ConfigError("trainer.critic: got a critic, expected a lane whose loss uses it (ppo)")


class Values:
    """The critic in one step, whose parts are its minibatches: it estimates all of them before the first. Collective."""

    def __init__(self, critic: CriticEngine, objectives: Mapping[Lane, Objective], parts: Sequence[Rows]) -> None:
        self._critic = critic
        self._parts = parts
        lanes = [LANES.index(lane) for lane, objective in objectives.items() if objective.critic]
        self._chosen = [[np.isin(rows.lane_N, lanes) for rows in part.mine] for part in parts]
        self._estimates, self._counts = estimate(critic, parts, self._chosen)
        # Like the lanes' denominators: a token weighs the same in every minibatch.
        self._num_tokens = sum(self._counts) / len(parts)
        self._losses: list[float] = []
        self._pending = False

    def advantages(self, part: int) -> list[np.ndarray]:
        """Advantages of each of this rank's microbatches of a part, [N]; 0 in lanes without a critic."""
        return [found.advantage for found in self._estimates[part]]

    def accumulate(self, part: int) -> bool:
        """The value loss of a part, backward; False where it or its gradient is not finite."""
        if not self._counts[part]:
            return True
        rows, critic = self._parts[part], self._critic
        total = torch.zeros(1, device=critic.device)
        for index in range(rows.most):
            microbatch, real = rows.at(index)
            if not critic.collective and not self._chosen[part][index].any():
                continue
            value_P = critic.all_values(microbatch)
            value_N = value_P[torch.from_numpy(microbatch.predecessor_N).to(value_P.device)]
            if real:
                found, chosen = self._estimates[part][index], self._chosen[part][index]
                loss = value_terms(value_N, found, chosen, self._num_tokens, critic.config.value_clip)
                total += loss.detach()
                loss = loss * critic.channel.world  # ZeRO averages over ranks
            else:
                loss = value_N.nan_to_num().sum() * 0
            critic.backward(loss, is_last=index == rows.most - 1)
        critic.channel.sum(total)
        self._pending = True
        self._losses.append(float(total))
        return math.isfinite(float(total)) and math.isfinite(critic.gradient_norm())

    def finish(self, *, applied: bool) -> None:
        """Step with the gradient of the last part, or forget it."""
        if self._pending:
            self._critic.finish(applied=applied)
        self._pending = False

    def measured(self) -> dict[str, float]:
        """The value loss, a mean over minibatches, and the share of the targets' variance that the values explain; nothing on
        ranks other than 0.
        """
        mine = [
            (encode_array(found.value[chosen]), encode_array(found.target[chosen]))
            for estimates, masks in zip(self._estimates, self._chosen, strict=True)
            for found, chosen in zip(estimates, masks, strict=True)
        ]
        pairs = [
            (decode_array(value), decode_array(target))
            for data in self._critic.channel.gather(msgspec.msgpack.encode(mine))
            for value, target in msgspec.msgpack.decode(data, type=list[tuple[Encoded, Encoded]])
        ]
        if not pairs or not self._losses:
            return {}
        value, target = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*pairs, strict=True))
        if not len(target):
            return {}
        variance = float(target.var())
        explained = 1 - float((target - value).var()) / variance if variance > 0 else 0.0
        return {"critic/value_loss": sum(self._losses) / len(self._parts), "critic/explained_variance": explained}


@torch.no_grad()
def estimate(
    critic: CriticEngine, parts: Sequence[Rows], chosen: Sequence[Sequence[np.ndarray]]
) -> tuple[list[list[Estimate]], list[int]]:
    """Estimates of this rank's microbatches of each part, and the number of chosen tokens of each part on all ranks.

    chosen: [N] bool of each microbatch; advantages are 0 elsewhere. With `normalize` all chosen advantages have mean 0 and
    variance 1.
    """
    found: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for part, masks in zip(parts, chosen, strict=True):
        found.append([])
        for index in range(part.most):
            rows, real = part.at(index)
            value_P = critic.all_values(rows).double().cpu().numpy()
            if real:
                found[-1].append(advantages(rows, value_P, masks[index], critic.config))
    counts, mean, deviation = _totals(critic, found, chosen)
    estimates = [
        [
            Estimate(
                value.astype(np.float32),
                (value + advantage).astype(np.float32),
                np.where(mask, (advantage - mean) / deviation, 0.0).astype(np.float32),
            )
            for (value, advantage), mask in zip(part, masks, strict=True)
        ]
        for part, masks in zip(found, chosen, strict=True)
    ]
    return estimates, counts


def _totals(
    critic: CriticEngine,
    found: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    chosen: Sequence[Sequence[np.ndarray]],
) -> tuple[list[int], float, float]:
    """Chosen tokens of each part, and the mean and deviation by which advantages are scaled. Rank 0 computes them from the
    tokens of all ranks.
    """
    channel = critic.channel
    mine = [
        [encode_array(advantage[mask]) for (_, advantage), mask in zip(part, masks, strict=True)]
        for part, masks in zip(found, chosen, strict=True)
    ]
    sent = [
        msgspec.msgpack.decode(data, type=list[list[Encoded]]) for data in channel.gather(msgspec.msgpack.encode(mine))
    ]
    totals: tuple[list[int], float, float] | None = None
    if not channel.rank:
        arrays = [[decode_array(array) for array in part] for rank in sent for part in rank]
        counts = [sum(len(array) for part in arrays[at :: len(found)] for array in part) for at in range(len(found))]
        flat = np.concatenate([array for part in arrays for array in part] or [np.zeros(0)])
        scaled = critic.config.normalize and len(flat)
        totals = (counts, float(flat.mean()), float(flat.std() + 1e-8)) if scaled else (counts, 0.0, 1.0)
    data = channel.broadcast(None if totals is None else msgspec.msgpack.encode(totals))
    return msgspec.msgpack.decode(data, type=tuple[list[int], float, float])
