"""`headrace train --ranks N`: what it refuses before anything is started, and what is no mistake in the settings."""

import asyncio
from pathlib import Path

import pytest

from infra.cli.run.ranks import open_on_rank, train_on_ranks
from infra.cli.settings import load_settings
from schemas.errors import ConfigError
from trainer.config import TrainerConfig


def test_several_ranks_need_a_learner_of_many_processes(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "t"\n[policy]\nmodel = "model"\n')
    settings = load_settings(file, ["trainer.ranks=2"])
    assert settings.trainer.ranks == 2
    with pytest.raises(ConfigError, match=r"got several with trainer\.learners\.torch:TorchLearner.*DeepSpeedLearner"):
        asyncio.run(train_on_ranks(settings, file, [], asyncio.Event()))


class Deserted:
    """A learner whose other ranks are gone."""

    def __init__(self, model: str, config: TrainerConfig) -> None:
        raise RuntimeError("Connection closed by peer")


def test_another_rank_that_is_gone_is_no_mistake_in_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    learner = f'{{ use = "{__name__}:Deserted" }}'
    file.write_text(f'app = "t"\n[policy]\nmodel = "model"\n[trainer]\nlearner = {learner}\n')
    settings = load_settings(file, [])
    with pytest.raises(RuntimeError, match="closed by peer"):
        open_on_rank(settings, "model", {"WORLD_SIZE": "2", "RANK": "1"})
    with pytest.raises(ConfigError, match="closed by peer"):
        open_on_rank(settings, "model", {})
