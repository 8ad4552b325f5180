"""The log of a run that is only beginning: its broker may not be there yet, nor its settings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.log.log import Log

LOOK_S = 0.1


@asynccontextmanager
async def log_of(config: Path) -> "AsyncIterator[Log]":
    """Connected as soon as there is a broker with the topics of these settings; the caller sets the limit."""
    from infra.cli.connect import connected
    from infra.cli.settings import load_settings
    from schemas.errors import BrokerUnavailable, ConfigError

    async with AsyncExitStack() as ending:
        while True:
            try:
                log = await ending.enter_async_context(connected(load_settings(config, []), deadline_s=5.0))
                break
            except (BrokerUnavailable, ConfigError):
                await asyncio.sleep(LOOK_S)
        yield log
