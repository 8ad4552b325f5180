"""Work that is given up as soon as something else happens."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(happens: Coroutine[Any, Any, object], work: Awaitable[T], error: type[Exception]) -> T:
    """The result of the work; raises `error` where `happens` ends first. Then, or cancelled, it waits until the work has let
    go, whatever that ends with.
    """
    task, other = asyncio.ensure_future(work), asyncio.create_task(happens)
    try:
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
        return task.result()
    finally:
        other.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not warn of it
