"""The engines of a DeepSpeed learner, and the model in each: the policy, a reference that is never trained, a critic."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from schemas.errors import ConfigError
from trainer.config import CriticConfig, TrainerConfig
from trainer.learners.critic import ValueModel
from trainer.learners.forward import PackedModel, policy_settings
from trainer.learners.lanes import reference_dtype
from trainer.learners.orders import Channel
from trainer.learners.sequence_parallel import SequenceGroup, open_packed
from trainer.learners.sharded import load_sharded
from trainer.learners.zero import reference_settings

Named = list[tuple[str, torch.nn.Parameter]]


class Opened(NamedTuple):
    """A model, what computes with it on all ranks together, and its parameters. run: name of a method, and its arguments."""

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


class Engines:
    """What opens them. settings: of the engine of a model that is trained. device: of this rank."""

    def __init__(
        self,
        deepspeed: Any,
        channel: Channel,
        group: SequenceGroup,
        config: TrainerConfig,
        *,
        settings: Callable[[TrainerConfig], dict[str, Any]],
        device: str,
    ) -> None:
        self._deepspeed = deepspeed
        self._channel = channel
        self._group = group
        self._config = config
        self._settings = settings
        self._stage: int = settings(config)["zero_optimization"]["stage"]
        self._device = device

    def policy(self, folder: str) -> Opened:
        """The model that is trained; `run` is DeepSpeed's engine."""
        config = self._config
        settings = self._settings(config)
        packed = self._packed(folder, settings, **policy_settings(config))
        named = list(packed.module.named_parameters())
        run = self._trained(packed, [value for _, value in named], settings)
        self._find_reading(packed, run, folder)
        return Opened(packed, run, named)

    def critic(self, folder: str, config: CriticConfig) -> tuple[ValueModel, Opened]:
        """A value model in float32, its engine, and what is trained of it."""
        if self._group.size > 1:
            raise ConfigError(
                f"trainer.learner.options.sequence_parallel: got {self._group.size} with [trainer.critic], expected 1: values "
                "are computed of whole rows"
            )
        settings = self._settings(
            msgspec.structs.replace(self._config, dtype="float32", gradient_clip=config.gradient_clip)
        )
        packed = self._packed(folder, settings, dtype="float32")
        model = ValueModel(packed)
        named = list(model.named_parameters().items())
        run = self._trained(model, [value for _, value in named], settings, learning_rate=config.learning_rate)
        self._find_reading(packed, run, folder)
        return model, Opened(packed, run, named)

    def reference(self, folder: str) -> Opened:
        """A model that is compared with; whole on every rank below stage 3, sharded there."""
        dtype = reference_dtype(self._config)
        settings = reference_settings(dtype)

        packed = self._packed(folder, settings, dtype=dtype)
        named = list(packed.module.named_parameters())
        if self._stage < 3:
            return Opened(packed, Forward(packed), named)
        run = self._deepspeed.initialize(model=Forward(packed), config=settings)[0]
        run.eval()
        self._find_reading(packed, run, folder)
        return Opened(packed, run, named)

    def _packed(self, folder: str, settings: dict[str, Any], *, dtype: str, **how: Any) -> PackedModel:
        """The model; at stage 3 in shards, and its reading is yet to be found. settings: of its engine. how: of the model."""
        module = None
        if self._stage == 3:
            module = load_sharded(
                self._deepspeed, self._channel, folder, dtype=dtype, device=self._device, settings=settings
            )
        return open_packed(folder, self._group, dtype=dtype, device=self._device, module=module, **how)

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

    def _find_reading(self, packed: PackedModel, run: Any, folder: str) -> None:
        """By a forward of all ranks, where the model is in shards. Raises ConfigError."""
        if self._stage < 3:
            return
        run("find_reading")
        if packed.reading == "unpacked" and self._channel.world > 1:
            raise ConfigError(
                f"trainer.learner.options.stage: got 3 with {folder} ({packed.module.config.model_type}), which is read "
                "sequence by sequence, expected 0, 1 or 2: ranks that read different numbers of them would wait for each "
                "other's shards for ever"
            )
