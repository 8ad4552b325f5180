"""One function over many tensors, in as many threads as there are cores.

numpy, zstd and the hashes let go of the interpreter while they work, so threads share the cores and others run on.
"""

import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 16  # more share the memory's bandwidth, not the work


def in_threads(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = MAX_THREADS,
    size: Callable[[Item], int] = lambda item: 0,
    same: Callable[[Item], Hashable] | None = None,
) -> list[Result]:
    """`work` of each item, in order. Raises what the first item that failed raised; what has not begun then is left out.

    most: threads, where what one item needs is not small. size: the largest begin, so that none of them is left for the end.
    same: items of which it gives the same are worked on once, such as tied matrices under each of their names.
    """
    listed = list(items)
    if same is not None:
        keys = [same(item) for item in listed]
        once = dict(zip(keys, listed, strict=True))
        found = dict(zip(once, in_threads(work, once.values(), most=most, size=size), strict=True))
        return [found[key] for key in keys]
    threads = min(len(listed), most, len(os.sched_getaffinity(0)))
    if threads < 2:
        return [work(item) for item in listed]
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tensors")
    try:
        begun = {
            at: pool.submit(work, listed[at]) for at in sorted(range(len(listed)), key=lambda at: -size(listed[at]))
        }
        return [begun[at].result() for at in range(len(listed))]
    finally:
        pool.shutdown(cancel_futures=True)
