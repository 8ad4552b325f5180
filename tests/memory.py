"""The most memory that some work takes above what lay there before it, on a CPU or on a GPU."""

import gc
from collections.abc import Callable
from pathlib import Path

from infra.roles.memory import give_back_freed


def wait_for_card(device: str) -> None:
    """Until what it was given is done; a CPU has done it."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """On a CPU of the whole process, as Linux with glibc counts it; on a GPU of its tensors."""
    import torch

    wait_for_card(device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        wait_for_card(device)
        return torch.cuda.max_memory_allocated() - before
    before = held_bytes()
    peak_anew()
    work()
    return _status_bytes("VmHWM") - before


def held_bytes() -> int:
    """What this process holds once the allocator has given back what is not used."""
    gc.collect()
    give_back_freed()  # else later work would take it again unseen
    return _status_bytes("VmRSS")


def peak_anew() -> None:
    """The most that this process has held begins anew at what it holds."""
    Path("/proc/self/clear_refs").write_text("5")


def most_bytes() -> int:
    """The most memory that this process has held."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
