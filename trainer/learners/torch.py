"""Learner in a single process, on the CPU or a GPU. With a fixed number of threads on the CPU every step is bit-exact.

In bfloat16 the forward pass uses the published, rounded weights; the optimizer keeps float32 masters, and gradients are summed
over microbatches in float32.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from infra.model.model import model_tensors
from infra.policies.policy import Probe
from infra.policies.tensors import Blocks, Tensor, from_torch, in_place, to_torch
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.channel import Channel
from trainer.learners.critic import open_critic
from trainer.learners.forward import PackedModel, compared, open_adapter, open_reference, policy_settings
from trainer.learners.lanes import check_step, phase_objectives, reference_dtype
from trainer.learners.learner import Phase, StepStats
from trainer.learners.numerics import numerics
from trainer.learners.step import log_distance, minibatches, miss, optimizer_step, per_sequence, whole_rows
from trainer.losses.loss import open_objectives
from trainer.state import ADAPTER, adapter_state, check_adapter

PHASES: tuple[Phase, ...] = ("warmup", "train")
MOMENTS = ("exp_avg", "exp_avg_sq")


class TorchLearner:
    """Learner in a single process, which is also its own `StepEngine`. model: Folder of the model. device: Device of the model.
    "auto": a GPU if there is one, else the CPU.
    """

    def __init__(self, model: str, config: TrainerConfig, *, device: str = "auto") -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config = config
        self.channel, self.stage = Channel(alone=True), 0
        self._objectives = open_objectives(config.lanes)
        self.adapter = open_adapter(config, model)
        self.model = PackedModel(model, device=device, **policy_settings(config))
        with_reference = compared(self._objectives)
        self.model.adapt(self.adapter, with_reference=with_reference)
        again = functools.partial(PackedModel, model, dtype=reference_dtype(config), device=device)
        self._reference = open_reference(self.model, again) if with_reference else None
        self.compare = None if self._reference is None else self._reference.logprobs
        self.critic = open_critic(model, config, self._objectives, device=device)
        self._parameters: dict[str, Any] = self.model.trained
        self._masters = {name: _master(value) for name, value in self._parameters.items()}
        for name, value in self._parameters.items():
            if (master := self._masters[name]) is not value:
                self.model.sum_gradient(value, functools.partial(_total, master, torch.empty_like(master)))
        self._blocks = Blocks()
        self._phase: Phase = "train"
        self._optimizer = self._fresh_optimizer()

    def begin_phase(self, phase: Phase) -> None:
        """Start a fresh optimizer; the reference, if a loss needs one, becomes the present policy. After a warm-up the body of
        the critic takes the policy's weights; its head stays.
        """
        if phase not in PHASES:
            raise ValueError(f"phase: got {phase!r}, expected one of {', '.join(PHASES)}")
        if self.critic is not None and (self._phase, phase) == ("warmup", "train"):
            self.critic.begin_as(self._masters)
        self._phase = phase
        self._optimizer = self._fresh_optimizer()
        self.move_reference(0.0)

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        check_step(self._objectives, batch, learning_rate)
        torch.manual_seed(seed)
        objectives = phase_objectives(self._objectives, self._phase)
        parts = [whole_rows(part) for part in minibatches(objectives, batch, seed)]
        dealt = [[part] for part in parts]
        return optimizer_step(
            self, objectives, batch, parts, dealt, learning_rate=learning_rate, max_grad_norm=max_grad_norm
        )

    def tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.model.module, self._blocks)

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        return Probe(sequences, tuple(tuple(self.model.sequence_logprobs(tokens)) for tokens in sequences))

    def greedy_accuracy(self, batch: PackedBatch) -> float:
        if not batch.num_sequences:
            raise ValueError("batch: got no sequences, expected at least one")
        misses = per_sequence(self, whole_rows(batch), batch.num_sequences, "hits", miss)
        return float((misses == 0).mean())

    def log_distances(self, batch: PackedBatch) -> np.ndarray:
        return per_sequence(self, whole_rows(batch), batch.num_sequences, "logprobs", log_distance)

    def numerics(self) -> dict[str, str]:
        return numerics(self.model.device, adapted=self.adapter is not None) | {"attention": self.model.reading}

    def save(self) -> dict[str, Tensor]:
        """Float32 weights, optimizer moments, phase, and the reference and the critic where there are such."""
        return self._saved(from_torch)

    def held(self) -> dict[str, Tensor] | None:
        """The state of `save` without a copy, until the next step; None on a GPU."""
        return self._saved(in_place) if self.model.device.type == "cpu" else None

    def _saved(self, taken: Callable[[torch.Tensor], Tensor]) -> dict[str, Tensor]:
        state = {name: taken(value) for name, value in self._state(self._optimizer)}
        state["phase"] = from_torch(torch.tensor(PHASES.index(self._phase), dtype=torch.uint8))
        return state | adapter_state(self.adapter)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        check_adapter(state, self.adapter)
        state = {name: tensor for name, tensor in state.items() if name != ADAPTER}
        optimizer = self._fresh_optimizer()
        if any(name.startswith("adam/") for name in state):
            for name, value in self._trained():
                if f"adam/step/{name}" in state:
                    optimizer.state[value] = {key: torch.zeros_like(value) for key in MOMENTS}
                    optimizer.state[value]["step"] = torch.zeros((), device=value.device)
        expected = dict(self._state(optimizer)) | {"phase": torch.zeros(())}
        if odd := sorted(set(state) ^ set(expected)):
            what = "the model has none" if odd[0] in state else "it is missing"
            raise ValueError(f"state: {odd[0]}: {what} ({len(odd)} names differ)")
        for name, value in expected.items():
            if state[name].shape != value.shape:
                raise ValueError(f"state: {name}: got shape {state[name].shape}, expected {tuple(value.shape)}")
        phase = int(to_torch(state["phase"]))
        if phase >= len(PHASES):
            raise ValueError(f"state: phase: got {phase}, expected below {len(PHASES)}")
        self._phase, self._optimizer = PHASES[phase], optimizer
        with torch.no_grad():
            for name, value in self._state(optimizer):
                value.copy_(to_torch(state[name]))
        self._publish_masters()

    def close(self) -> None:
        """One process holds nothing that does not go with it."""

    def run(self, method: str, argument: Any) -> Any:
        return getattr(self.model, method)(argument)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        torch.autograd.backward(loss)

    def update(self, learning_rate: float, loss: float, max_grad_norm: float, *, sound: bool) -> tuple[bool, float]:
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self.config.gradient_clip))
        if not (sound and math.isfinite(loss) and norm <= max_grad_norm):
            return False, norm
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._publish_masters()
        self.clear_gradients()
        return True, norm

    @torch.no_grad()
    def move_reference(self, decay: float) -> None:
        for name, reference in self._reference.trained.items() if self._reference is not None else ():
            value = self._parameters[name].to(reference.dtype)
            reference.lerp_(value, 1.0 - decay) if decay else reference.copy_(value)

    @torch.no_grad()
    def _publish_masters(self) -> None:
        moved = [name for name, value in self._parameters.items() if self._masters[name] is not value]
        if moved:
            torch._foreach_copy_([self._parameters[name] for name in moved], [self._masters[name] for name in moved])

    def clear_gradients(self) -> None:
        for value in (*self._parameters.values(), *(value for _, value in self._trained())):
            value.grad = None

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        groups: list[dict[str, Any]] = [{"params": list(self._masters.values())}]
        if self.critic is not None:
            groups.append(
                {"params": list(self.critic.named_parameters().values()), "lr": self.critic.config.learning_rate}
            )
        return torch.optim.AdamW(groups, betas=self.config.betas, weight_decay=self.config.weight_decay, fused=True)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._masters.items()
        if self.critic is not None:
            yield from ((f"critic/{name}", value) for name, value in self.critic.named_parameters().items())

    def _state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that is saved, by name; the tensors themselves."""
        for name, value in self._trained():
            yield name if name.startswith("critic/") else f"model/{name}", value
            for key, moment in optimizer.state.get(value, {}).items():
                yield f"adam/{key}/{name}", moment
        state = self.model.module.state_dict() if self.adapter is None else {}  # a base never changes
        yield from ((f"buffer/{name}", value) for name, value in self.model.module.named_buffers() if name in state)
        if self._reference is not None:
            yield from ((f"reference/{name}", value) for name, value in self._reference.trained.items())

    def keep(self) -> Callable[[], None]:
        before = {name: value.clone() for name, value in self._state(self._optimizer)}

        @torch.no_grad()
        def undo() -> None:
            self.clear_gradients()
            for name, value in self._trained():
                if f"adam/step/{name}" not in before:
                    self._optimizer.state.pop(value, None)
            for name, value in self._state(self._optimizer):
                value.copy_(before[name])
            self._publish_masters()

        return undo


def _master(value: torch.nn.Parameter) -> torch.nn.Parameter:
    """The float32 weight the optimizer moves: the parameter itself where it is float32."""
    return value if value.dtype == torch.float32 else torch.nn.Parameter(value.detach().float())


def _total(master: torch.nn.Parameter, room: torch.Tensor) -> torch.Tensor:
    """The master's gradient. room: of every step's; the kernel would clear new pages each time."""
    if master.grad is None:
        master.grad = room.zero_()
    return master.grad
