"""Memory, time and disk that the settings need for their model, from config.json alone, and what does not fit.

Bytes of weights, gradients and optimizer are exact, seconds are computed from measured unit costs, and kernels and allocators
move what is marked "(rough)" by tens of percent. A trained parameter has a weight, a float32 gradient, two float32 moments, and
in bfloat16 a float32 master. ZeRO (arXiv 1910.02054, figure 1) keeps 1/N of the masters and moments on each of N ranks from
stage 1 on, of the gradients from stage 2 on, of the weights in stage 3. The base of an adapter has weights and nothing else.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from infra.cli.plan.rates import gb
from infra.cli.settings import Settings
from infra.model.adapter import named_adapter
from infra.model.model import gpu_bytes
from infra.model.size import ModelSize, model_size
from infra.policies.chain import NUM_SLICES
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
MAX_WEIGHTS_SHARE = 0.8  # of what vLLM has: the rest is for keys and values
MAX_RANKS = 1024

# CPU seconds for a GB of published weights, as `make bench NAME=weights` measures them: bfloat16, 1.4 % of the values change,
# on 2.5 GHz virtual CPUs with SHA instructions.
PUBLISH_S = 0.9  # copy, look for NaN, hash, encode, one slice
ANCHOR_S = 0.85  # more, where all is stored
RELOAD_S = 1.1  # fetch a delta, apply, verify, compare, write for the worker: before the pause
DELTA_SHARE = 1 / 120  # of all weights, measured as above

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

    stage: Of ZeRO, -1 for the learner of one process. tokens: Of a microbatch, on one rank. recomputes: Activations are
    computed again in the backward. offload: Masters and moments lie in the host's memory. reference: Bytes a parameter, 0
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

    learner: Memory of one rank. engines: Memory by the role that runs one. shm: Bytes in /dev/shm. version: Versions a day,
    seconds of one, and bytes a day by kind. stored: Bytes in the store in the long run.
    """

    size: ModelSize
    plan: LearnerPlan
    learner: Memory
    engines: dict[str, Memory]
    shm: float
    version: Needs
    stored: float
    problems: tuple[str, ...] = ()


def this_machine(gpu_gb: float | None, host_gb: float | None, shm_gb: float | None, step_s: float) -> Machine:
    """The options, and for those left out this machine; a GPU of 80 GB where it has none."""
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Machine(
        gpu=(gpu_bytes() or 80e9) if gpu_gb is None else gpu_gb * 1e9,
        host=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if host_gb is None else host_gb * 1e9,
        shm=(shared.f_bavail * shared.f_frsize if shared else 0) if shm_gb is None else shm_gb * 1e9,
        step_s=step_s,
    )


def plan_model(settings: Settings, machine: Machine) -> ModelPlan:
    """Compute the needs of the settings on such machines. Raises ConfigError."""
    if not settings.policy.model:
        raise ConfigError("policy.model: missing, expected the folder or name of a model")
    size, plan = model_size(settings.model_path, configured_adapter(settings)), learner_plan(settings)
    uses = {
        role: use
        for role, use in engines_by_role(settings).items()
        if use.use.endswith((":VllmEngine", ":TorchEngine"))
    }
    num_shm = sum(use.use.endswith(":VllmEngine") for use in uses.values())
    saved = MOMENTS_AND_WEIGHT + (4 if plan.reference else 0) + (MOMENTS_AND_WEIGHT if plan.critic else 0)
    version = _version_cost(settings, size, plan.dtype, machine.step_s, saved)
    days = duration_s(settings.keep.replay) / 86_400
    found = ModelPlan(
        size=size,
        plan=plan,
        learner=learner_needs(size, plan),
        engines={role: _engine_needs(size, use, plan) for role, use in uses.items()},
        shm=num_shm * 2 * size.published * WIDTH[plan.dtype],
        version=version,
        stored=days * (version["anchor_bytes"] + version["delta_bytes"])
        + settings.trainer.keep_checkpoints * saved * size.trained,
    )
    return msgspec.structs.replace(found, problems=tuple(_problems(uses, machine, found)))


