"""Memory: whether freed memory goes back to the machine or stays with the process, and how often Python searches for cycles.

glibc takes blocks up to 32 MiB from a heap once one of that size was freed, and a heap shrinks at its end alone: weights and
moments of a few MiB, freed between others that stay, would be held for good. And threads that allocate get heaps of their own,
up to eight a core; each heap holds the memory of its busiest moment.
"""

import ctypes
import gc
import os

LARGE_BYTES = 4 * 1024 * 1024
THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
HEAPS = -8  # M_ARENA_MAX of malloc.h
NEW_OBJECTS = 50_000


def give_back_large_blocks() -> bool:
    """Have each block of LARGE_BYTES or more in a mapping of its own from now on; returns whether the allocator can.
    A MALLOC_MMAP_THRESHOLD_ in the environment stays.
    """
    return _told("MALLOC_MMAP_THRESHOLD_", THRESHOLD, LARGE_BYTES)


def share_heaps(number: int) -> bool:
    """Have threads that begin to allocate share at most `number` heaps from now on; returns whether the allocator can.
    A MALLOC_ARENA_MAX in the environment stays.
    """
    return _told("MALLOC_ARENA_MAX", HEAPS, number)


def search_seldom() -> None:
    """Have Python search for cycles after NEW_OBJECTS more containers are held than before, and no longer after 700.

    For a process of very many objects and few cycles. Python frees cycles later: not for a process that holds tensors.
    """
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def give_back_freed() -> None:
    """Give the machine the memory of freed smaller blocks in the heaps, where the allocator can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _told(variable: str, option: int, value: int) -> bool:
    if variable in os.environ:
        return True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
