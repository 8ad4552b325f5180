"""The learner of one process, on the CPU or one GPU. With pinned threads on the CPU every step is bit-exact.

In bfloat16 the forward computes with the published, rounded weights; the optimizer keeps float32 masters of them, and
gradients are summed over microbatches in float32.
"""

import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from infra.model.model import model_tensors
from infra.model.names import published
from infra.policies.policy import Probe
from infra.policies.tensors import Tensor, from_torch, to_torch
from infra.store.rooms import Rooms
from schemas.fields import Lane
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig
from trainer.health import Observed
from trainer.learners.card.tensors import CardCopies, CardTensors
from trainer.learners.forward import PackedModel, compared, open_adapter, open_reference, policy_settings
from trainer.learners.lanes import (
    StepContext,
    bounds,
    check_step,
    compares,
    looks_ahead,
    microbatch_loss,
    of_phase,
    read,
    reference_dtype,
)
from trainer.learners.learner import Phase, StepStats
from trainer.learners.minibatches import Taken, contexts_of, minibatches_of, scaled_rate, take_all
from trainer.learners.numerics import numerics
from trainer.learners.values import Values, open_critic
from trainer.losses.loss import open_objectives
from trainer.state import ADAPTER, adapter_state, check_adapter

PHASES: tuple[Phase, ...] = ("warmup", "train")
MOMENTS = ("exp_avg", "exp_avg_sq")


