"""What an engine is built with of settings that are not its own."""

import pytest

from actors.config import ReloadConfig
from infra.cli.roles import engine_defaults
from infra.cli.settings import Settings
from infra.settings.config import Use
from schemas.errors import ConfigError
from trainer.config import LoraConfig, TrainerConfig

VLLM = Use(use="actors.engines.vllm.engine:VllmEngine")


def test_an_engine_that_must_know_of_adapters_when_it_starts_is_told_what_the_trainer_adapts() -> None:
    lora = LoraConfig(rank=8, alpha=32, targets=("q_proj",))
    adapted = Settings(app="a", trainer=TrainerConfig(lora=lora))
    assert engine_defaults(adapted, VLLM) == {"lora": {"rank": 8, "alpha": 32, "targets": ("q_proj",)}}
    assert engine_defaults(Settings(app="a"), VLLM) == {}
    assert engine_defaults(adapted, Use(use="actors.engines.scripted:ScriptedEngine")) == {}


@pytest.mark.parametrize("name", ["vllm.engine:VllmEngine", "torch:TorchEngine", "scripted:ScriptedEngine"])
def test_every_engine_that_ships_is_told_to_keep_keys_and_values(name: str) -> None:
    settings = Settings(app="a", reload=ReloadConfig(kv="keep"))
    assert engine_defaults(settings, Use(use=f"actors.engines.{name}")) == {"kv": "keep"}


def test_an_engine_that_cannot_keep_keys_and_values_is_refused_where_it_is_to() -> None:
    other = Use(use="infra.observe.metrics:Metrics")
    assert engine_defaults(Settings(app="a"), other) == {}
    with pytest.raises(
        ConfigError, match=r'reload.kv: got "keep" with infra.observe.metrics:Metrics.*expected "rebuild"'
    ):
        engine_defaults(Settings(app="a", reload=ReloadConfig(kv="keep")), other)
