"""Memory and disk that the settings need for their model, from config.json alone, and the parts that do not fit.

Bytes of weights, gradients and optimizer are exact; kernels and allocators change values marked "(rough)" by tens of percent. A
trained parameter has a weight, a float32 gradient, two float32 moments, and in bfloat16 a float32 master. ZeRO (arXiv
1910.02054, figure 1) keeps 1/N of the masters and moments on each of N ranks from stage 1 on, of the gradients from stage 2 on,
of the weights in stage 3. The base of an adapter has weights and nothing else.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.table import Table

from infra.cli.plan.rates import gb
from infra.cli.plan.size import ModelSize, model_size
from infra.cli.settings import Settings
from infra.model.adapter import named_adapter
from infra.model.model import gpu_bytes
from infra.policies.chain import ANCHOR_EVERY
from infra.policies.policy import Adapter
from infra.settings.config import Use, duration_s
from schemas.errors import ConfigError

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
ROUGH = " (rough)"
MOMENTS_AND_WEIGHT = 12  # bytes a parameter in a checkpoint
PROCESS_BYTES = 700_000_000  # of Python with torch and transformers, before any model
AT_ONCE = 20_000_000  # values, of `trainer.learners.engines`
PREFETCHED, KEPT_GATHERED = 50_000_000, 1_000_000_000  # values that ZeRO 3 gathers ahead, and keeps at most
MAX_LOGITS = 2**26  # that a learner holds at once, in float32
GPU_SHARE = 0.9  # of a card that vLLM takes, unless its option says otherwise
MAX_WEIGHTS_SHARE = 0.8  # of vLLM's memory: the rest is for keys and values
MAX_RANKS = 1024
DELTA_SHARE = (
    1 / 120
)  # of all weights: in bfloat16 1.4 % of the values change, as `make bench NAME=weights` measures it

Needs = dict[str, float]
"""Bytes by purpose."""
Memory = dict[str, Needs]
"""Needs of one process by place, "GPU" and "host"."""


class Machine(NamedTuple):
    """Memory in bytes of one GPU (0: there is none), of one host and free in /dev/shm; seconds between optimizer steps."""

    gpu: float
    host: float
    shm: float
    step_s: float


class LearnerPlan(msgspec.Struct, frozen=True):
    """Settings that decide a learner's memory.

    stage: of ZeRO, -1 for the learner of one process. tokens: of a microbatch, on one rank. recomputes: activations are
    computed again in the backward. offload: masters and moments lie in the host's memory. reference: bytes a parameter, 0
    without a reference.
    """

    ranks: int
    stage: int
    dtype: str
    tokens: int
    recomputes: bool
    offload: bool = False
    reference: int = 0
    critic: bool = False


class ModelPlan(msgspec.Struct, frozen=True):
    """Needs of the settings.

    learner: memory of one rank. engines: memory by the role that runs one. shm: bytes in /dev/shm. store: bytes of one whole
    version, of a delta, of a checkpoint, and in the long run.
    """

    size: ModelSize
    plan: LearnerPlan
    learner: Memory
    engines: dict[str, Memory]
    shm: float
    store: Needs
    problems: tuple[str, ...] = ()


class MachineFlags(msgspec.Struct, frozen=True):
    """The machines that the model shall fit; for an option left out this machine, with a GPU of 80 GB where it has none."""

    gpu_gb: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GB; 0 for none.", show_default="this machine's, or 80")
    ] = None
    host_gb: Annotated[float | None, typer.Option(help="Memory of a host in GB.", show_default="this machine's")] = None
    shm_gb: Annotated[float | None, typer.Option(help="Free GB in /dev/shm.", show_default="this machine's")] = None
    step_s: Annotated[float, typer.Option(min=0.001, help="Seconds per optimizer step.")] = 120.0

    def machine(self) -> Machine:
        shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(
            gpu=(gpu_bytes() or 80e9) if self.gpu_gb is None else self.gpu_gb * 1e9,
            host=host if self.host_gb is None else self.host_gb * 1e9,
            shm=(shared.f_bavail * shared.f_frsize if shared else 0) if self.shm_gb is None else self.shm_gb * 1e9,
            step_s=self.step_s,
        )


def plan_model(settings: Settings, machine: Machine) -> ModelPlan:
    """Compute the needs of the settings on such machines. Raises ConfigError."""
    if not settings.policy.model:
        raise ConfigError("policy.model: missing, expected the folder or name of a model")
    size, plan = model_size(settings.model_path, configured_adapter(settings)), learner_plan(settings)
    gateway = settings.gateway.engine if settings.gateway is not None else None
    uses = {"explore": settings.engine} | ({"serve": gateway} if gateway is not None else {})
    uses = {role: use for role, use in uses.items() if use.use.endswith((":VllmEngine", ":TorchEngine"))}
    found = ModelPlan(
        size=size,
        plan=plan,
        learner=learner_needs(size, plan),
        engines={role: _engine_needs(size, use, plan) for role, use in uses.items()},
        shm=sum(use.use.endswith(":VllmEngine") for use in uses.values()) * 2 * size.published * WIDTH[plan.dtype],
        store=_store_needs(settings, size, plan, machine.step_s),
    )
    return msgspec.structs.replace(found, problems=tuple(_problems(uses, machine, found)))


def configured_adapter(settings: Settings) -> Adapter | None:
    """The adapter of [trainer.lora], None without. Raises ConfigError."""
    lora = settings.trainer.lora
    if lora is None:
        return None
    return named_adapter(settings.model_path, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def learner_plan(settings: Settings) -> LearnerPlan:
    """The learner's part of the settings. Raises ConfigError for a learner whose needs are unknown."""
    from trainer.learners.lanes import reference_dtype
    from trainer.losses.loss import open_objectives

    config = settings.trainer
    kind, options = config.learner.use.rpartition(":")[2], config.learner.options
    if kind not in ("TorchLearner", "DeepSpeedLearner"):
        raise ConfigError(
            f"trainer.learner: got {config.learner.use}, expected TorchLearner or DeepSpeedLearner to compute its memory"
        )
    compares = any(loss.reference for loss in open_objectives(config.lanes).values())
    return LearnerPlan(
        ranks=config.ranks,
        stage=int(options.get("stage", 2)) if kind == "DeepSpeedLearner" else -1,
        dtype=config.dtype,
        tokens=config.max_tokens_per_microbatch,
        recomputes=config.activation_checkpointing,
        offload=bool(options.get("offload", False)),
        reference=WIDTH[reference_dtype(config)] if compares else 0,
        critic=config.critic is not None,
    )


