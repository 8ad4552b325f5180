"""How much memory the processes of a run hold together, read from /proc."""

import os

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def used_bytes(pid: int) -> int:
    """Bytes that a process and all below it hold for themselves; files and /tmp, which have limits of their own, apart.

    What a fork shares with its parent is counted for both. A process that has ended counts for nothing. A kernel that names
    no children (built without CONFIG_PROC_CHILDREN) has the first process alone counted.
    """
    total = 0
    left = [pid]
    while left:
        folder = f"/proc/{left.pop()}"
        try:
            _, resident, shared, *_ = _read(f"{folder}/statm").split()
            total += max(0, int(resident) - int(shared)) * PAGE_BYTES
            for thread in os.listdir(f"{folder}/task"):
                left += [int(child) for child in _read(f"{folder}/task/{thread}/children").split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or a thread of it
            continue
    return total


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
