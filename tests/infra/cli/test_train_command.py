"""`headrace train --ranks N`: what it refuses before anything is started."""

import asyncio
from pathlib import Path

import pytest

from infra.cli.ranks import train_on_ranks
from infra.cli.settings import load_settings
from schemas.errors import ConfigError


def test_several_ranks_need_a_learner_of_many_processes(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "t"\n[policy]\nmodel = "model"\n')
    settings = load_settings(file, ["trainer.ranks=2"])
    assert settings.trainer.ranks == 2
    with pytest.raises(ConfigError, match=r"got several with trainer\.learners\.torch:TorchLearner.*DeepSpeedLearner"):
        asyncio.run(train_on_ranks(settings, file, [], asyncio.Event()))
