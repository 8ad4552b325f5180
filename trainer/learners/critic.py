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
    """The critic's numbers for N sampled tokens, all [N] float32.

    value: before the step. target: what the value is pulled to. advantage: of the token.
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


def value_terms(
    value_N: torch.Tensor, estimate: Estimate, chosen: np.ndarray, num_tokens: float, clip: float
) -> torch.Tensor:
    """What the chosen tokens ([N] bool) add to the sum over `num_tokens`, their number in a step of one minibatch."""
    old, target = (torch.from_numpy(array).to(value_N.device) for array in (estimate.value, estimate.target))
    terms = value_loss(value_N, old, target, clip)
    return (terms * torch.from_numpy(chosen).to(value_N.device)).sum() / num_tokens


class ValueModel:
    """The body of a policy's model, and a scalar head that begins at 0; see `trainer.learners.forward` for the body."""

    def __init__(self, packed: PackedModel) -> None:
        self.packed = packed
        body = packed.module
        body.get_output_embeddings().requires_grad_(False)
        size = int(body.config.get_text_config().hidden_size)
        self.head = torch.nn.Linear(size, 1, device=packed.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.module = torch.nn.ModuleDict({"body": body, "head": self.head})

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained and saved, by name."""
        body = {name: value for name, value in self.packed.module.named_parameters() if value.requires_grad}
        return body | {f"head.{name}": value for name, value in self.head.named_parameters()}

    def all_values(self, one: Microbatch) -> torch.Tensor:
        """V of every position, [B*T]."""
        found: torch.Tensor = self.head(self.packed.states(one)).squeeze(-1)
        return found

    def find_reading(self) -> None:
        """See `PackedModel.find_reading`."""
        self.packed.find_reading()


class Critic:
    """A value model of one process, and its settings."""

    def __init__(self, folder: str, config: CriticConfig, *, device: str) -> None:
        self._config = config
        self._model = ValueModel(PackedModel(folder, dtype="float32", device=device))

    @property
    def config(self) -> CriticConfig:
        """Its settings."""
        return self._config

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained and saved, by name."""
        return self._model.named_parameters()

    @torch.no_grad()
    def begin_as(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over a policy's body, by its names; the head stays."""
        for name, value in self._model.packed.module.named_parameters():
            value.copy_(weights[name])

    def values(self, one: Microbatch) -> torch.Tensor:
        """V of the state each sampled token was chosen in, [N]."""
        return self._model.all_values(one)[torch.from_numpy(one.predecessor_N)]

    @torch.no_grad()
    def estimate(self, parts: list[Microbatch], chosen: list[np.ndarray]) -> list[Estimate]:
        """Values and advantages of the chosen tokens ([N] bool each) of a whole step; 0 elsewhere."""
        found = []
        for one, mine in zip(parts, chosen, strict=True):
            every = self._model.all_values(one).double().cpu().numpy()
            found.append(advantages(one, every, mine, self._config))
        spread = None
        if self._config.normalize:
            spread = spread_of([advantage[mine] for (_, advantage), mine in zip(found, chosen, strict=True)])
        return [estimated(*one, mine, spread) for one, mine in zip(found, chosen, strict=True)]

    def loss(self, one: Microbatch, estimate: Estimate, chosen: np.ndarray, num_tokens: float) -> torch.Tensor:
        """See `value_terms`."""
        return value_terms(self.values(one), estimate, chosen, num_tokens, self._config.value_clip)


def spread_of(chosen: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Mean and deviation of the advantages of all chosen tokens; None where there are none."""
    of_all = np.concatenate(chosen)
    return (float(of_all.mean()), float(of_all.std() + 1e-8)) if len(of_all) else None


def estimated(
    value: np.ndarray, advantage: np.ndarray, mine: np.ndarray, spread: tuple[float, float] | None
) -> Estimate:
    """The estimate of a microbatch. spread: what brings the advantages to mean 0 and variance 1, None to leave them."""
    scaled = advantage if spread is None else (advantage - spread[0]) / spread[1]
    arrays = (value, value + advantage, np.where(mine, scaled, 0.0))
    return Estimate(*(array.astype(np.float32) for array in arrays))
