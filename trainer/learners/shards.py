"""Whole tensors out of a DeepSpeed engine and back into it, whatever its ZeRO stage: weights, moments, step count.

Stage 0 keeps everything on every rank in a plain optimizer; stages 1 and 2 shard the optimizer, stage 3 the weights too.
All functions are collective. `engine` and `deepspeed` come from the one module that may import the library.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infra.policies.tensors import Tensor, from_torch, to_torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shards:
    """The weights and optimizer state of one engine, by the model's own names."""

    def __init__(
        self, deepspeed: Any, engine: Any, named: Sequence[tuple[str, torch.nn.Parameter]], *, stage: int
    ) -> None:
        self._deepspeed = deepspeed
        self._engine = engine
        self._named = list(named)
        self._stage = stage
        self._num_steps = 0
        self._create_moments()

    def count_step(self) -> None:
        """One more optimizer step was taken."""
        self._num_steps += 1

    def forget(self) -> None:
        """An optimizer as new."""
        self._set_moments({})
        self._set_num_steps(0)

    def expected(self, *, with_moments: bool) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a saved state."""
        found: dict[str, tuple[int, ...]] = {}
        for name, value in self._named:
            found[f"model/{name}"] = _shape(value)
            if with_moments:
                found |= {f"adam/{key}/{name}": _shape(value) for key in MOMENTS} | {f"adam/step/{name}": ()}
        return found

    def save(self) -> dict[str, Tensor]:
        """Float32 weights and, once a step was taken, moments: whole."""
        state = {}
        for name, value in self._named:
            state[f"model/{name}"] = from_torch(self._weight(value))
            if self._num_steps:
                for key in MOMENTS:
                    state[f"adam/{key}/{name}"] = from_torch(self._moment(value, key))
                state[f"adam/step/{name}"] = from_torch(torch.tensor(float(self._num_steps)))
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], *, rank: int) -> None:
        """Continue from `save`."""
        for name, value in self._named:
            weight = to_torch(state[f"model/{name}"]).to(value.device)
            if self._stage:
                self._deepspeed.utils.safe_set_full_fp32_param(value, weight)
            with self._deepspeed.zero.GatheredParameters([value], modifier_rank=0, enabled=self._stage == 3):
                if rank == 0 or self._stage < 3:
                    value.copy_(weight)
        self._set_moments(state)
        step = state.get(f"adam/step/{self._named[0][0]}")
        self._set_num_steps(0 if step is None else int(to_torch(step)))

    def gathered(self) -> Any:
        """A context in which every weight is whole."""
        parameters = [value for _, value in self._named]
        return self._deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Of stage 0, whose gradients are whole on every rank after the last backward of a step."""
        norms = [value.grad.float().norm() for _, value in self._named if value.grad is not None]
        return float(torch.stack(norms).norm())

    def _weight(self, value: torch.nn.Parameter) -> torch.Tensor:
        if not self._stage:
            return value.detach().float()
        whole: torch.Tensor = self._deepspeed.utils.safe_get_full_fp32_param(value)
        return whole

    def _moment(self, value: torch.nn.Parameter, key: str) -> torch.Tensor:
        if not self._stage:
            held: torch.Tensor = self._engine.optimizer.state[value][key]
            return held
        whole: torch.Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(value, key)
        return whole

    def _create_moments(self) -> None:
        """An optimizer makes them at its first step, but a restore must find them."""
        zero = self._engine.optimizer
        if not self._stage:
            for _, value in self._named:
                moments = {key: torch.zeros_like(value) for key in MOMENTS}
                zero.state[value] = moments | {"step": torch.zeros(())}
            return
        flats = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        for flat in flats:
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            zero.optimizer.state[flat] = moments | {"step": torch.zeros(())}
        if self._stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def _set_moments(self, state: Mapping[str, Tensor]) -> None:
        """Moments from a state; zero where it has none."""
        for name, value in self._named:
            for key in MOMENTS:
                saved = state.get(f"adam/{key}/{name}")
                moment = (torch.zeros(_shape(value)) if saved is None else to_torch(saved)).to(value.device)
                if self._stage:
                    self._deepspeed.utils.safe_set_full_optimizer_state(value, moment, key)
                else:
                    self._engine.optimizer.state[value][key].copy_(moment)

    def _set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        optimizer = self._engine.optimizer
        for state in (optimizer.optimizer if self._stage else optimizer).state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), num_steps)


def _shape(value: Any) -> tuple[int, ...]:
    """A parameter's whole shape, also where ZeRO 3 holds only a part of it here."""
    return tuple(getattr(value, "ds_shape", value.shape))