def learner_needs(size: ModelSize, plan: LearnerPlan) -> Memory:
    state = learner_state(size, plan)
    moved = {what: state.pop(what) for what in ("masters", "moments") if what in state} if plan.offload else {}
    host = moved | {
        "Python and libraries": PROCESS_BYTES,
        "snapshot of a checkpoint": (MOMENTS_AND_WEIGHT + (plan.reference and 4)) * size.trained / plan.ranks,
        "its part of this version and the last": 2 * size.published * WIDTH[plan.dtype] / plan.ranks,
    }
    return {"GPU": state | {f"a step of {plan.tokens:,} tokens at once{ROUGH}": step_bytes(size, plan)}, "host": host}


def learner_state(size: ModelSize, plan: LearnerPlan) -> Needs:
    """Bytes that a rank holds through a step: weights, gradients, masters, moments, and further models."""
    width, zero = WIDTH[plan.dtype], plan.stage > 0
    whole, divided = (1 / plan.ranks if plan.stage == 3 else 1), (1 / plan.ranks if zero else 1)
    state = {
        "weights": size.computed * width * whole,
        "masters": 4 * size.trained * divided if width < 4 or zero else 0,
        "gradients": 4 * size.trained / (plan.ranks if plan.stage > 1 else 1),
        "moments": 8 * size.trained * divided,
        "reference": plan.reference * size.trained * whole,
    }
    if plan.critic:
        alone = msgspec.structs.replace(plan, dtype="float32", reference=0, critic=False)
        state["critic"] = sum(learner_state(size, alone).values())
    return {what: value for what, value in state.items() if value}


def step_bytes(size: ModelSize, plan: LearnerPlan) -> float:
    """Bytes that come and go in a step: at the end of a forward, or in the update of AdamW, the larger of the two."""
    width, ranks = WIDTH[plan.dtype], plan.ranks
    kept = size.layers * size.hidden + size.kept if plan.recomputes else size.layers * size.kept
    # The gradient of the output matrix, until a microbatch is done.
    gradient = size.vocabulary * size.hidden if width < 4 and not size.frozen else 0
    logits = 4 * (gradient + 3 * min(plan.tokens * size.vocabulary, MAX_LOGITS))
    forward, update = float(width * plan.tokens * kept + logits), 0.0
    if plan.stage == 3:
        # Layers gathered ahead, the newest message as it came, and gradients that wait for their exchange.
        gathered = min(size.computed, max(KEPT_GATHERED, size.largest)) + min(size.computed, PREFETCHED + size.largest)
        forward += width * gathered + 4 * min(size.trained, AT_ONCE)
        update = 12 * min(size.trained, AT_ONCE * ranks + size.largest) / ranks
    elif plan.stage > 0:
        update = 8 * size.trained / ranks
    return forward if plan.offload else max(forward, update)


def _engine_needs(size: ModelSize, use: Use, plan: LearnerPlan) -> Memory:
    """Memory of one engine: of vLLM GPU bytes on each of its cards, without keys and values."""
    published, dtype = size.published * WIDTH[plan.dtype], str(use.options.get("dtype", "auto"))
    if use.use.endswith(":TorchEngine"):
        held = max(2 * published, size.frozen * WIDTH[plan.dtype])  # before its first adapter a copy of the base
        weights = size.computed * WIDTH[str(use.options.get("dtype", "float32"))]
        return {"GPU": {}, "host": {"Python and libraries": PROCESS_BYTES, "weights": weights, "two versions": held}}
    split = int(use.options.get("tensor_parallel_size", 1)) * int(use.options.get("pipeline_parallel_size", 1))
    return {
        "GPU": {"weights": size.computed * WIDTH.get(dtype, WIDTH[plan.dtype]) / split},
        "host": {"Python and libraries": PROCESS_BYTES, "two versions, in /dev/shm": 2 * published},
    }


