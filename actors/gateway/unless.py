"""Work that is given up as soon as something else happens."""

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(happens: Coroutine[Any, Any, object], work: Awaitable[T], error: type[Exception]) -> T:
    """The result of the work; raises `error`, with the work cancelled, where `happens` ends first."""
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
            with suppress(asyncio.CancelledError):
                await task
