"""What an engine is built with of settings that are not its own."""

from infra.cli.roles import adapting
from infra.cli.settings import Settings
from infra.settings.config import Use
from trainer.config import LoraConfig, TrainerConfig

VLLM = Use(use="actors.engines.vllm.engine:VllmEngine")


def test_an_engine_that_must_know_of_adapters_when_it_starts_is_told_what_the_trainer_adapts() -> None:
    lora = LoraConfig(rank=8, alpha=32, targets=("q_proj",))
    adapted = Settings(app="a", trainer=TrainerConfig(lora=lora))
    assert adapting(adapted, VLLM) == {"lora": {"rank": 8, "alpha": 32, "targets": ("q_proj",)}}
    assert adapting(Settings(app="a"), VLLM) == {}
    assert adapting(adapted, Use(use="actors.engines.scripted:ScriptedEngine")) == {}