class TorchLearner:
    """See `trainer.learners.learner.Learner`. model: a folder. device: "auto" takes a GPU where there is one."""

    def __init__(self, model: str, config: TrainerConfig, *, device: str = "auto") -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if config.threads:
            torch.set_num_threads(config.threads)
        self._config = config
        self._objectives = open_objectives(config.lanes)
        self.adapter = open_adapter(config, model)
        self._model = PackedModel(model, device=device, **policy_settings(config))
        with_reference = compared(self._objectives)
        self._model.adapt(self.adapter, with_reference=with_reference)
        again = functools.partial(PackedModel, model, dtype=reference_dtype(config), device=device)
        self._reference = open_reference(self._model, again) if with_reference else None
        self._critic = open_critic(model, config, self._objectives, device=device)
        self._parameters: dict[str, Any] = self._model.trained
        self._masters = {name: _master(value) for name, value in self._parameters.items()}
        for name, value in self._parameters.items():
            if self._masters[name] is not value:
                into_master = functools.partial(_sum_into, self._masters[name])
                value.register_post_accumulate_grad_hook(into_master)  # type: ignore[no-untyped-call]
        self._rooms = Rooms()
        self._copies = CardCopies(self._model.device, wanted=config.weights_on_card)
        self._phase: Phase = "train"
        self._optimizer = self._fresh_optimizer()

    def begin_phase(self, phase: Phase) -> None:
        """Start a fresh optimizer; the reference, where a loss wants one, becomes the policy as it is now, and the critic's
        body what a warm-up made of it.
        """
        if phase not in PHASES:
            raise ValueError(f"phase: got {phase!r}, expected one of {', '.join(PHASES)}")
        if self._critic is not None and (self._phase, phase) == ("warmup", "train"):
            self._critic.begin_as(self._masters)
        self._phase = phase
        self._optimizer = self._fresh_optimizer()
        self._blend_reference(0.0)

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        """One optimizer step, or m where a loss asks for minibatches; all of them or none."""
        check_step(self._objectives, batch, learning_rate)
        torch.manual_seed(seed)
        objectives = of_phase(self._objectives, self._phase)
        parts = minibatches_of(objectives, batch, seed)
        present = [objectives[lane] for lane in batch.lane_tokens]
        proximal = self._proximal(parts) if any(looks_ahead(one) for one in present) else None
        values = Values(self._critic, objectives, parts) if self._critic is not None else None
        bounded: Mapping[Lane, float] = {}
        if proximal is not None:
            flat = [logprob.cpu().numpy() for part in proximal for logprob in part]
            bounded = bounds(objectives, _joined(batch, parts), flat)
        before = self._snapshot() if len(parts) > 1 else None

        def take(index: int, context: StepContext) -> Taken:
            began_s = time.perf_counter()
            self._clear_gradients()
            advantages = values.advantages(index) if values is not None else None
            ahead = proximal[index] if proximal else None
            loss, norm, observed = self._accumulate(context, parts[index], ahead, advantages)
            sound = values is None or values.accumulate(index)
            ready_s = time.perf_counter()
            applied = math.isfinite(loss) and norm <= max_grad_norm and sound
            if applied:
                self._apply(scaled_rate(self._config, learning_rate, observed))
            seconds = {"gradients": ready_s - began_s, "update": time.perf_counter() - ready_s}
            return Taken(applied=applied, loss=loss, grad_norm=norm, observed=observed, seconds=seconds)

        contexts = contexts_of(self._config, objectives, batch, len(parts), bounded)
        measured = values.measured if values is not None else dict[str, float]
        stats = take_all(contexts, take, lambda: self._revert(before), measured)
        self._copies.stepped = True
        return stats

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the policy in its published dtype, by the names of its folder; of an adapter by peft's."""
        return model_tensors(self._model.module, self._rooms)

    def copy_on_card(self) -> CardTensors | None:
        """See `trainer.learners.learner.OnCard`."""
        module = self._model.module
        return self._copies.take(published(module, module.state_dict()), self._rooms)

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        """Logprobs of `sequences` under `tensors()`."""
        return Probe(sequences, tuple(tuple(self._model.sequence_logprobs(one)) for one in sequences))

    def greedy_accuracy(self, batch: PackedBatch) -> float:
        """Share of sequences whose every sampled token is the argmax."""
        if not batch.num_sequences:
            raise ValueError("batch: got no sequences, expected at least one")
        misses = np.zeros(batch.num_sequences, np.int64)
        for one in batch.microbatches:
            missed = ~self._model.hits(one).cpu().numpy()
            misses += np.bincount(one.sequence_N[missed], minlength=len(misses))
        return float((misses == 0).mean())

    @torch.no_grad()
    def log_distances(self, batch: PackedBatch) -> np.ndarray:
        """Σ |log π_θ - log μ| over the tokens of each sequence that have a ratio, [num_sequences] float64."""
        sums = np.zeros(batch.num_sequences)
        for one in batch.microbatches:
            moved = np.abs(self._model.logprobs(one).double().cpu().numpy() - one.behaviour_N)
            sums += np.bincount(one.sequence_N, weights=np.where(one.ratio_N, moved, 0.0), minlength=len(sums))
        return sums

    def numerics(self) -> dict[str, str]:
        """Library, device, instruction set and threads, and how rows are read."""
        return numerics(self._model.device, adapted=self.adapter is not None) | {"attention": self._model.reading}

    def save(self) -> dict[str, Tensor]:
        """Float32 weights, optimizer moments, phase, and the reference and the critic where there are such."""
        state = {name: from_torch(value) for name, value in self._state(self._optimizer)}
        state["phase"] = from_torch(torch.tensor(PHASES.index(self._phase), dtype=torch.uint8))
        return state | adapter_state(self.adapter)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `save`."""
        check_adapter(state, self.adapter)
        state = {name: one for name, one in state.items() if name != ADAPTER}
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

    def _accumulate(
        self,
        context: StepContext,
        part: PackedBatch,
        proximal: Sequence[torch.Tensor] | None,
        advantages: Sequence[np.ndarray] | None,
    ) -> tuple[float, float, list[Observed]]:
        """Forward and backward of one minibatch; its loss, the norm of its gradient, which is then clipped, and what its
        microbatches observed.
        """
        observed = []
        total = torch.zeros((), device=self._model.device)
        for index, one in enumerate(part.microbatches):
            logprob_N, entropy_N = read(lambda what, of: getattr(self._model, what)(of), context, one)
            rerouted_N = self._model.rerouted(one)
            reference_N = None
            if self._reference is not None and compares(context.objectives, one):
                with torch.no_grad():
                    reference_N = self._reference.logprobs(one)
            loss, seen = microbatch_loss(
                context,
                one,
                logprob_N,
                proximal_N=proximal[index] if proximal else None,
                reference_N=reference_N,
                entropy_N=entropy_N,
                advantage_N=advantages[index] if advantages else None,
                rerouted_N=rerouted_N,
            )
            torch.autograd.backward(loss)
            total += loss.detach()
            observed.append(seen)
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._config.gradient_clip)
        return float(total), float(norm), observed

    def _apply(self, learning_rate: float) -> None:
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._publish_masters()
        self._clear_gradients()
        if self._config.reference_decay < 1.0:
            self._blend_reference(self._config.reference_decay)

    @torch.no_grad()
    def _blend_reference(self, decay: float) -> None:
        """The reference as `decay` of itself and the rest the policy."""
        for name, reference in self._reference.trained.items() if self._reference is not None else ():
            value = self._parameters[name].to(reference.dtype)
            reference.lerp_(value, 1.0 - decay) if decay else reference.copy_(value)

    @torch.no_grad()
    def _proximal(self, parts: Sequence[PackedBatch]) -> list[list[torch.Tensor]]:
        """Logprobs of every microbatch before the first minibatch step."""
        return [[self._model.logprobs(one) for one in part.microbatches] for part in parts]

    @torch.no_grad()
    def _publish_masters(self) -> None:
        moved = [name for name, value in self._parameters.items() if self._masters[name] is not value]
        if moved:
            torch._foreach_copy_([self._parameters[name] for name in moved], [self._masters[name] for name in moved])

    def _clear_gradients(self) -> None:
        for value in (*self._parameters.values(), *(value for _, value in self._trained())):
            value.grad = None

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        groups: list[dict[str, Any]] = [{"params": list(self._masters.values())}]
        if self._critic is not None:
            groups.append(
                {"params": list(self._critic.named_parameters().values()), "lr": self._critic.config.learning_rate}
            )
        return torch.optim.AdamW(groups, betas=self._config.betas, weight_decay=self._config.weight_decay, fused=True)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything an optimizer moves, by the name of its state."""
        yield from self._masters.items()
        if self._critic is not None:
            yield from ((f"critic/{name}", value) for name, value in self._critic.named_parameters().items())

    def _state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that is saved, by name; the tensors themselves."""
        for name, value in self._trained():
            yield name if name.startswith("critic/") else f"model/{name}", value
            for key, moment in optimizer.state.get(value, {}).items():
                yield f"adam/{key}/{name}", moment
        for name, value in self._saved_buffers():
            yield f"buffer/{name}", value
        if self._reference is not None:
            yield from ((f"reference/{name}", value) for name, value in self._reference.trained.items())

    def _saved_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = self._model.module.state_dict() if self.adapter is None else {}  # a base never changes
        return ((name, value) for name, value in self._model.module.named_buffers() if name in state)

    def _snapshot(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._state(self._optimizer)}

    @torch.no_grad()
    def _revert(self, before: Mapping[str, torch.Tensor] | None) -> None:
        """Undo the minibatch steps since `_snapshot`."""
        self._clear_gradients()
        if before is None:
            return
        for name, value in self._trained():
            if f"adam/step/{name}" not in before:
                self._optimizer.state.pop(value, None)
        for name, value in self._state(self._optimizer):
            value.copy_(before[name])
        self._publish_masters()


def _joined(batch: PackedBatch, parts: Sequence[PackedBatch]) -> PackedBatch:
    """The batch with the microbatches of its parts, in their order."""
    return msgspec.structs.replace(batch, microbatches=tuple(one for part in parts for one in part.microbatches))


def _master(value: torch.nn.Parameter) -> torch.nn.Parameter:
    """The float32 weight the optimizer moves: the parameter itself where it is float32."""
    return value if value.dtype == torch.float32 else torch.nn.Parameter(value.detach().float())


def _sum_into(master: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Add a microbatch's gradient to its master's."""
    assert value.grad is not None
    if master.grad is None:
        master.grad = value.grad.float()
    else:
        master.grad += value.grad
    value.grad = None
