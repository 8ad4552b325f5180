"""What a process holds, told apart, so that growth has a name: a role as `headrace` runs it, and a thread that looks.

    python -m tests.held FILE process --config headrace.toml

FILE gets a line of JSON every LOOK_S. In MB: `files` are mapped (code), `heap used` is malloc's and in use, `heap free` is
malloc's and free, though a part of it may have no page any more, `others` is what else is anonymous: Python's own arenas of
small objects, thread stacks, tensors that were mapped. In thousands: `blocks` of Python's allocator, `objects` that
its collector knows; and how many of each type there are.
"""

import ctypes
import gc
import json
import runpy
import sys
import threading
import time
from collections import Counter
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
        "objects": len(gc.get_objects()) / 1000,
        "threads": float(threading.active_count()),
    }


def types() -> dict[str, int]:
    """How many objects there are of the types that have most."""
    return dict(
        Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects()).most_common(TYPES)
    )


def tell(file: TextIO) -> None:
    """One line."""
    file.write(json.dumps({"at_s": time.time(), **parts(), "types": types()}) + "\n")
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
