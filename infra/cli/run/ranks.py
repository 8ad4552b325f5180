"""`headrace train --ranks N`: this process starts the ranks and keeps them together; it is not one of them."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.cli.exit_codes import CONFIG_ERROR, FENCED_OUT
from infra.cli.settings import Settings
from infra.local.ranks import RankGroup, rank_of, run_ranks
from infra.settings.plugin import find
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from trainer.learners.learner import Learner


async def train_on_ranks(settings: Settings, config: Path, sets: list[str], stop: asyncio.Event) -> int:
    """Start the ranks and wait: this process is not one of them."""
    found = find(settings.trainer.learner.use, "trainer.learner.use")
    if not hasattr(found, "follow"):
        raise ConfigError(several_ranks(settings))
    overrides = [argument for one in sets for argument in ("--set", one)]
    group = RankGroup(
        argv=(sys.executable, "-m", "infra.cli.main", "train", "--config", str(config), *overrides),
        num_ranks=settings.trainer.ranks,
        log=settings.folder / "logs",
        final_codes=(0, CONFIG_ERROR, FENCED_OUT),
    )
    return await run_ranks(group, stop)


def open_on_rank(settings: Settings, model: str, environment: Mapping[str, str]) -> "Learner":
    """The configured learner on a model folder. Raises ConfigError; on one of several ranks a RuntimeError is raised unchanged,
    since the settings are not at fault where another rank is gone: all start again.
    """
    from trainer.learners.learner import open_learner

    try:
        return open_learner(settings.trainer, model)
    except ConfigError as error:
        if rank_of(environment) is not None and isinstance(error.__cause__, RuntimeError):
            raise error.__cause__ from None
        raise


def several_ranks(settings: Settings) -> str:
    """What is wrong with ranks for a learner of one process."""
    return (
        f"trainer.ranks: got several with {settings.trainer.learner.use}, expected 1, or "
        'learner = { use = "trainer.learners.deepspeed:DeepSpeedLearner" }'
    )