def _store_needs(settings: Settings, size: ModelSize, plan: LearnerPlan, step_s: float) -> Needs:
    version = size.published * WIDTH[plan.dtype]
    # In float32 nearly every value changes in every step, and in an adapter's, so that every version is stored whole.
    is_whole = plan.dtype == "float32" or size.frozen > 0
    delta = version if is_whole else version * (1 / ANCHOR_EVERY + DELTA_SHARE)
    saved = MOMENTS_AND_WEIGHT + (4 if plan.reference else 0) + (MOMENTS_AND_WEIGHT if plan.critic else 0)
    versions = duration_s(settings.keep.replay) / (step_s * settings.pacing.steps_per_version)
    return {
        "a whole version": version,
        "each later version, on average": delta,
        "a checkpoint": saved * size.trained,
        "in the long run": versions * delta + settings.trainer.keep_checkpoints * saved * size.trained,
    }


def total(needs: Needs) -> float:
    return sum(needs.values())


def _problems(uses: dict[str, Use], machine: Machine, found: ModelPlan) -> Iterator[str]:
    """Lines about needs that do not fit, each with the setting that changes it."""
    plan, gpu, host = found.plan, total(found.learner["GPU"]), total(found.learner["host"])
    if machine.gpu and gpu > machine.gpu:
        yield (
            f"a learner's rank needs {gb(gpu)} of GPU memory, there are {gb(machine.gpu)}: "
            f'trainer.ranks = {_ranks(found, machine)}, trainer.dtype = "bfloat16", trainer.activation_checkpointing = true, '
            'trainer.learner = { use = "trainer.learners.deepspeed:DeepSpeedLearner", options = { stage = 3 } }'
        )
    if (on_host := plan.ranks * (host + (0.0 if machine.gpu else gpu))) > machine.host:
        yield (
            f"{plan.ranks} rank(s) on one host need {gb(on_host)} of its memory, there are {gb(machine.host)}: several "
            "hosts with fewer ranks each, or one with more memory"
        )
    for role, needs in found.engines.items():
        if (engine_host := total(needs["host"])) > machine.host:
            yield f"an engine of {role} needs {gb(engine_host)} of host memory, there are {gb(machine.host)}: a host with more"
        options, weights = uses[role].options, total(needs["GPU"])
        room = MAX_WEIGHTS_SHARE * machine.gpu * float(options.get("gpu_memory_utilization", GPU_SHARE))
        if room and weights > room:
            parts = int(options.get("tensor_parallel_size", 1)) * 2 ** max(0, math.ceil(math.log2(weights / room)))
            yield (
                f"the weights of {role}'s engine take {gb(weights)} of each GPU, expected at most {gb(room)} beside keys and "
                f"values: {'engine' if role == 'explore' else 'gateway.engine'}.options.tensor_parallel_size = {parts}"
            )
    if found.shm > machine.shm:
        yield (
            f"the versions that engines hold need {gb(found.shm)} in /dev/shm, which has {gb(machine.shm)} free; they go to "
            "a folder on disk then, which is slower: give the container more (docker --shm-size, or an emptyDir of medium "
            "Memory)"
        )


def _ranks(found: ModelPlan, machine: Machine) -> int:
    """The power of two of ranks of ZeRO 3, in bfloat16 with activation checkpointing, from which on each fits its GPU."""
    for ranks in (1 << power for power in range(MAX_RANKS.bit_length())):
        mended = msgspec.structs.replace(found.plan, dtype="bfloat16", recomputes=True, stage=3, ranks=ranks)
        if total(learner_needs(found.size, mended)["GPU"]) <= machine.gpu:
            return ranks
    return MAX_RANKS


def model_table(settings: Settings, machine: Machine, found: ModelPlan) -> Table:
    size = found.size
    shown = Table(
        title=f"{settings.policy.model}: {size.frozen or size.trained:,} parameters, {size.layers} layers"
        + (f"; an adapter of {size.trained:,} is trained" if size.frozen else "")
        + " (computed)",
        show_header=False,
    )
    parts = {f"learner, each of {found.plan.ranks} rank(s)": found.learner}
    parts |= {f"engine of {role}": needs for role, needs in found.engines.items()}
    for part, memory in parts.items():
        for place, needs in memory.items():
            if needs:
                shown.add_row(part, place, gb(total(needs)), "in all", style="bold")
            for what, num_bytes in needs.items():
                shown.add_row("", "", gb(num_bytes), what)
        if part != next(iter(parts)) and memory["GPU"] and machine.gpu:
            left = max(0.0, GPU_SHARE * machine.gpu - total(memory["GPU"]))
            shown.add_row(part, "GPU", gb(left), f"left for keys and values: {left / (size.kv * 2):,.0f} tokens")
    shown.add_row(
        "/dev/shm", "host", gb(found.shm), "the served version and the next of each role, shared by its engines"
    )
    for what, num_bytes in found.store.items():
        shown.add_row("store", "", gb(num_bytes), what)
    return shown
