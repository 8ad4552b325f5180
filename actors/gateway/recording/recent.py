"""The newest names of something, so many of them, in memory."""

from collections import OrderedDict

MAX_NAMES = 65_536


class Recent:
    """A set that forgets its oldest members."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Remember a name."""
        self._names[name] = None
        if len(self._names) > self._limit:
            self._names.popitem(last=False)
