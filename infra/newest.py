"""A map with a bound that forgets the entries that were used longest ago."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(Generic[K, V]):
    """At most `limit` entries, whose sizes add up to at most `max_size`. Callers with threads hold a lock of their own.

    `get` and `put` make an entry the newest; `in` and iteration, oldest first, do not. size: of a value, read when it is put.
    """

    def __init__(
        self, limit: float = math.inf, *, max_size: float = math.inf, size: Callable[[V], int] = lambda value: 0
    ) -> None:
        self._limit = limit
        self._max_size = max_size
        self._size = size
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.total_size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value and make it the newest, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V) -> None:
        """Insert or replace an entry; the oldest go until the bounds hold, the new entry too if it alone exceeds them."""
        self.pop(key)
        size = self._size(value)
        self._entries[key] = (value, size)
        self.total_size += size
        while len(self._entries) > self._limit or self.total_size > self._max_size:
            self.pop(next(iter(self._entries)))

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value, or None."""
        value, size = self._entries.pop(key, (None, 0))
        self.total_size -= size
        return value
