"""The learner of many ranks: DeepSpeed's ZeRO 0 to 3, optionally with the optimizer in host memory.

`headrace train --ranks N` or `torchrun` starts it. Rank 0 is the learner the trainer calls; the others call `follow` and
do what it says until it closes. Rows are dealt to ranks, and short ranks compute a row that counts for nothing, so any
number of ranks gives one gradient. Saved states are whole tensors, those of `TorchLearner`, and restore on any number of
ranks and any stage.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as distributed

from infra.policies.policy import Probe
from infra.policies.tensors import Tensor, from_torch, load_tensors, save_tensors, to_torch
from schemas.errors import ConfigError
from schemas.fields import Lane
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.batch.split import for_ranks, split
from trainer.config import TrainerConfig
from trainer.health.diagnostics import Observed, diagnose, join
from trainer.learners.forward import PackedModel
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
    step_context,
)
from trainer.learners.learner import Phase, StepStats
from trainer.learners.numerics import numerics
from trainer.learners.orders import Order, broadcast, decode_batch, encode_batch, gather_arrays, gather_observed
from trainer.learners.shards import Shards
from trainer.learners.zero import engine_settings
from trainer.losses.loss import Objective, open_objectives
from trainer.losses.offpolicy import effective_share, ess_learning_rate

PHASES: tuple[Phase, ...] = ("warmup", "train")


class _Forward(torch.nn.Module):
    """Every use of the model goes through one root module: ZeRO 3 gathers weights by its hooks."""

    def __init__(self, packed: PackedModel) -> None:
        super().__init__()
        self.module = packed.module
        self._packed = packed

    def forward(self, what: str, argument: Any) -> Any:
        return getattr(self._packed, what)(argument)


class DeepSpeedLearner:
    """See `trainer.learner.Learner`. stage: of ZeRO. offload: optimizer state in host memory. json: DeepSpeed's own
    settings under its own names, laid over ours; see `trainer.learners.zero` for those that are ours.

    rank: only rank 0 is called; a process with another one calls `follow`. A reference model is whole on every rank.
    """

    def __init__(
        self,
        model: str,
        config: TrainerConfig,
        *,
        stage: int = 2,
        offload: bool = False,
        json: Mapping[str, Any] | None = None,
    ) -> None:
        settings = engine_settings(config, stage, offload, json or {})
        self._config = config
        self._stage = stage
        self._objectives = open_objectives(config.lanes)
        if config.critic is not None or any(one.critic for one in self._objectives.values()):
            raise ConfigError(
                "trainer.critic: got DeepSpeedLearner, expected TorchLearner: the critic is one process's"
            )
        gpu = torch.cuda.is_available()
        if not gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if config.threads:
            torch.set_num_threads(config.threads)
        import deepspeed

        _alone_unless_told(os.environ)
        deepspeed.ops.__compatible_ops__ = {}  # else it compiles kernels for a collective that only inference calls
        deepspeed.init_distributed(dist_backend="nccl" if gpu else "gloo")
        self.rank: int = distributed.get_rank()
        self._world = distributed.get_world_size()
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
        self._model = PackedModel(
            model, dtype=config.dtype, device=device, activation_checkpointing=config.activation_checkpointing
        )
        self._reference: PackedModel | None = None
        if any(one.reference for one in self._objectives.values()):
            self._reference = PackedModel(model, dtype=reference_dtype(config), device=device)
        named = list(self._model.module.named_parameters())
        parameters = [value for _, value in named]
        optimizer = torch.optim.AdamW(parameters, betas=config.betas, weight_decay=config.weight_decay)
        self._engine: Any = deepspeed.initialize(model=_Forward(self._model), optimizer=optimizer, config=settings)[0]
        self._shards = Shards(deepspeed, self._engine, named, stage=stage)
        self._begin("train")

    def follow(self) -> None:
        """What ranks other than 0 do: obey until rank 0 closes."""
        while (order := broadcast(None, self._model.device)).name != "close":
            self._obey(order)
        distributed.destroy_process_group()  # its threads must not be running when the interpreter ends

    def close(self) -> None:
        """Let the other ranks end. Rank 0 only; nothing can be called afterwards."""
        broadcast(Order(name="close"), self._model.device)
        distributed.destroy_process_group()

    def begin_phase(self, phase: Phase) -> None:
        """Start a fresh optimizer."""
        if phase not in PHASES:
            raise ValueError(f"phase: got {phase!r}, expected one of {', '.join(PHASES)}")
        self._call(Order(name="begin_phase", phase=phase))

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        """One optimizer step over all ranks, or m where a loss asks for minibatches; all of them or none.

        max_grad_norm is not looked at: DeepSpeed tells the norm once the step is done.
        """
        check_step(self._objectives, batch, learning_rate)
        order = Order(name="step", batch=encode_batch(batch), learning_rate=learning_rate, seed=seed)
        stats: StepStats = self._call(order)
        return stats

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the policy in its published dtype, by the model's own names."""
        found: dict[str, Tensor] = self._call(Order(name="tensors"))
        return found

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        """Logprobs of `sequences` under `tensors()`."""
        return Probe(sequences, self._call(Order(name="probe", sequences=sequences)))

    def greedy_accuracy(self, batch: PackedBatch) -> float:
        """Share of sequences whose every sampled token is the argmax."""
        if not batch.num_sequences:
            raise ValueError("batch: got no sequences, expected at least one")
        return float((self._call(Order(name="greedy", batch=encode_batch(batch))) == 0).mean())

    def log_distances(self, batch: PackedBatch) -> np.ndarray:
        """Σ |log π_θ - log μ| over the tokens of each sequence that have a ratio, [num_sequences] float64."""
        return np.asarray(self._call(Order(name="distances", batch=encode_batch(batch))))

    def numerics(self) -> dict[str, str]:
        """Those of one process, ranks, and the stage of ZeRO."""
        return numerics(self._model.device) | {
            "attention": self._model.reading,
            "ranks": str(self._world),
            "zero": str(self._stage),
        }

    def save(self) -> dict[str, Tensor]:
        """Float32 weights, optimizer moments and phase, whole."""
        state: dict[str, Tensor] = self._call(Order(name="save"))
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `save`."""
        with_moments = any(name.startswith("adam/") for name in state)
        expected: dict[str, tuple[int, ...]] = {"phase": ()} | self._shards.expected(with_moments=with_moments)
        if self._reference is not None:
            named = self._reference.module.named_parameters()
            expected |= {f"reference/{name}": tuple(value.shape) for name, value in named}
        if odd := sorted(set(state) ^ set(expected)):
            what = "the model has none" if odd[0] in state else "it is missing"
            raise ValueError(f"state: {odd[0]}: {what} ({len(odd)} names differ)")
        for name, shape in expected.items():
            if state[name].shape != shape:
                raise ValueError(f"state: {name}: got shape {state[name].shape}, expected {shape}")
        self._call(Order(name="restore", state=save_tensors(state)))

    def _call(self, order: Order) -> Any:
        if self.rank:
            raise ValueError(f"rank {self.rank}: got a call of {order.name}, expected follow(): only rank 0 is called")
        return self._obey(broadcast(order, self._model.device))

    def _obey(self, order: Order) -> Any:
        """Do one order on this rank, together with all others."""
        match order.name:
            case "begin_phase":
                return self._begin(order.phase)
            case "step":
                return self._step(order)
            case "tensors":
                return self._tensors()
            case "probe":
                return self._probe(order.sequences)
            case "greedy":
                return self._per_sequence(order, "hits", lambda one, hits: hits == 0)
            case "distances":
                return self._distances(order)
            case "save":
                return self._save()
            case "restore":
                return self._restore(load_tensors(order.state))
        raise ValueError(f"order: got {order.name!r}, which this rank does not know")

    def _begin(self, phase: Phase) -> None:
        self._phase: Phase = phase
        self._shards.forget()
        self._move_reference(0.0)

    def _step(self, order: Order) -> StepStats:
        assert order.batch is not None
        batch = decode_batch(order.batch)
        torch.manual_seed(order.seed)
        objectives = of_phase(self._objectives, self._phase)
        present = [objectives[lane] for lane in batch.lane_tokens]
        minibatches = max(one.minibatches for one in present)
        parts = [batch] if minibatches == 1 else list(split(batch, minibatches, seed=order.seed))
        ahead = [self._ahead(part) for part in parts] if any(looks_ahead(one) for one in present) else None
        bounded = self._bounds(objectives, batch, parts, ahead) if ahead is not None else {}
        before = self._save() if len(parts) > 1 else None
        observed: list[Observed] = []
        losses: list[float] = []
        norms: list[float] = []
        for index, part in enumerate(parts):
            decay = self._config.staleness_decay
            context = step_context(objectives, batch, len(parts), index, staleness_decay=decay, bounds=bounded)
            proximal = ahead[index] if ahead is not None and any(one.proximal for one in present) else None
            loss, seen = self._backward(context, part, proximal)
            observed += seen
            norm = self._apply(order.learning_rate, seen)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                if before is not None:
                    self._restore(before)
                return StepStats(finite=False, loss=loss, grad_norm=norm, values={})
            losses.append(loss)
            norms.append(norm)
            if self._config.reference_decay < 1.0:
                self._move_reference(self._config.reference_decay)
        loss = sum(losses) / len(losses)
        return StepStats(finite=True, loss=loss, grad_norm=max(norms), values=diagnose(join(observed)))

    @torch.no_grad()
    def _ahead(self, part: PackedBatch) -> list[torch.Tensor]:
        """log π_θ of this rank's microbatches before the step."""
        mine, most = self._share(part)
        found = [self._engine("logprobs", mine[i] if i < len(mine) else part.microbatches[0]) for i in range(most)]
        return found[: len(mine)]

    def _bounds(
        self,
        objectives: Mapping[Lane, Objective],
        batch: PackedBatch,
        parts: Sequence[PackedBatch],
        ahead: Sequence[Sequence[torch.Tensor]],
    ) -> dict[Lane, float]:
        """What losses measure over the whole step, from the microbatches of all ranks."""
        mine = [one for part in parts for one in self._share(part)[0]]
        logprobs = [logprob.cpu().numpy() for part in ahead for logprob in part]
        every, of_all = gather_arrays(mine, logprobs, self._model.device)
        return bounds(objectives, msgspec.structs.replace(batch, microbatches=tuple(every)), of_all)

    @torch.no_grad()
    def _move_reference(self, decay: float) -> None:
        """The reference as `decay` of itself and the rest the policy. Collective."""
        if self._reference is None:
            return
        with self._shards.gathered():
            pairs = zip(self._reference.module.parameters(), self._model.module.parameters(), strict=True)
            for reference, value in pairs:
                reference.lerp_(value.to(reference.dtype), 1.0 - decay)

    def _backward(
        self, context: StepContext, part: PackedBatch, proximal: Sequence[torch.Tensor] | None
    ) -> tuple[float, list[Observed]]:
        """Forward and backward of this rank's rows; the loss over all ranks and what all of them observed."""
        mine, most = self._share(part)
        total = torch.zeros(1, device=self._model.device)
        observed = []
        for index in range(most):
            real = index < len(mine)
            one = mine[index] if real else part.microbatches[0]
            self._engine.set_gradient_accumulation_boundary(index == most - 1)
            logprob_N, entropy_N = read(self._engine, context, one)
            loss, seen = microbatch_loss(
                context,
                one,
                logprob_N,
                proximal_N=None if proximal is None else proximal[index] if real else logprob_N.detach(),
                reference_N=self._of_reference(one) if compares(context.objectives, one) else None,
                entropy_N=entropy_N,
            )
            if real:
                observed.append(seen)
                total += loss.detach()
            # ZeRO averages over ranks; the lanes are divided by global counts already, so their sum is wanted.
            loss = loss * self._world if real else loss.nan_to_num() * 0
            if index == most - 1:
                distributed.all_reduce(total)
                # A step is refused by its gradient's norm alone, so a loss that is not finite must show there.
                loss = loss if math.isfinite(float(total)) else loss * math.nan
            self._engine.backward(loss, scale_wrt_gas=False)
        return float(total), gather_observed(observed, self._model.device)

    @torch.no_grad()
    def _of_reference(self, one: Microbatch) -> torch.Tensor | None:
        return None if self._reference is None else self._reference.logprobs(one)

    def _share(self, part: PackedBatch) -> tuple[tuple[Microbatch, ...], int]:
        """This rank's microbatches, and how many the rank with most has."""
        dealt = for_ranks(part, self._world)
        return dealt[self.rank], max(len(one) for one in dealt)

    def _apply(self, learning_rate: float, observed: list[Observed]) -> float:
        if self._config.scale_by_ess:
            seen = join(observed)
            weight = np.exp(seen.logprob[seen.ratio].astype(np.float64) - seen.behaviour[seen.ratio])
            learning_rate = ess_learning_rate(learning_rate, effective_share(weight))
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if not self._stage:
            norm = self._shards.gradient_norm()
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return norm
            self._engine.step()
            self._shards.count_step()
            return norm
        self._engine.step()
        if not self._engine.optimizer.overflow:
            self._shards.count_step()
        return float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        with self._shards.gathered():
            if self.rank == 0:
                found = {name: from_torch(value) for name, value in self._model.module.state_dict().items()}
        return found

    @torch.no_grad()
    def _probe(self, sequences: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(self._engine("sequence_logprobs", one)) for one in sequences)

    def _distances(self, order: Order) -> np.ndarray:
        return self._per_sequence(
            order, "logprobs", lambda one, found: np.where(one.ratio_N, np.abs(found - one.behaviour_N), 0.0)
        )

    @torch.no_grad()
    def _per_sequence(
        self, order: Order, name: str, of_tokens: Callable[[Microbatch, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Sum over the tokens of each sequence of what is made of a forward's values, over all ranks."""
        assert order.batch is not None
        batch = decode_batch(order.batch)
        mine, most = self._share(batch)
        sums = np.zeros(batch.num_sequences)
        for index in range(most):
            one = mine[index] if index < len(mine) else batch.microbatches[0]
            found = self._engine(name, one).double().cpu().numpy()
            if index < len(mine):
                sums += np.bincount(one.sequence_N, weights=of_tokens(one, found), minlength=len(sums))
        total = torch.from_numpy(sums).to(self._model.device)
        distributed.all_reduce(total)
        return np.asarray(total.cpu().numpy())

    def _save(self) -> dict[str, Tensor]:
        state = self._shards.save()
        if self._reference is not None:
            named = self._reference.module.named_parameters()
            state |= {f"reference/{name}": from_torch(value) for name, value in named}
        state["phase"] = from_torch(torch.tensor(PHASES.index(self._phase), dtype=torch.uint8))
        return state

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Tensor]) -> None:
        self._phase = PHASES[int(to_torch(state["phase"]))]
        self._shards.restore(state, rank=self.rank)
        if self._reference is not None:
            for name, value in self._reference.module.named_parameters():
                value.copy_(to_torch(state[f"reference/{name}"]))


def _alone_unless_told(environment: MutableMapping[str, str]) -> None:
    """One rank, where nobody who starts ranks said otherwise."""
    if "WORLD_SIZE" not in environment:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
