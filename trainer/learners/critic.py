"""The critic: what a state is worth, and by how much a token did better than that.

Guarantees: values are those of the critic as it is when a batch is consumed, never recorded ones; only sampled tokens are
steps, so what was observed between turns neither discounts nor decays; a sequence is worth its reward or, where the
batch was packed so, what its last state is worth, never both.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from trainer.batch.batch import Microbatch
from trainer.config import CriticConfig
from trainer.learners.forward import PackedModel


class Estimate(msgspec.Struct, frozen=True):
    """Of N sampled tokens: values before the step, what they are pulled to, and advantages. All [N] float32."""

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
    one: Microbatch, every: np.ndarray, mine: np.ndarray, config: CriticConfig
) -> tuple[np.ndarray, np.ndarray]:
    """V of the state each sampled token was chosen in, and its advantage; both [N]. every: V of all positions, [B*T].

    mine: [N] bool, tokens whose rewards count.
    """
    value = every[one.predecessor_N]
    bootstrap = np.where(one.bootstrap_N >= 0, every[one.bootstrap_N], 0.0)
    reward = np.where(mine, one.reward_N, 0.0).astype(np.float64)
    found = gae(reward, value, bootstrap, one.sequence_N, gamma=config.gamma, gae_lambda=config.gae_lambda)
    return value, found


def value_loss(value: torch.Tensor, old: torch.Tensor, target: torch.Tensor, clip: float) -> torch.Tensor:
    """½·max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²), [N]; clip 0 is ½(V - R)². See arXiv 2005.12729."""
    plain = (value - target).square()
    if clip <= 0:
        return 0.5 * plain
    near = old + (value - old).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - target).square())


class Critic:
    """A value model: the body of the policy's model, a copy of its own, and a scalar head that begins at 0."""

    def __init__(self, folder: str, config: CriticConfig, *, device: str) -> None:
        self._config = config
        self._packed = PackedModel(folder, dtype="float32", device=device)
        module = self._packed.module
        module.get_output_embeddings().requires_grad_(False)
        size = int(module.config.get_text_config().hidden_size)
        self._head = torch.nn.Linear(size, 1, device=device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)

    @property
    def config(self) -> CriticConfig:
        """Its settings."""
        return self._config

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained and saved, by name."""
        body = {name: value for name, value in self._packed.module.named_parameters() if value.requires_grad}
        return body | {f"head.{name}": value for name, value in self._head.named_parameters()}

    @torch.no_grad()
    def begin_as(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over a policy's body, by its names; the head stays."""
        for name, value in self._packed.module.named_parameters():
            value.copy_(weights[name])

    def values(self, one: Microbatch) -> torch.Tensor:
        """V of the state each sampled token was chosen in, [N]."""
        return self._values(one)[torch.from_numpy(one.predecessor_N)]

    @torch.no_grad()
    def estimate(self, parts: list[Microbatch], chosen: list[np.ndarray]) -> list[Estimate]:
        """Values and advantages of the chosen tokens ([N] bool each) of a whole step; 0 elsewhere."""
        found = []
        for one, mine in zip(parts, chosen, strict=True):
            value, advantage = advantages(one, self._values(one).double().cpu().numpy(), mine, self._config)
            found.append((value, value + advantage, np.where(mine, advantage, 0.0)))
        if self._config.normalize:
            found = [
                (value, target, scaled)
                for (value, target, _), scaled in zip(found, _scaled(found, chosen), strict=True)
            ]
        return [Estimate(*(array.astype(np.float32) for array in one)) for one in found]

    def loss(self, one: Microbatch, estimate: Estimate, chosen: np.ndarray, num_tokens: float) -> torch.Tensor:
        """What the chosen tokens add to the sum over `num_tokens`, their number in a step of one minibatch."""
        value = self.values(one)
        old, target = (torch.from_numpy(array).to(value.device) for array in (estimate.value, estimate.target))
        terms = value_loss(value, old, target, self._config.value_clip)
        return (terms * torch.from_numpy(chosen).to(value.device)).sum() / num_tokens

    def _values(self, one: Microbatch) -> torch.Tensor:
        found: torch.Tensor = self._head(self._packed.states(one)).squeeze(-1)
        return found


def _scaled(found: Sequence[tuple[np.ndarray, ...]], chosen: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages of all chosen tokens to mean 0 and variance 1."""
    of_all = np.concatenate([advantage[mine] for (_, _, advantage), mine in zip(found, chosen, strict=True)])
    if not len(of_all):
        return [advantage for _, _, advantage in found]
    mean, deviation = of_all.mean(), of_all.std() + 1e-8
    return [np.where(mine, (one[2] - mean) / deviation, 0.0) for one, mine in zip(found, chosen, strict=True)]