def configured_adapter(settings: Settings) -> Adapter | None:
    """The adapter of [trainer.lora], None without. Raises ConfigError."""
    lora = settings.trainer.lora
    if lora is None:
        return None
    return named_adapter(settings.model_path, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def engines_by_role(settings: Settings) -> dict[str, Use]:
    gateway = settings.gateway.engine if settings.gateway is not None else None
    return {"explore": settings.engine} | ({"serve": gateway} if gateway is not None else {})


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
        tokens=-(-config.max_tokens_per_microbatch // int(options.get("sequence_parallel", 1))),
        recomputes=config.activation_checkpointing,
        offload=bool(options.get("offload", False)),
        reference=WIDTH[reference_dtype(config)] if compares else 0,
        critic=config.critic is not None,
    )


def learner_needs(size: ModelSize, plan: LearnerPlan) -> Memory:
    state = learner_state(size, plan)
    moved = {what: state.pop(what) for what in ("masters", "moments") if what in state} if plan.offload else {}
    host = moved | {
        **(_at_update(size, plan) if plan.offload else {}),
        "Python and libraries": PROCESS_BYTES,
        "snapshot of a checkpoint": (MOMENTS_AND_WEIGHT + (plan.reference and 4)) * size.trained / plan.ranks,
        "its part of this version and the last": 2 * size.published * WIDTH[plan.dtype] / plan.ranks,
    }
    return {"GPU": state | most_at_once(size, plan), "host": host}


def learner_state(size: ModelSize, plan: LearnerPlan) -> Needs:
    """Bytes that a rank holds through a step: weights, gradients, masters, moments, and further models."""
    width, zero = WIDTH[plan.dtype], plan.stage > 0
    whole, divided = (1 / plan.ranks if plan.stage == 3 else 1), (1 / plan.ranks if zero else 1)
    state = {
        "weights": size.computed * width * whole,
        "masters": 4 * size.trained * divided if width < 4 or zero else 0,
        "gradients": 4 * size.trained / (plan.ranks if plan.stage > 1 else 1),
        f"gradients that wait for an exchange{ROUGH}": 4 * min(size.trained, AT_ONCE) if plan.stage == 3 else 0,
        "moments": 8 * size.trained * divided,
        "reference": plan.reference * size.trained * whole,
    }
    if plan.critic:
        alone = msgspec.structs.replace(plan, dtype="float32", reference=0, critic=False)
        state["critic"] = sum(value for what, value in learner_state(size, alone).items() if not what.endswith(ROUGH))
    return {what: value for what, value in state.items() if value}


def most_at_once(size: ModelSize, plan: LearnerPlan) -> Needs:
    """Bytes that come and go in a step, at the moment that needs most: the end of a forward, the first exchange of gradients in
    the backward (through the layers whose gradients fill a message), or the update.
    """
    forward = _after_forward(size, plan)
    moments = [forward]
    if plan.stage > 0:
        sent = min(size.trained, AT_ONCE)
        left = 1 - sent / size.trained
        # In one piece, and what is computed of that with the other ranks'.
        moments.append(
            {what: left * value for what, value in forward.items()} | {f"gradients on their way{ROUGH}": 4 * sent * 2}
        )
    if not plan.offload:
        moments.append(_at_update(size, plan))
    return {what: value for what, value in max(moments, key=total).items() if value}


def _after_forward(size: ModelSize, plan: LearnerPlan) -> dict[str, float]:
    """Bytes of one microbatch, without attention's own."""
    width = WIDTH[plan.dtype]
    kept = size.layers * size.hidden + size.kept if plan.recomputes else size.layers * size.kept
    # The gradient of the output matrix, until a microbatch is done.
    gradient = size.vocabulary * size.hidden if width < 4 and not size.frozen else 0
    needs: Needs = {
        f"activations of {plan.tokens:,} tokens{ROUGH}": width * plan.tokens * kept,
        f"logits in float32{ROUGH}": 4 * (gradient + 3 * min(plan.tokens * size.vocabulary, MAX_LOGITS)),
    }
    if plan.stage < 3:
        return needs
    # ZeRO 3 gathers ahead of each layer until it holds so many, the backward's too: a smaller model is whole by the end of its
    # forward. What came in one message stays as it came until the next message is taken apart.
    gathered = min(size.computed, max(KEPT_GATHERED, size.largest))
    message = min(size.computed, PREFETCHED + size.largest)
    needs[f"weights gathered for the layers at work{ROUGH}"] = width * gathered
    needs[f"weights of one message, as they came{ROUGH}"] = width * message
    return needs


def _at_update(size: ModelSize, plan: LearnerPlan) -> Needs:
    """Two values of AdamW for each gradient; at stage 3, part by part, and of each part's gradients a copy in one piece."""
    if plan.stage < 1:
        return {}
    num_bytes = 8 * size.trained / plan.ranks
    if plan.stage == 3:
        num_bytes = 12 * min(size.trained, AT_ONCE * plan.ranks + size.largest) / plan.ranks
    return {f"what AdamW makes of gradients{ROUGH}": num_bytes}


def _engine_needs(size: ModelSize, use: Use, plan: LearnerPlan) -> Memory:
    """Memory of one engine: of vLLM GPU bytes on each of its cards, without keys and values."""
    published, dtype = size.published * WIDTH[plan.dtype], str(use.options.get("dtype", "auto"))
    if use.use.endswith(":TorchEngine"):
        weights = size.computed * WIDTH[str(use.options.get("dtype", "float32"))]
        held = max(2 * published, size.frozen * WIDTH[plan.dtype])  # before its first adapter a copy of the base
        host: Needs = {
            "Python and libraries": PROCESS_BYTES,
            "weights": weights,
            "the served version and the next": held,
        }
        return {"GPU": {}, "host": host}
    split = int(use.options.get("tensor_parallel_size", 1)) * int(use.options.get("pipeline_parallel_size", 1))
    return {
        "GPU": {"weights": size.computed * WIDTH.get(dtype, WIDTH[plan.dtype]) / split},
        "host": {"Python and libraries": PROCESS_BYTES, "the served version and the next, in /dev/shm": 2 * published},
    }


def _version_cost(settings: Settings, size: ModelSize, dtype: str, step_s: float, saved: int) -> Needs:
    num_bytes = size.published * WIDTH[dtype]
    gigabytes, versions = num_bytes / 1e9, 86_400 / (step_s * settings.pacing.steps_per_version)
    # In float32 nearly every value changes in every step, and in an adapter's, so that every version is an anchor.
    always_anchor = dtype == "float32" or size.frozen > 0
    return {
        "versions": versions,
        "publish_s": gigabytes * (PUBLISH_S + (ANCHOR_S if always_anchor else 0.0)),
        "anchor_s": gigabytes * (PUBLISH_S + ANCHOR_S),
        "reload_s": gigabytes * RELOAD_S,
        "anchor_bytes": (versions if always_anchor else versions / NUM_SLICES) * num_bytes,
        "delta_bytes": 0.0 if always_anchor else versions * num_bytes * DELTA_SHARE,
        "checkpoint_bytes": versions / settings.trainer.checkpoint_every * saved * size.trained,
    }


def total(needs: Needs) -> float:
    return sum(needs.values())


def _problems(uses: Mapping[str, Use], machine: Machine, found: ModelPlan) -> Iterator[str]:
    """Lines about needs that do not fit, each with the setting that changes it."""
    plan, gpu, host = found.plan, total(found.learner["GPU"]), total(found.learner["host"])
    if machine.gpu and gpu > machine.gpu:
        yield (
            f"a learner's rank needs {gb(gpu)} of GPU memory, there are {gb(machine.gpu)}: "
            f"{_mended(found.size, plan, machine)}"
        )
    if (on_host := plan.ranks * (host + (0.0 if machine.gpu else gpu))) > machine.host:
        yield (
            f"{plan.ranks} rank(s) on one host need {gb(on_host)} of its memory, there are {gb(machine.host)}: several "
            "hosts with fewer ranks each, or one with more memory"
        )
    for role, needs in found.engines.items():
        yield from _engine_problems(machine, role, needs, uses[role].options)
    if found.shm > machine.shm:
        yield (
            f"the versions that engines hold need {gb(found.shm)} in /dev/shm, which has {gb(machine.shm)} free; they go to "
            "a folder on disk then, which is slower: give the container more (docker --shm-size, or an emptyDir of medium "
            "Memory)"
        )
    every_s = 86_400 / found.version["versions"]
    if (slowest := max(found.version["publish_s"], found.version["reload_s"])) > every_s:
        yield (
            f"a version takes {slowest:,.0f} s to publish or to fetch (computed), and comes every {every_s:,.0f} s: "
            f"pacing.steps_per_version = {math.ceil(slowest / machine.step_s)}"
        )


def _engine_problems(machine: Machine, role: str, needs: Memory, options: Mapping[str, Any]) -> Iterator[str]:
    host, weights = total(needs["host"]), total(needs["GPU"])
    if host > machine.host:
        yield f"an engine of {role} needs {gb(host)} of host memory, there are {gb(machine.host)}: a host with more"
    room = machine.gpu * float(options.get("gpu_memory_utilization", GPU_SHARE))
    if room and weights > MAX_WEIGHTS_SHARE * room:
        parts = _doubled(lambda parts: weights / parts <= MAX_WEIGHTS_SHARE * room)
        parts *= int(options.get("tensor_parallel_size", 1))
        yield (
            f"the weights of {role}'s engine take {gb(weights)} of each GPU; of vLLM's {gb(room)} keys and values need a part: "
            f"{'engine' if role == 'explore' else 'gateway.engine'}.options.tensor_parallel_size = {parts}"
        )


def _mended(size: ModelSize, plan: LearnerPlan, machine: Machine) -> str:
    """Settings with which a rank fits: the fewest that suffice, in this order."""

    def fits(**changes: Any) -> bool:
        return total(learner_needs(size, msgspec.structs.replace(plan, **changes))["GPU"]) <= machine.gpu

    tried: list[str] = []
    for name, change in (
        ('trainer.dtype = "bfloat16"', {"dtype": "bfloat16"}),
        ("trainer.activation_checkpointing = true", {"recomputes": True}),
    ):
        if (changed := msgspec.structs.replace(plan, **change)) != plan:
            tried.append(name)
            plan = changed
            if fits():
                return ", ".join(tried)
    ranks = _doubled(lambda ranks: fits(ranks=ranks, stage=3))
    learner = '"trainer.learners.deepspeed:DeepSpeedLearner"'
    tried.append(f"trainer.learner = {{ use = {learner}, options = {{ stage = 3 }} }}, trainer.ranks = {ranks}")
    if ranks >= MAX_RANKS:
        tried.append("a smaller trainer.max_tokens_per_microbatch")
    return ", ".join(tried)


def _doubled(fits: Callable[[int], bool]) -> int:
    return next((2**power for power in range(MAX_RANKS.bit_length() - 1) if fits(2**power)), MAX_RANKS)


def model_table(settings: Settings, machine: Machine, found: ModelPlan) -> Table:
    size, version = found.size, found.version
    shown = Table(
        title=f"{settings.policy.model}: {size.frozen or size.trained:,} parameters, {size.layers} layers"
        + (f"; an adapter of {size.trained:,} is trained" if size.frozen else ""),
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
    every = f"a version, one each {86_400 / version['versions']:,.0f} s (computed)"
    anchor = f"an anchor {version['anchor_s']:,.1f} s; uploads come on top"
    for what, value, about in (
        ("to publish", f"{version['publish_s']:,.1f} s", anchor),
        ("to reload", f"{version['reload_s']:,.1f} s", "before sampling pauses; a first download comes on top"),
        ("anchors and slices", f"{gb(version['anchor_bytes'])} a day", ""),
        ("deltas", f"{gb(version['delta_bytes'])} a day", "at a learning rate of 1e-6; more at a higher one"),
        (
            "checkpoints",
            f"{gb(version['checkpoint_bytes'])} a day",
            f"{settings.trainer.keep_checkpoints} of them stay",
        ),
        ("kept in the store", gb(found.stored), f"with keep.replay = {settings.keep.replay}"),
    ):
        shown.add_row(every, what, value, about)
        every = ""
    return shown
