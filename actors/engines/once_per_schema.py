"""What is made of schemas: of each once, in a thread of its own and one at a time, and the last ones are kept.

Guarantees: a refusal is kept like anything else, so a schema that takes too long takes that time once; threads that others
share are never taken; how much is kept is bounded.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from actors.engines.engine import SchemaNotTried, SchemaRefused

MAX_KEPT = 64
MAX_KEPT_BYTES = 256 * 1024 * 1024


class OncePerSchema:
    """make: blocks, and raises SchemaRefused. size: of what it made, in bytes."""

    def __init__(self, make: Callable[[str], Any], size: Callable[[Any], int] = lambda made: 0) -> None:
        self._make = make
        self._size = size
        self._made: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "schemas")

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def of(self, json_schema: str) -> Any:
        """What was made of it. Raises SchemaRefused."""
        found = self._made.get(json_schema)
        if found is None:
            found = asyncio.get_running_loop().run_in_executor(self._thread, self._make, json_schema)
            self._made[json_schema] = found
            found.add_done_callback(lambda ended: self._ended(json_schema, ended))
        self._made.move_to_end(json_schema)
        return await asyncio.shield(found)  # others may wait for it

    def _ended(self, json_schema: str, ended: asyncio.Future[Any]) -> None:
        """Let go of what says nothing of its schema, and of what was asked for longest ago; the newest stays."""
        error = None if ended.cancelled() else ended.exception()
        tells = error is None or (isinstance(error, SchemaRefused) and not isinstance(error, SchemaNotTried))
        if (ended.cancelled() or not tells) and self._made.get(json_schema) is ended:
            del self._made[json_schema]
        sizes = [self._num_bytes(one) for one in self._made.values()]
        while len(sizes) > 1 and (len(sizes) > MAX_KEPT or sum(sizes) > MAX_KEPT_BYTES):
            del sizes[0]
            self._made.popitem(last=False)

    def _num_bytes(self, made: asyncio.Future[Any]) -> int:
        failed = not made.done() or made.cancelled() or made.exception() is not None
        return 0 if failed else self._size(made.result())
