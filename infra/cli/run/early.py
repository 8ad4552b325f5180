"""A role that is started before what it needs is there: it loads what takes long meanwhile."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from infra.local.supervisor import Child

BEGIN_VARIABLE = "HEADRACE_BEGIN_FILE"
LOOK_S = 0.05


def early(child: Child, begin: Path) -> Child:
    """The same role, which begins once the file `begin` is there. One that is started again finds it, and does not wait."""
    return msgspec.structs.replace(child, env={**child.env, BEGIN_VARIABLE: str(begin)})


async def until_begun(load: Callable[[], object], stop: asyncio.Event) -> None:
    """Return once this role may begin, or is stopped; at once for one that is not started early. load: done meanwhile, in a
    thread. What it raises is raised again where the role needs it.
    """
    if not (name := os.environ.get(BEGIN_VARIABLE)):
        return
    loading = asyncio.create_task(asyncio.to_thread(load))
    while not stop.is_set() and not await asyncio.to_thread(os.path.exists, name):
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stop.wait()
    if not stop.is_set():
        with suppress(Exception):
            await loading
