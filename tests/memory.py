"""Memory of this process and of scripts that tests start: what is held, and the most that some work takes."""

import gc
from collections.abc import Callable
from pathlib import Path

from infra.roles.memory import give_back_freed

# For scripts. Not getrusage: its peak is handed down from the process that forked, which may have been far larger.
PEAK_MB = """
def peak_mb():
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmHWM:")[2].split()[0]) / 1024

"""


def wait_for_card(device: str) -> None:
    """Return once the card has done its work."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Bytes at the peak of some work above those before: of the process on a CPU, of tensors on a GPU."""
    import torch

    wait_for_card(device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        wait_for_card(device)
        return torch.cuda.max_memory_allocated() - before
    before = held_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return status_bytes("VmHWM") - before


def held_bytes() -> int:
    """Bytes of this process, once the allocator has given back unused memory."""
    gc.collect()
    give_back_freed()  # else later work would take it again unseen
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
