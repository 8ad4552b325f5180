"""The log of a run that is only beginning: its broker may not be there yet, nor its settings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from infra.cli.bench.common.children import last_words
from infra.local.process import Watched

if TYPE_CHECKING:
    from infra.log.log import Log

LOOK_S = 0.1
Result = TypeVar("Result")


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


async def beside_child(work: "asyncio.Task[Result]", child: Watched, log: Path) -> Result:
    """What comes of work that waits for a process. log: of the process. Raises RuntimeError with its last words where that ends
    first; the work is cancelled then.
    """
    try:
        while not work.done():
            if child.process.poll() is not None:
                raise RuntimeError(last_words(log))
            await asyncio.wait([work], timeout=LOOK_S)
        return work.result()
    finally:
        work.cancel()
