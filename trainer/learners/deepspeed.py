"""The learner of many ranks: DeepSpeed's ZeRO 1 to 3, optionally with the optimizer in host memory.

Start it with `torchrun`. Rank 0 is the learner the trainer calls; the others call `follow` and do what it says until it
closes. Rows are dealt to ranks, and short ranks compute a row that counts for nothing, so any number of ranks gives one
gradient. Saved states are whole tensors, those of `TorchLearner`, and restore on any number of ranks and any stage.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from infra.weights.policy import Probe
from infra.weights.tensors import Tensor, from_torch, load_tensors, save_tensors, to_torch
from schemas.errors import ConfigError
from trainer.batch import Microbatch, PackedBatch, split
from trainer.config import TrainerConfig
from trainer.diagnostics import Observed, diagnose, join
from trainer.learner import Phase, StepStats
from trainer.learners.forward import PackedModel
from trainer.learners.lanes import StepContext, check_step, microbatch_loss, of_phase, open_objectives
from trainer.learners.orders import Order, broadcast, decode_batch, encode_batch, gather_observed
from trainer.offpolicy import effective_share, ess_learning_rate

PHASES: tuple[Phase, ...] = ("warmup", "train")
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Forward(torch.nn.Module):
    """Every use of the model goes through one root module: ZeRO 3 gathers weights by its hooks."""

    def __init__(self, packed: PackedModel) -> None:
        super().__init__()
        self.module = packed.module
        self._packed = packed

    def forward(self, what: str, argument: Any) -> Any:
        return getattr(self._packed, what)(argument)


class DeepSpeedLearner:
    """See `trainer.learner.Learner`. stage: of ZeRO. offload: optimizer state in host memory.

    rank: only rank 0 is called; a process with another one calls `follow`.
    """

    def __init__(self, model: str, config: TrainerConfig, *, stage: int = 2, offload: bool = False) -> None:
        if stage not in (1, 2, 3):
            raise ConfigError(f"trainer.learner.options.stage: got {stage}, expected 1, 2 or 3")
        self._config = config
        self._stage = stage
        self._objectives = open_objectives(config.lanes)
        if any(one.reference or one.proximal == "recompute" for one in self._objectives.values()):
            raise ConfigError(
                "trainer.learner: losses with a reference or a recomputed proximal policy need TorchLearner"
            )
        gpu = torch.cuda.is_available()
        if not gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if config.threads:
            torch.set_num_threads(config.threads)
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if gpu else "gloo")
        self._deepspeed: Any = deepspeed
        self.rank: int = distributed.get_rank()
        self._world = distributed.get_world_size()
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
        self._model = PackedModel(model, dtype=config.dtype, device=device)
        self._names = [name for name, _ in self._model.module.named_parameters()]
        self._parameters = [value for _, value in self._model.module.named_parameters()]
        optimizer = torch.optim.AdamW(self._parameters, betas=config.betas, weight_decay=config.weight_decay)
        self._engine: Any = deepspeed.initialize(
            model=_Forward(self._model), optimizer=optimizer, config=_settings(config, stage, offload)
        )[0]
        self._num_steps = 0
        self._create_moments()
        self._begin("train")

    def follow(self) -> None:
        """What ranks other than 0 do: obey until rank 0 closes."""
        while (order := broadcast(None, self._model.device)).name != "close":
            self._obey(order)

    def close(self) -> None:
        """Let the other ranks end. Rank 0 only; nothing can be called afterwards."""
        broadcast(Order(name="close"), self._model.device)

    def begin_phase(self, phase: Phase) -> None:
        """Start a fresh optimizer."""
        if phase not in PHASES:
            raise ValueError(f"phase: got {phase!r}, expected one of {', '.join(PHASES)}")
        self._call(Order(name="begin_phase", phase=phase))

    def step(self, batch: PackedBatch, *, learning_rate: float, seed: int) -> StepStats:
        """One optimizer step over all ranks, or m where a loss asks for minibatches; all of them or none."""
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
        return float(self._call(Order(name="greedy", batch=encode_batch(batch))))

    def save(self) -> dict[str, Tensor]:
        """Float32 weights, optimizer moments and phase, whole."""
        state: dict[str, Tensor] = self._call(Order(name="save"))
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `save`."""
        expected: dict[str, tuple[int, ...]] = {"phase": ()}
        with_moments = any(name.startswith("adam/") for name in state)
        for name, value in zip(self._names, self._parameters, strict=True):
            expected[f"model/{name}"] = _shape(value)
            if with_moments:
                expected |= {f"adam/{key}/{name}": _shape(value) for key in MOMENTS} | {f"adam/step/{name}": ()}
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
                return self._greedy(order)
            case "save":
                return self._save()
            case "restore":
                return self._restore(load_tensors(order.state))
        raise ValueError(f"order: got {order.name!r}, which this rank does not know")

    def _begin(self, phase: Phase) -> None:
        self._phase: Phase = phase
        self._set_moments({})
        self._set_num_steps(0)

    def _step(self, order: Order) -> StepStats:
        assert order.batch is not None
        batch = decode_batch(order.batch)
        torch.manual_seed(order.seed)
        objectives = of_phase(self._objectives, self._phase)
        minibatches = max(objectives[lane].minibatches for lane in batch.lane_tokens)
        parts = [batch] if minibatches == 1 else list(split(batch, minibatches, seed=order.seed))
        before = self._save() if len(parts) > 1 else None
        observed: list[Observed] = []
        norms: list[float] = []
        loss = 0.0
        for index, part in enumerate(parts):
            context = StepContext(
                objectives=objectives,
                lane_tokens=part.lane_tokens,
                version=batch.version,
                exact=batch.exact and index == 0,
                staleness_decay=self._config.staleness_decay,
            )
            loss, seen = self._backward(context, part)
            observed += seen
            norm = self._apply(order.learning_rate, seen)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                if before is not None:
                    self._restore(before)
                return StepStats(finite=False, loss=loss, grad_norm=norm, values={})
            norms.append(norm)
        return StepStats(finite=True, loss=loss, grad_norm=max(norms), values=diagnose(join(observed)))

    def _backward(self, context: StepContext, part: PackedBatch) -> tuple[float, list[Observed]]:
        """Forward and backward of this rank's rows; the loss over all ranks and what all of them observed."""
        mine, most = self._share(part)
        total = torch.zeros(1, device=self._model.device)
        observed = []
        for index in range(most):
            real = index < len(mine)
            one = mine[index] if real else part.microbatches[0]
            self._engine.set_gradient_accumulation_boundary(index == most - 1)
            loss, seen = microbatch_loss(context, one, self._engine("logprobs", one))
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

    def _share(self, part: PackedBatch) -> tuple[tuple[Microbatch, ...], int]:
        """This rank's microbatches, and how many the rank with most has."""
        dealt = split(part, self._world)
        mine = dealt[self.rank].microbatches if self.rank < len(dealt) else ()
        return mine, max(len(one.microbatches) for one in dealt)

    def _apply(self, learning_rate: float, observed: list[Observed]) -> float:
        if self._config.scale_by_ess:
            seen = join(observed)
            weight = np.exp(seen.logprob[seen.ratio].astype(np.float64) - seen.behaviour[seen.ratio])
            learning_rate = ess_learning_rate(learning_rate, effective_share(weight))
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        if not self._engine.optimizer.overflow:
            self._num_steps += 1
        return float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        with self._deepspeed.zero.GatheredParameters(self._parameters, enabled=self._stage == 3):
            if self.rank == 0:
                found = {name: from_torch(value) for name, value in self._model.module.state_dict().items()}
        return found

    @torch.no_grad()
    def _probe(self, sequences: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(self._engine("sequence_logprobs", one)) for one in sequences)

    @torch.no_grad()
    def _greedy(self, order: Order) -> float:
        assert order.batch is not None
        batch = decode_batch(order.batch)
        mine, most = self._share(batch)
        misses = torch.zeros(batch.num_sequences, dtype=torch.int64, device=self._model.device)
        for index in range(most):
            one = mine[index] if index < len(mine) else batch.microbatches[0]
            missed = ~self._engine("hits", one)
            if index < len(mine):
                at = torch.from_numpy(one.sequence_N).to(self._model.device)
                misses.index_add_(0, at, missed.to(torch.int64))
        distributed.all_reduce(misses)
        return float((misses == 0).double().mean())

    def _save(self) -> dict[str, Tensor]:
        utils = self._deepspeed.utils
        state = {}
        for name, value in zip(self._names, self._parameters, strict=True):
            state[f"model/{name}"] = from_torch(utils.safe_get_full_fp32_param(value))
            if self._num_steps:
                for key in MOMENTS:
                    state[f"adam/{key}/{name}"] = from_torch(utils.safe_get_full_optimizer_state(value, key))
                state[f"adam/step/{name}"] = from_torch(torch.tensor(float(self._num_steps)))
        state["phase"] = from_torch(torch.tensor(PHASES.index(self._phase), dtype=torch.uint8))
        return state

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Tensor]) -> None:
        self._phase = PHASES[int(to_torch(state["phase"]))]
        for name, value in zip(self._names, self._parameters, strict=True):
            weight = to_torch(state[f"model/{name}"]).to(self._model.device)
            self._deepspeed.utils.safe_set_full_fp32_param(value, weight)
            with self._deepspeed.zero.GatheredParameters([value], modifier_rank=0, enabled=self._stage == 3):
                if self.rank == 0 or self._stage < 3:
                    value.copy_(weight)
        self._set_moments(state)
        step = state.get(f"adam/step/{self._names[0]}")
        self._set_num_steps(0 if step is None else int(to_torch(step)))

    def _create_moments(self) -> None:
        """ZeRO makes them at the first step, but a restore must find them."""
        zero = self._engine.optimizer
        flats = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        for flat in flats:
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            zero.optimizer.state[flat] = moments | {"step": torch.zeros(())}
        if self._stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    def _set_moments(self, state: Mapping[str, Tensor]) -> None:
        """Moments from a state; zero where it has none."""
        for name, value in zip(self._names, self._parameters, strict=True):
            for key in MOMENTS:
                saved = state.get(f"adam/{key}/{name}")
                moment = torch.zeros(_shape(value)) if saved is None else to_torch(saved)
                self._deepspeed.utils.safe_set_full_optimizer_state(value, moment.to(self._model.device), key)

    def _set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        for state in self._engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), num_steps)


def _shape(value: Any) -> tuple[int, ...]:
    """A parameter's whole shape, also where ZeRO 3 holds only a part of it here."""
    return tuple(getattr(value, "ds_shape", value.shape))


def _settings(config: TrainerConfig, stage: int, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clip,
        "zero_optimization": zero,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
