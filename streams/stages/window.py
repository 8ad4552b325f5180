"""Ordered acks: which records are in flight per partition, and which may be acknowledged when one of them is done.

Guarantees: handles come back in offset order and only when every earlier record of the partition is done, so a crash
repeats records and never skips one. A partition that was taken away is forgotten: what completes late is ignored.

    take 7, take 8, take 9 · done 9 -> [] · done 7 -> [7] · done 8 -> [8, 9]
"""

from collections import deque
from typing import Generic, TypeVar

import msgspec

Handle = TypeVar("Handle")


class Ticket(msgspec.Struct, frozen=True):
    """Names one record in flight.

    partition: index. offset: of the record. generation: of the assignment that delivered it.

    Example: Ticket(partition=2, offset=981, generation=4)
    """

    partition: int
    offset: int
    generation: int


class _Flight(Generic[Handle]):
    __slots__ = ("done", "handle", "offset")

    def __init__(self, offset: int, handle: Handle) -> None:
        self.offset = offset
        self.handle = handle
        self.done = False


class _Lane(Generic[Handle]):
    __slots__ = ("flights", "generation", "highest", "waiting")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.highest = -1
        self.waiting: deque[_Flight[Handle]] = deque()
        self.flights: dict[int, _Flight[Handle]] = {}


class Window(Generic[Handle]):
    """Records in flight of any number of partitions; holds no clock, task or client."""

    def __init__(self, limit: int) -> None:
        """limit: records in flight per partition."""
        if limit < 1:
            raise ValueError(f"limit: got {limit}, expected 1 or more")
        self.limit = limit
        self._lanes: dict[int, _Lane[Handle]] = {}

    def is_full(self, partition: int, generation: int) -> bool:
        """Whether `partition` has its limit of records in flight in this generation."""
        lane = self._lanes.get(partition)
        return lane is not None and lane.generation == generation and len(lane.waiting) >= self.limit

    def take(self, partition: int, offset: int, generation: int, handle: Handle) -> Ticket | None:
        """Put a record in flight; None for one that this generation has seen or that an older one delivered.

        A newer generation forgets what the older had in flight: those records are delivered again.
        """
        lane = self._lanes.get(partition)
        if lane is None or generation > lane.generation:
            lane = self._lanes[partition] = _Lane(generation)
        if generation < lane.generation or offset <= lane.highest:
            return None
        flight = _Flight(offset, handle)
        lane.highest = offset
        lane.waiting.append(flight)
        lane.flights[offset] = flight
        return Ticket(partition=partition, offset=offset, generation=generation)

    def complete(self, ticket: Ticket) -> list[Handle]:
        """Handles that may be acknowledged now, in offset order; none for a ticket of a forgotten generation."""
        lane = self._lanes.get(ticket.partition)
        flight = lane.flights.get(ticket.offset) if lane is not None and lane.generation == ticket.generation else None
        if lane is None or flight is None:
            return []
        flight.done = True
        ready: list[Handle] = []
        while lane.waiting and lane.waiting[0].done:
            first = lane.waiting.popleft()
            del lane.flights[first.offset]
            ready.append(first.handle)
        return ready

    def forget(self) -> list[Handle]:
        """Give up everything in flight; returns the handles, none of which may be acknowledged."""
        given_up = [flight.handle for lane in self._lanes.values() for flight in lane.waiting]
        for lane in self._lanes.values():
            lane.waiting.clear()
            lane.flights.clear()
        return given_up

    def num_in_flight(self) -> int:
        """Records in flight."""
        return sum(len(lane.waiting) for lane in self._lanes.values())
