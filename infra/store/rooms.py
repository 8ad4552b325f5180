"""Memory that is used again, for what is as large at each version: copies of the weights, objects that are read.

Fresh memory costs several times what is then written to it: the kernel clears each page, and a virtual machine may have to be
given it first.
"""

import weakref

import numpy as np

LEAST_BYTES = 1024 * 1024  # what is smaller comes from memory that the process has anyway


class Rooms:
    """Memory of which nothing is in use any more, by its size. Threads may share it.

    Guarantee: a room is given out again only once the array that was given before, and all views of it, are gone. So at most
    as much lies here as was in use at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, num_bytes: int) -> np.ndarray:
        """[num_bytes] u8, that holds anything. It comes back by itself."""
        if num_bytes < LEAST_BYTES:
            return np.empty(num_bytes, np.uint8)
        try:
            room = self._free[num_bytes].pop()  # one step of the interpreter, as `append` is: no lock is needed
        except LookupError:
            room = np.empty(num_bytes, np.uint8)
        given = np.frombuffer(room.data, np.uint8)  # NumPy has a slice of `room[:]` hold `room`, and not what was given
        weakref.finalize(given, self._free.setdefault(num_bytes, []).append, room).atexit = False
        return given

    def clear(self) -> None:
        """Give what is not in use back to the machine."""
        for rooms in self._free.values():
            rooms.clear()
