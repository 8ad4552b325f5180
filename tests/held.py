"""What a process holds, told apart, so that growth has a name: a role as `headrace` runs it, and a thread that looks.

    python -m tests.held FILE process --config headrace.toml

FILE gets a line of JSON every LOOK_S. In MB: `files` are mapped (code), `heap used` is malloc's and in use, `heap free` is
malloc's and free, though a part of it may have no page any more, `others` is what else is anonymous: Python's own arenas of
small objects, thread stacks, tensors that were mapped. In thousands: `blocks` of Python's allocator, `objects` that
its collector knows; and how many of each type there are.
"""

import ctypes
import gc
import itertools
import json
import operator
import runpy
import sys
import threading
import time
from collections import Counter, _count_elements  # type: ignore[attr-defined]
from pathlib import Path
from typing import TextIO

LOOK_S = 20.0
MB = 2**20
TYPES = 40  # of which there are most
ENTRY = "infra.cli.main"


class _Malloc(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def parts() -> dict[str, float]:
    """Of this process."""
    found = ctypes.CDLL(None).mallinfo2
    found.restype = _Malloc
    malloc = found()
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {words[0]: int(words[1]) / 1024 for words in lines}
    heap = (malloc.arena + malloc.hblkhd) / MB
    return {
        "resident": sizes["Rss:"],
        "files": sizes["Rss:"] - sizes["Anonymous:"],
        "heap used": (malloc.uordblks + malloc.hblkhd) / MB,
        "heap free": malloc.fordblks / MB,
        "others": sizes["Anonymous:"] - heap,
        "blocks": sys.getallocatedblocks() / 1000,
        "threads": float(threading.active_count()),
    }


def types() -> Counter[type]:
    """How many objects there are of each type.

    No step of Python's lies between finding and counting them, so no other thread runs meanwhile: a tuple that it is just
    making must not be referred to from elsewhere when it gets its size, or `tuple(…)` raises SystemError there.
    """
    found: Counter[type] = Counter()
    _count_elements(found, map(type, itertools.chain.from_iterable(map(operator.call, [gc.get_objects]))))
    return found


def tell(file: TextIO) -> None:
    """One line."""
    found = types()
    most = {f"{kind.__module__}.{kind.__qualname__}": count for kind, count in found.most_common(TYPES)}
    line = {"at_s": time.time(), **parts(), "objects": found.total() / 1000, "types": most}
    file.write(json.dumps(line) + "\n")
    file.flush()


def look(file: TextIO) -> None:
    """For ever."""
    while True:
        time.sleep(LOOK_S)
        tell(file)


def main() -> None:
    """The role, in the main thread."""
    _, path, *sys.argv[1:] = sys.argv
    with Path(path).open("w") as file:
        tell(file)
        threading.Thread(target=look, args=(file,), daemon=True).start()
        runpy.run_module(ENTRY, run_name="__main__")


if __name__ == "__main__":
    main()
