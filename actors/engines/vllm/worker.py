"""What headrace adds to vLLM's worker, inside the core process: applying weights, and saying how it fares.

vLLM mixes this class into its own worker, hence the prefix of every name. It imports nothing that the worker has not.
"""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# It warns of every layer without weights (rotary embeddings) at every reload; the probe checks what matters.
_NOISY = "vllm.model_executor.model_loader.reload.layerwise"


class WeightsExtension:
    """Methods reached by `collective_rpc`."""

    model_runner: Any

    def headrace_apply(self, path: str) -> int:
        """Load the tensors of a safetensors file, all sources of every fused module among them. Returns how many."""
        from safetensors.torch import load_file

        logging.getLogger(_NOISY).setLevel(logging.ERROR)
        tensors = load_file(path)
        with _experts_packed_again(self.model_runner.model):
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        return len(tensors)

    def headrace_memory(self) -> dict[str, float]:
        """Process id and resident memory in MB."""
        gc.collect()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"pid": float(os.getpid()), "rss_mb": resident / 1e6}


@contextmanager
def _experts_packed_again(model: Any) -> Iterator[None]:
    """On a CPU vLLM packs the experts of a layer when it makes their kernel, and a reload keeps the kernel: the new weights
    would be read as if they were packed. So a reloaded layer gets a new kernel; the others keep theirs.
    """
    methods = [
        module.quant_method
        for module in model.modules()
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None
        and all(value.device.type == "cpu" for value in module.parameters(recurse=False))
    ]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:
                method.moe_kernel = kernel
