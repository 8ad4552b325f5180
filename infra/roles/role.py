"""Inputs of every role."""

import asyncio
import os
import socket
from collections.abc import Coroutine

import msgspec

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.config import Floor
from infra.store.store import Store
from schemas.errors import causes


class Role(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of a role. stop: set when it is to end. instance: the name that its reports and leases bear."""

    floor: Floor
    log: Log
    store: Store
    metrics: Metrics
    stop: asyncio.Event
    instance: str


def instance_name(role: str) -> str:
    """Name of this process in a role, such as `train/host-3/417`."""
    return f"{role}/{socket.gethostname()}/{os.getpid()}"


async def run_until(stop: asyncio.Event, *loops: Coroutine[None, None, None]) -> None:
    """Run the loops until `stop` is set, then cancel them. The first error of a loop ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop) for loop in loops]
            await stop.wait()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise causes(errors)[0] from errors
