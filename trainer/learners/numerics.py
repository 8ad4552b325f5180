"""What the bits of torch's arithmetic depend on, in words that can be compared."""

import platform
from importlib import metadata

import torch


def numerics(device: torch.device | str, *, adapted: bool = False) -> dict[str, str]:
    """Libraries, device, and on the CPU its instruction set and threads. adapted: peft computes too."""
    found = {"torch": str(torch.__version__), "device": torch.device(device).type}
    if adapted:
        found["peft"] = metadata.version("peft")
    if found["device"] == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return found | {"cpu": f"{platform.machine()} {capability}", "threads": str(torch.get_num_threads())}
    return found | {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
