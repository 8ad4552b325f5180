"""The facts that the bits of torch's arithmetic depend on, in words that can be compared."""

import platform
from importlib import metadata
from pathlib import Path

import torch

PROCESSORS = Path("/proc/cpuinfo")
NAMED_BY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")  # of x86 and of ARM


def numerics(device: torch.device | str, *, adapted: bool = False) -> dict[str, str]:
    """Libraries, device, and on the CPU its instruction set, its model and threads. adapted: peft computes too."""
    found = {"torch": str(torch.__version__), "device": torch.device(device).type}
    if adapted:
        found["peft"] = metadata.version("peft")
    if found["device"] == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return found | {
            "cpu": f"{platform.machine()} {capability}",
            "cpu_model": cpu_model(),
            "threads": str(torch.get_num_threads()),
        }
    return found | {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def cpu_model(file: Path = PROCESSORS) -> str:
    """Vendor, family and model of the CPU: libraries choose kernels by it, and two models of one instruction set give other
    bits. file: where the kernel tells it.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or "not known"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return " ".join(fields[name] for name in NAMED_BY if name in fields) or platform.processor() or "not known"
