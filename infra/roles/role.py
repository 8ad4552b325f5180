"""What a role's process needs around its loops: run them until asked to stop, and report the one error that ended them."""

import asyncio
from collections.abc import Coroutine


async def run_until(stop: asyncio.Event, *loops: Coroutine[None, None, None]) -> None:
    """Run the loops until `stop` is set, then cancel them. The first error of a loop ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop) for loop in loops]
            await stop.wait()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups: the one a person should read."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
