"""Ordered acks: which records are in flight per partition, and which may be acknowledged when one of them is done.

Guarantees: handles come back in offset order and only when every earlier record of the partition is done, so a crash
repeats records and never skips one. A partition that was taken away is forgotten: what completes late is ignored.

    take 7, take 8, take 9 · done 9 -> [] · done 7 -> [7] · done 8 -> [8, 9]
"""

from typing import Generic, NamedTuple, TypeVar

Handle = TypeVar("Handle")


class Ticket(NamedTuple):
    """One record in flight. generation: of the assignment that delivered it."""

    partition: int
    offset: int
    generation: int


class _Lane(Generic[Handle]):
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.highest = -1
        self.flying: dict[int, Handle] = {}  # by offset, in their order
        self.done: set[int] = set()


class Window(Generic[Handle]):
    """Records in flight of any number of partitions; holds no clock, task or client."""

    def __init__(self, limit: int) -> None:
        """limit: records in flight per partition."""
        if limit < 1:
            raise ValueError(f"limit: got {limit}, expected 1 or more")
        self.limit = limit
        self._lanes: dict[int, _Lane[Handle]] = {}

    def is_full(self, partition: int, generation: int) -> bool:
        lane = self._lanes.get(partition)
        return lane is not None and lane.generation == generation and len(lane.flying) >= self.limit

    def take(self, partition: int, offset: int, generation: int, handle: Handle) -> Ticket | None:
        """Put a record in flight; None for one that this generation has seen or that an older one delivered.

        A newer generation forgets what the older had in flight: those records are delivered again.
        """
        lane = self._lanes.get(partition)
        if lane is None or generation > lane.generation:
            lane = self._lanes[partition] = _Lane(generation)
        if generation < lane.generation or offset <= lane.highest:
            return None
        lane.highest = offset
        lane.flying[offset] = handle
        return Ticket(partition, offset, generation)

    def complete(self, ticket: Ticket) -> list[Handle]:
        """Handles that may be acknowledged now, in offset order; none for a ticket of a forgotten generation."""
        lane = self._lanes.get(ticket.partition)
        if lane is None or lane.generation != ticket.generation or ticket.offset not in lane.flying:
            return []
        lane.done.add(ticket.offset)
        ready: list[Handle] = []
        while lane.flying and (first := next(iter(lane.flying))) in lane.done:
            lane.done.remove(first)
            ready.append(lane.flying.pop(first))
        return ready

    def forget(self) -> list[Handle]:
        """Give up everything in flight; returns the handles, none of which may be acknowledged."""
        given_up = [handle for lane in self._lanes.values() for handle in lane.flying.values()]
        for lane in self._lanes.values():
            lane.flying.clear()
            lane.done.clear()
        return given_up

    def num_in_flight(self) -> int:
        return sum(len(lane.flying) for lane in self._lanes.values())
