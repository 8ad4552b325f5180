"""Start of vLLM: engine arguments and environment, for exact logprobs and hot reload.

Values of the user always win; a value that would break the engine's contract is an error.
"""

import ast
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from actors.engines.vllm.adapters import MIN_SLOTS
from infra.model.vision import Vision, probe_picture
from infra.policies.policy import Adapter
from infra.settings.config import nearest
from schemas.errors import ConfigError

SLOTS = 4  # versions of an adapter that live at once
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's `max_lora_rank`
TRIED = ("0.32", "0.33")  # releases of vLLM from the first up to, not with, the second: its inner workings are used
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}  # one spelling, as in the other engines
# Without these a recorded logprob, a version or a reload would be wrong.
REQUIRED: dict[str, object] = {
    "worker_extension_cls": "actors.engines.vllm.worker.WeightsExtension",
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",  # else the model folder's top_p and top_k apply silently
    "scheduling_policy": "priority",  # the probe goes first after a reload
    # The engine needs only token ids, but grammars need their texts, and an image processor needs its tokenizer.
    "skip_tokenizer_init": False,
    "structured_outputs_config": GRAMMARS,
}
SEEING: dict[str, object] = {"model_impl": "transformers"}  # that library's vision tower, as the trainer runs it
DEFAULTS: dict[str, object] = {
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "mm_processor_cache_gb": 0,  # pictures come with every request, so nothing need keep them
}
# One process less, no compilation, exact arithmetic, and memory that leaves room for a trainer.
CPU_DEFAULTS: dict[str, object] = {
    "dtype": "float32",
    "distributed_executor_backend": "uni",
    "enforce_eager": True,
    "max_num_seqs": 256,
    "max_model_len": -1,  # the model's own, or what the memory for keys and values holds
    # The answers of a group share their prompt in whole blocks only, and vLLM's own 128 tokens exceed most prompts.
    "block_size": 32,
}
CACHE_BYTES = 2**30  # for keys and values on a CPU, where one request does not need more
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps the "uni" executor; the core process stays
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Each number of tokens in a step makes oneDNN compile and keep another 0.7 MB; it would keep 1024 of them. Making
    # them again costs nothing measurable.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "MALLOC_ARENA_MAX": "2",
    # Each step allocates its logits: mapping their pages again took a third of the CPU time. Weights that a load replaced go
    # back to the machine at its end.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**29),
}


def check_release(installed: str) -> None:
    """Raise ConfigError for a release of vLLM that was not tried."""
    first, last = TRIED
    if not _numbers(first) <= _numbers(installed) < _numbers(last):
        raise ConfigError(
            f"vllm: got {installed}, expected {first} or later, below {last}: pip install 'headrace[cuda]'"
        )


