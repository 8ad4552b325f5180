"""`headrace train --ranks N`: this process starts the ranks and keeps them together; it is none of them."""

import asyncio
import sys
from pathlib import Path

from infra.cli.settings import Settings
from infra.local.ranks import RankGroup, run_ranks
from infra.settings.plugin import find
from schemas.errors import ConfigError

CONFIG_ERROR = 2  # an exit code that a restart cannot mend


async def train_on_ranks(settings: Settings, config: Path, sets: list[str], stop: asyncio.Event) -> int:
    """Start the ranks and wait: this process is none of them."""
    found = find(settings.trainer.learner.use, "trainer.learner.use")
    if not hasattr(found, "follow"):
        raise ConfigError(several_ranks(settings))
    overrides = [argument for one in sets for argument in ("--set", one)]
    group = RankGroup(
        argv=(sys.executable, "-m", "infra.cli.main", "train", "--config", str(config), *overrides),
        num_ranks=settings.trainer.ranks,
        log=settings.folder / "logs",
        final_codes=(0, CONFIG_ERROR),
    )
    return await run_ranks(group, stop)


def several_ranks(settings: Settings) -> str:
    """What is wrong with ranks for a learner of one process."""
    return (
        f"trainer.ranks: got several with {settings.trainer.learner.use}, expected 1, or "
        'learner = { use = "trainer.learners.deepspeed:DeepSpeedLearner" }'
    )
