"""The critic's share of one step: values before it, advantages for the lanes that want them, and its own gradient."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from schemas.errors import ConfigError
from schemas.fields import Lane
from trainer.batch.batch import LANES, PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.critic import Critic
from trainer.losses.loss import Objective


def open_critic(
    folder: str, config: TrainerConfig, objectives: Mapping[Lane, Objective], *, device: str
) -> Critic | None:
    """The critic of the losses that want one, or None. Raises ConfigError as `check_critic` does."""
    check_critic(config, objectives)
    return None if config.critic is None else Critic(folder, config.critic, device=device)


def check_critic(config: TrainerConfig, objectives: Mapping[Lane, Objective]) -> None:
    """Raise ConfigError where there is a critic that no loss wants, or the other way round."""
    wanting = [lane for lane, one in objectives.items() if one.critic]
    if wanting and config.critic is None:
        raise ConfigError(f"trainer.critic: missing, expected a table: the loss of lane {wanting[0]} needs values")
    if config.critic is not None and not wanting:
        raise ConfigError("trainer.critic: got a critic, expected a lane whose loss uses it (ppo)")


class Values:
    """Of one step, whose parts are its minibatches: everything is estimated once, before the first of them."""

    def __init__(self, critic: Critic, objectives: Mapping[Lane, Objective], parts: Sequence[PackedBatch]) -> None:
        self._critic = critic
        self._parts = parts
        lanes = [LANES.index(lane) for lane, one in objectives.items() if one.critic]
        self._chosen = [[np.isin(one.lane_N, lanes) for one in part.microbatches] for part in parts]
        every = [one for part in parts for one in part.microbatches]
        flat = critic.estimate(every, [chosen for part in self._chosen for chosen in part])
        found = iter(flat)
        self._estimates = [[next(found) for _ in part.microbatches] for part in parts]
        self._losses: list[float] = []
        # As the lanes' denominators: a token weighs the same whichever minibatch it falls into.
        self._num_tokens = sum(int(chosen.sum()) for part in self._chosen for chosen in part) / len(parts)

    def advantages(self, part: int) -> list[np.ndarray]:
        """Advantages of each microbatch of a part, [N]; 0 in lanes without a critic."""
        return [one.advantage for one in self._estimates[part]]

    def accumulate(self, part: int) -> bool:
        """The value loss of a part, backward and clipped; False where it or its gradient is not finite."""
        if not any(chosen.any() for chosen in self._chosen[part]):
            return True
        total = 0.0
        for one, estimate, chosen in zip(
            self._parts[part].microbatches, self._estimates[part], self._chosen[part], strict=True
        ):
            if chosen.any():
                loss = self._critic.loss(one, estimate, chosen, self._num_tokens)
                torch.autograd.backward(loss)
                total += float(loss.detach())
        parameters = self._critic.named_parameters().values()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._critic.config.gradient_clip))
        self._losses.append(total)
        return math.isfinite(total) and math.isfinite(norm)

    def measured(self) -> dict[str, float]:
        """The value loss, a mean over minibatches, and the share of the targets' variance that the values explain."""
        pairs = [
            (one.value[chosen], one.target[chosen])
            for estimates, masks in zip(self._estimates, self._chosen, strict=True)
            for one, chosen in zip(estimates, masks, strict=True)
        ]
        return measured(pairs, self._losses, len(self._parts))


def measured(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], losses: Sequence[float], num_parts: int
) -> dict[str, float]:
    """See `Values.measured`. pairs: values and targets of the chosen tokens. losses: of the minibatches that have such."""
    value, target = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*pairs, strict=True))
    if not len(target) or not losses:
        return {}
    variance = float(target.var())
    explained = 1 - float((target - value).var()) / variance if variance > 0 else 0.0
    return {"critic/value_loss": sum(losses) / num_parts, "critic/explained_variance": explained}
