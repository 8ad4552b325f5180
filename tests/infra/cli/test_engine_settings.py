"""What an engine is built with of settings that are not its own."""

import pytest

from actors.config import ReloadConfig
from infra.cli.run.roles import implied_options
from infra.cli.settings import Settings
from infra.settings.config import Use
from schemas.errors import ConfigError
from trainer.config import LoraConfig, TrainerConfig

VLLM = Use(use="actors.engines.vllm.engine:VllmEngine")


def test_an_engine_that_must_know_of_adapters_when_it_starts_gets_what_the_trainer_adapts() -> None:
    lora = LoraConfig(rank=8, alpha=32, targets=("q_proj",))
    adapted = Settings(app="a", trainer=TrainerConfig(lora=lora))
    assert implied_options(adapted, VLLM) == {"lora": {"rank": 8, "alpha": 32, "targets": ("q_proj",)}}
    assert implied_options(Settings(app="a"), VLLM) == {}
    assert implied_options(adapted, Use(use="actors.engines.scripted:ScriptedEngine")) == {}


@pytest.mark.parametrize("name", ["vllm.engine:VllmEngine", "torch:TorchEngine", "scripted:ScriptedEngine"])
def test_every_engine_that_ships_can_be_set_to_keep_keys_and_values(name: str) -> None:
    settings = Settings(app="a", reload=ReloadConfig(kv="keep"))
    assert implied_options(settings, Use(use=f"actors.engines.{name}")) == {"kv": "keep"}


def test_an_engine_that_cannot_keep_keys_and_values_is_refused_where_it_is_to() -> None:
    other = Use(use="infra.observe.metrics:Metrics")
    assert implied_options(Settings(app="a"), other) == {}
    with pytest.raises(
        ConfigError, match=r'reload.kv: got "keep" with infra.observe.metrics:Metrics.*expected "rebuild"'
    ):
        implied_options(Settings(app="a", reload=ReloadConfig(kv="keep")), other)
