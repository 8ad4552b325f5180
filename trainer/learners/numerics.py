"""What the bits of torch's arithmetic depend on, in words that can be compared."""

import platform

import torch


def numerics(device: torch.device | str) -> dict[str, str]:
    """Library, device, and on the CPU its instruction set and threads."""
    found = {"torch": str(torch.__version__), "device": torch.device(device).type}
    if found["device"] == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return found | {"cpu": f"{platform.machine()} {capability}", "threads": str(torch.get_num_threads())}
    return found | {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
