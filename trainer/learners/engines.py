"""The engines of a DeepSpeed learner, and the model in each: the policy, a reference that is never trained, a critic."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from infra.model.parts import hollow_model
from infra.policies.adapter import Adapter
from schemas.errors import ConfigError
from trainer.config import CriticConfig, TrainerConfig
from trainer.learners.critic import ValueModel
from trainer.learners.forward import PackedModel, policy_settings
from trainer.learners.lanes import reference_dtype
from trainer.learners.lora import ReferenceAdapter, open_reference
from trainer.learners.orders import Channel
from trainer.learners.rank_values import RankCritic
from trainer.learners.sharded import load_sharded
from trainer.learners.shards import Shards
from trainer.learners.zero import reference_settings

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


class Engines:
    """What opens them. folder: of the model of all of them. settings: of the engine of one that is trained. open_packed: the
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
        """What is compared with: a second adapter of the policy's, or a model, whole on every rank below stage 3, sharded
        there.
        """
        dtype = reference_dtype(self._config)
        settings = reference_settings(dtype)
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
        packed = self._open_packed(module=hollow_model(self._folder, dtype=settings["dtype"]), **settings)
        load_sharded(self._deepspeed, self._channel, packed.module, self._folder, device=self._device, settings=engine)
        for one in packed.module.modules():
            _let_go_in_forward(one)
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
                "each other's shards for ever"
            )


def _let_go_in_forward(layer: torch.nn.Module) -> None:
    """Have a linear layer remember its weight by itself between forward and backward: torch's own remembers a view, by which
    what ZeRO 3 gathered would stay until the backward, and with it a whole model on every rank.
    """
    if type(layer) is not torch.nn.Linear or "forward" in vars(layer):  # the head computes in its own way
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def forward(input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = zero3_linear_wrap(input, layer.weight, layer.bias)
        return found

    layer.forward = forward  # type: ignore[method-assign]