def argument_names() -> frozenset[str] | None:
    """Names of the engine arguments of the vLLM that is installed, read from its source, since importing it takes seconds; None
    where it is not installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    source = Path(found.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    return frozenset(
        field.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def engine_arguments(
    *,
    model: str,
    seed: int,
    options: Mapping[str, object],
    on_cpu: bool,
    known: frozenset[str],
    vision: Vision | None = None,
    adapter: Adapter | None = None,
) -> dict[str, object]:
    """Keyword arguments for vLLM's engine. known: the names it takes. vision: of a model that sees. adapter: that the versions
    will be of. Raises ConfigError.
    """
    required = REQUIRED if vision is None else {**REQUIRED, **SEEING, "mm_processor_kwargs": _sizes(vision)}
    if adapter is not None:
        required = {**required, **adapting(adapter, options)}
    for name, value in options.items():
        if name in ("model", "seed") or name not in known:
            hint = f"{nearest(name, known)}; see `vllm serve --help`, with underscores"
            raise ConfigError(f"engine.options.{name}: not an option of this vLLM{hint}")
        if name in required and value != required[name]:
            raise ConfigError(f"engine.options.{name}: got {value!r}, headrace needs {required[name]!r}; leave it out")
    workers = _workers(options)
    defaults = {**DEFAULTS, **CPU_DEFAULTS, **workers} if on_cpu else DEFAULTS
    return {**defaults, **options, **required, "model": model, "seed": seed}


def _workers(options: Mapping[str, object]) -> dict[str, object]:
    """Arguments for several workers on a CPU besides CPU_DEFAULTS: a process each. Raises ConfigError."""
    if all(options.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "pipeline")):
        return {}
    if options.get("distributed_executor_backend") == "uni":
        raise ConfigError(
            'engine.options.distributed_executor_backend: got "uni", one process, where vLLM never stops waiting for its '
            'other workers; expected "mp", or leave it out'
        )
    return {"distributed_executor_backend": "mp"}


def adapting(adapter: Adapter, options: Mapping[str, object]) -> dict[str, object]:
    """Engine arguments for versions that are adapters; max_loras of `options` says how many may live at once."""
    rank = next((rank for rank in RANKS if rank >= adapter.rank), 0)
    if not rank:
        raise ConfigError(f"trainer.lora.rank: got {adapter.rank}, expected at most {RANKS[-1]}, vLLM's largest")
    slots = options.get("max_loras", SLOTS)
    if not isinstance(slots, int) or slots < MIN_SLOTS:
        raise ConfigError(
            f"engine.options.max_loras: got {slots!r}, expected {MIN_SLOTS} or more: the serving and the next adapter"
        )
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,  # vLLM keeps none that no request may use
        "max_lora_rank": rank,
        # Not the output matrix among them: vLLM scores a prompt with the adapter of another request there.
        "lora_target_modules": list(adapter.targets),
    }


def give_cache(config: Any, free_bytes: Callable[[], int] | None = None) -> None:
    """Set the memory for keys and values on a CPU: enough for all requests in flight, at most CACHE_BYTES unless a single
    request of a `max_model_len` of the settings needs more, and at most half of the free memory. vLLM shortens a length that
    no setting names to what fits. config: vLLM's config, which this changes. Raises ConfigError if a request of the settings'
    `max_model_len` does not fit this memory or the limit of the settings.
    """
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    token *= model.dtype.itemsize
    block = int(cache.block_size or 128)
    length = int(model.max_model_len)
    request = (-(-length // block) + 1) * block * token
    free = (free_bytes or _free_bytes)() // (2 * parallel.world_size)
    given = cache.kv_cache_memory_bytes
    if model.original_max_model_len == -1:  # vLLM shortens it to what fits
        request = min(request, given or min(CACHE_BYTES, free))
    if given is None and request <= free:
        cache.kv_cache_memory_bytes = min(
            config.scheduler_config.max_num_seqs * request, max(request, min(CACHE_BYTES, free))
        )
    elif request > (given or free):
        fitting = max(0, ((given or free) // token // block - 1) * block)
        setting = "half of the free memory" if given is None else "engine.options.kv_cache_memory_bytes"
        raise ConfigError(
            f"engine.options.max_model_len: got {length}; keys and values of one request of that length take "
            f"{request / 2**20:,.0f} MiB, and {setting} gives {(given or free) / 2**20:,.0f} MiB; set max_model_len to at most "
            f"{fitting}" + ("" if given is None else f", or kv_cache_memory_bytes to at least {request}")
        )


def _free_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # no limit
        free = min(free, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return max(0, free)


@contextmanager
def environment(*, on_cpu: bool) -> Iterator[None]:
    """Environment while vLLM starts its process, which inherits it; afterwards all is as before."""
    wanted = {"VLLM_LOGGING_LEVEL": "WARNING", **(CPU_ENVIRONMENT if on_cpu else {})}
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]


def _sizes(vision: Vision) -> dict[str, object]:
    """Arguments of vLLM's image processor that a model folder need not name; InternVL gets one tile per picture."""
    if vision.family == "internvl":
        return {"crop_to_patches": False}
    _, height, width = vision.prepare(probe_picture(0)).shape
    return {"patch_size": vision.patch, "crop_size": {"height": height, "width": width}}


def _numbers(release: str) -> tuple[int, ...]:
    """Major and minor number of a release.

    >>> _numbers("0.32.1rc2+cpu")
    (0, 32)
    """
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])
