"""What headrace adds to vLLM's worker, inside the core process: applying weights, reading them back, and saying how it fares.

vLLM mixes this class into its own worker, hence the prefix of every name. It imports nothing that the worker has not.

Guarantee: a version that one of several workers cannot load is refused for all of them. What loads one raises nothing but
returns why: vLLM reads the workers' answers up to the first that failed, and takes the others for answers to its next call.
"""

import fcntl
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from actors.engines.vllm.arriving import Arriving, not_adapted
from actors.engines.vllm.held import Held, Wanted
from actors.engines.vllm.staged import Staged, can_be_staged
from actors.engines.vllm.turns import Turn, Turns

# It warns of every layer without weights (rotary embeddings) at every reload; the probe checks what matters.
_NOISY = "vllm.model_executor.model_loader.reload.layerwise"
_log = logging.getLogger(__name__)


class WeightsExtension:
    """Methods reached by `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    headrace_held: Held
    headrace_staged: Staged | None
    headrace_arriving: Arriving

    def headrace_leave_out_amx(self) -> None:
        """Before the first step: use the attention kernel without AMX where a CPU has it. In bfloat16 vLLM's other one may end
        the process at a step of several sequences: it clears a tile that it gave no rows (`tilezero`, SIGILL; release 0.32).
        """
        for group in (one for several in self.model_runner.attn_groups for one in several):
            for builder in group.metadata_builders:
                if getattr(builder, "isa", "") == "amx":
                    builder.isa = "vec"
                    builder._set_isa_to_layers(group.layer_names)

    def headrace_unlink_shared_memory(self) -> None:
        """Remove the name of the memory through which workers on a CPU talk, once all of them have opened it, so that it
        goes with the last of them. vLLM leaves it behind, 4 MB of each worker (release 0.32).
        """
        for name in shared_memory():
            name.unlink(missing_ok=True)

    def headrace_begin(self) -> None:
        """Note what the model holds; once, before the first load."""
        logging.getLogger(_NOISY).setLevel(logging.ERROR)
        self.headrace_held = Held(self.model_runner.get_model())
        self.headrace_staged = None

    def headrace_stage(self, path: str, names: list[str]) -> Turn:
        """Begin to make a version ready between the steps, where that can be done, with a first turn; see `headrace_apply`."""
        if self.headrace_staged is not None:
            self.headrace_staged.work.leave()
        self.headrace_staged = None
        model = self.model_runner.get_model()
        if names and can_be_staged(model):
            load = partial(self._headrace_load, path, names)
            self.headrace_staged = Staged(model, self.headrace_held, load)
        return self.headrace_take_turn()

    def headrace_take_turn(self) -> Turn:
        """Go on with it for some milliseconds; whether `headrace_apply` may come, and how many it were."""
        began_s = time.perf_counter()
        is_ready = self.headrace_staged is None or self.headrace_staged.work.take()
        return is_ready, (time.perf_counter() - began_s) * 1e3

    def headrace_apply(self, path: str, names: list[str]) -> tuple[float, str]:
        """Take over what was staged, or load these tensors of a safetensors file, all sources of every fused module among
        them; and compare all that the model then holds with what it should hold. Returns when it began, by
        `time.perf_counter`, which all processes of a Linux host share, and why the version is refused, "" where the model
        holds it.
        """
        began_s = time.perf_counter()
        staged, self.headrace_staged = self.headrace_staged, None
        take = (lambda: self._headrace_loaded(path, names)) if staged is None else staged.take_over
        reason = _refused(take)
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self.model_runner, forget)()
        return began_s, reason

    def _headrace_loaded(self, path: str, names: list[str]) -> str:
        held = self.headrace_held
        with _experts_packed_again(self.model_runner.model):
            held.expect(self._headrace_load(path, names, self.model_runner.get_model(), held.modules, iter))
        return held.unlike()

    def _headrace_load(
        self, path: str, names: list[str], model: Any, modules: Mapping[str, Any], turns: Turns[Any]
    ) -> Wanted:
        """See `actors.engines.vllm.staged.Load`."""
        from safetensors import safe_open
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        with _locked(path):  # once no process holds the version, its file is written over
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in names}
            with self.headrace_held.loading(tensors, modules) as wanted:
                reload_weights(self.vllm_config, model, turns(tensors.items()), None, is_checkpoint_format=True)
            _check_copied(tensors.values(), model)
        return wanted

    def headrace_read_adapter(self, number: int, name: str, path: str) -> None:
        """Begin to read an adapter folder, beside the steps."""
        from vllm.lora.request import LoRARequest

        runner = self.model_runner
        self.headrace_arriving = Arriving(runner.get_model(), runner.lora_manager, LoRARequest(name, number, path))

    def headrace_adapter_is_read(self) -> bool:
        """Whether `headrace_place_adapter` has nothing to wait for."""
        return self.headrace_arriving.is_read

    def headrace_place_adapter(self) -> tuple[float, str]:
        """Make the adapter that was read ready for requests, see `Arriving.place`. Returns the milliseconds in which nothing
        else ran, and why the adapter is refused, "" where the model holds it.
        """
        began_s = time.perf_counter()
        arriving = self.headrace_arriving
        del self.headrace_arriving
        reason = _refused(arriving.place)
        return (time.perf_counter() - began_s) * 1e3, reason

    def headrace_not_adapted(self, names: list[str]) -> list[str]:
        """Those of an adapter's tensors for which this worker's model has no place. names: as peft writes them."""
        return not_adapted(self.model_runner.get_model(), names)

    def headrace_memory(self) -> dict[str, float]:
        """Process id and resident memory in MB."""
        gc.collect()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"pid": float(os.getpid()), "rss_mb": resident / 1e6}


def shared_memory() -> list[Path]:
    """What this worker on a CPU made to talk with others through."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    groups = [getattr(one.device_communicator, "dist_module", None) for one in (get_tp_group(), get_pp_group())]
    made: list[Any] = [one for one in groups if hasattr(one, "group_name")]
    return [Path(f"/dev/shm/{one.group_name}_{one.communicator.rank}") for one in made]


def _refused(load: Callable[[], str]) -> str:
    """Why a version is refused, "" where the model holds it. load: returns the first name that holds something else, ""
    for none.
    """
    try:
        odd = load()
    except Exception as error:
        _log.exception("version not loaded")
        return f"vLLM could not load it: {type(error).__name__}: {error}"
    return f"after the load vLLM holds other values in {odd}" if odd else ""


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the file of a version as a process does that has its tensors: see `infra.policies.version_files`."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _check_copied(tensors: Iterable[Any], model: Any) -> None:
    """RuntimeError where the model has the memory of the file and no copy of it."""
    of_file = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.numel() and value.untyped_storage().data_ptr() in of_file:
            raise RuntimeError(f"{name} lies in the file itself, expected a copy")


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
