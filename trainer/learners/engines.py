"""DeepSpeed: its settings, and the engines of a learner with a model in each: policy, frozen reference, critic.

At stage 3 each rank reads the whole model into the host's memory once, and keeps its shards on its device, one tensor after
the other. Guarantee: the weights equal the weights that one process loads, to the bit.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch

from infra.model.model import load_model
from infra.policies.policy import Adapter
from infra.roles.memory import give_back_large_blocks
from schemas.errors import ConfigError
from trainer.batch.batch import Microbatch
from trainer.config import CriticConfig, TrainerConfig
from trainer.learners.channel import Channel
from trainer.learners.critic import ValueModel
from trainer.learners.forward import PackedModel, ReferenceAdapter, open_reference, policy_settings
from trainer.learners.lanes import reference_dtype
from trainer.learners.shards import Shards


def begin_ranks(config: TrainerConfig, timeout_s: float) -> tuple[Any, str]:
    """Find the other ranks. The library, and this rank's device."""
    give_back_large_blocks()
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if config.threads:
        torch.set_num_threads(config.threads)
    import deepspeed

    if "WORLD_SIZE" not in os.environ:  # no launcher: one rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    deepspeed.ops.__compatible_ops__ = {}  # else it compiles kernels for a collective that only inference calls
    deepspeed.init_distributed(dist_backend="nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    return deepspeed, f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"


# Values that ZeRO sends, gathers or updates at once. With its own 5e8 and 1e9 a rank holds several float32 copies of a model of
# that size beside its shards; a network and kernels are kept busy by these.
AT_ONCE = 20_000_000


def engine_settings(config: TrainerConfig, stage: int, offload: bool) -> dict[str, Any]:
    """The settings of DeepSpeed. Raises ConfigError."""
    where = "trainer.learner.options"
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{where}.stage: got {stage}, expected 0, 1, 2 or 3")
    half = config.dtype == "bfloat16"
    if stage == 1 and half:
        raise ConfigError(
            f"{where}.stage: got 1 with {config.dtype}, expected 2 or 3: DeepSpeed sums no gradients of microbatches in "
            "float32 there with an optimizer whose state other numbers of ranks can read; 2 holds no more than 1"
        )
    if stage == 0 and (offload or config.dtype != "float32"):
        got = "offload" if offload else config.dtype
        raise ConfigError(
            f"{where}.stage: got 0 with {got}, expected 1, 2 or 3: stage 0 keeps no float32 masters apart"
        )
    sizes = ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
    zero: dict[str, Any] = {"stage": stage, **dict.fromkeys(sizes, AT_ONCE)}
    if stage == 3 and not config.activation_checkpointing:  # with it a layer's weights are used again at once
        zero["stage3_max_reuse_distance"] = AT_ONCE
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clip,
        "zero_optimization": zero,
        "bf16": {"enabled": half},
        # Sums over microbatches, and over ranks; in bfloat16 they would lose the small ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


Named = list[tuple[str, torch.nn.Parameter]]


class Opened(NamedTuple):
    """A model on one rank.

    packed: reads rows. run: computes with the model on all ranks together; takes the name of a method and its arguments.
    named: its parameters by name.
    """

    packed: PackedModel
    run: Any
    named: Named


class Forward(torch.nn.Module):
    """Every use of a model goes through one root module: ZeRO 3 gathers weights by its hooks."""

    def __init__(self, model: PackedModel | ValueModel) -> None:
        super().__init__()
        self.module = model.module
        self._model = model

    def forward(self, what: str, *arguments: Any) -> Any:
        return getattr(self._model, what)(*arguments)


class RankCritic:
    """A rank's part of the critic: a `CriticEngine`. run: DeepSpeed's engine of its model. shards: its state on this rank."""

    collective = True

    def __init__(self, config: CriticConfig, model: ValueModel, run: Any, *, shards: Shards, channel: Channel) -> None:
        self.config = config
        self.channel = channel
        self.shards = shards
        self.device: torch.device = run.device
        self._model = model
        self._run = run

    @torch.no_grad()
    def begin_as(self, policy: Shards) -> None:
        """Take over a policy's body; the head stays. Collective; one weight at a time is whole."""
        for name, value in self._model.packed.module.named_parameters():
            self.shards.take(f"critic/{name}", value, policy.whole(name))
        self.shards.use()

    def all_values(self, rows: Microbatch) -> torch.Tensor:
        found: torch.Tensor = self._run("all_values", rows)
        return found

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self._run.set_gradient_accumulation_boundary(is_last)
        self._run.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        return self.shards.gradient_norm()

    def finish(self, *, applied: bool) -> None:
        if applied:
            self._run.step()
            self.shards.count_step()
        else:
            self.shards.forget_gradient()


class Engines:
    """Opens the engines. folder: of the model of all of them. settings: of the engine of one that is trained. open_packed: the
    folder's model as this rank reads it, with the other settings of `PackedModel`. device: of this rank.
    """

    def __init__(
        self,
        deepspeed: Any,
        channel: Channel,
        config: TrainerConfig,
        *,
        folder: str,
        settings: Callable[[TrainerConfig], dict[str, Any]],
        open_packed: Callable[..., PackedModel],
        device: str,
    ) -> None:
        self._folder = folder
        self._open_packed = open_packed
        self._deepspeed = deepspeed
        self._channel = channel
        self._config = config
        self._settings = settings
        self._stage: int = settings(config)["zero_optimization"]["stage"]
        self._device = device

    def policy(self, adapter: Adapter | None, *, with_reference: bool) -> Opened:
        """The model that is trained, or an adapter of it; `run` is DeepSpeed's engine. with_reference: see `PackedModel`."""
        config = self._config
        settings = self._settings(config)
        packed = self._packed(settings, **policy_settings(config))
        packed.adapt(adapter, with_reference=with_reference)
        named = list(packed.trained.items())
        run = self._trained(packed, [value for _, value in named], settings)
        self._find_reading(packed, run)
        return Opened(packed, run, named)

    def critic(self, config: CriticConfig) -> RankCritic:
        """A value model in float32, in an engine of its own."""
        settings = self._settings(
            msgspec.structs.replace(self._config, dtype="float32", gradient_clip=config.gradient_clip)
        )
        packed = self._packed(settings, dtype="float32")
        model = ValueModel(packed)
        named = model.named_parameters()
        run = self._trained(model, list(named.values()), settings, learning_rate=config.learning_rate)
        self._find_reading(packed, run)
        trained = [(f"critic/{name}", value) for name, value in named.items()]
        shards = Shards(self._deepspeed, run, trained, [], stage=self._stage, prefix="")
        return RankCritic(config, model, run, shards=shards, channel=self._channel)

    def reference(self, policy: Opened) -> Opened:
        """Open the reference: a second adapter of the policy's, or a model, whole on every rank below stage 3, sharded
        there.
        """
        dtype = reference_dtype(self._config)
        settings = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9,
            "bf16": {"enabled": dtype == "bfloat16"},
        }  # fmt: skip
        opened = open_reference(policy.packed, functools.partial(self._packed, settings, dtype=dtype))
        named = list(opened.trained.items())
        if isinstance(opened, ReferenceAdapter):
            return Opened(policy.packed, opened.through(policy.run), named)
        packed = opened
        if self._stage < 3:
            return Opened(packed, Forward(packed), named)
        run = self._deepspeed.initialize(model=Forward(packed), config=settings)[0]
        run.eval()
        self._find_reading(packed, run)
        return Opened(packed, run, named)

    def _packed(self, engine: dict[str, Any], **settings: Any) -> PackedModel:
        """The model; at stage 3 in shards, and its reading is yet to be found. engine: settings of where it will be."""
        if self._stage < 3:
            return self._open_packed(**settings)
        packed = self._open_packed(module=load_model(self._folder, dtype=settings["dtype"]), **settings)
        for value in packed.module.parameters():
            value.data = value.data.to(packed.module.dtype)
        self._deepspeed.zero.Init(module=packed.module, config_dict_or_path=dict(engine))
        for layer in packed.module.modules():
            _let_go_in_forward(layer)
            for name, buffer in layer._buffers.items():
                layer._buffers[name] = None if buffer is None else buffer.to(self._device)
        return packed

    def _trained(
        self,
        model: PackedModel | ValueModel,
        parameters: list[torch.nn.Parameter],
        settings: dict[str, Any],
        *,
        learning_rate: float = 0.0,
    ) -> Any:
        """The engine that trains these parameters. learning_rate: 0 where each step brings its own."""
        config = self._config
        optimizer = torch.optim.AdamW(
            parameters, lr=learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        return self._deepspeed.initialize(model=Forward(model), optimizer=optimizer, config=settings)[0]

    def _find_reading(self, packed: PackedModel, run: Any) -> None:
        """By a forward of all ranks, where the model is in shards. Raises ConfigError."""
        if self._stage < 3:
            return
        run("find_reading")
        if packed.reading == "unpacked" and self._channel.world > 1:
            raise ConfigError(
                f"trainer.learner.options.stage: got 3 with {self._folder} ({packed.module.config.model_type}), which is "
                "read sequence by sequence, expected 0, 1 or 2: ranks that read different numbers of them would wait for "
                "each other's shards without end"
            )


def _let_go_in_forward(layer: torch.nn.Module) -> None:
    """Let a linear layer save its weight itself for the backward. torch's own layer saves a view, which would keep the weight
    that ZeRO 3 gathered until the backward, and so the whole model on every rank.
    """
    if type(layer) is not torch.nn.Linear or "forward" in vars(layer):  # the head computes in its own way
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def forward(input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = zero3_linear_wrap(input, layer.weight, layer.bias)
        return found

    layer.forward = forward  # type: ignore[method-assign]
