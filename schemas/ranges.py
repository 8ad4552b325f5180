"""A set of whole numbers in little memory, where most of them follow one another."""

from bisect import bisect_left, bisect_right


class Ranges:
    """Kept as the ranges it is made of: the steps of a month of training are one."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        """Add first to last, inclusive; nothing where last is below first."""
        if last < first:
            return
        begin = bisect_left(self._lasts, first - 1)  # of the ranges that these numbers meet or touch
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number)
        return at > 0 and number <= self._lasts[at - 1]

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._firsts)
