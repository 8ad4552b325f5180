"""Memory, time and disk that the settings need for their model, from config.json alone, and what does not fit.

Bytes of weights, gradients and optimizer are exact; seconds are computed from measured unit costs; activations are rough.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from infra.cli.plan.needs import (
    MOMENTS_AND_WEIGHT,
    WIDTH,
    LearnerPlan,
    ProcessMemory,
    VersionCost,
    learner_needs,
    together,
    torch_engine_needs,
    version_cost,
    vllm_engine_needs,
)
from infra.cli.plan.rates import gb
from infra.cli.settings import Settings
from infra.model.adapter import named_adapter
from infra.model.model import gpu_bytes
from infra.model.size import ModelSize, model_size
from infra.policies.adapter import Adapter
from infra.settings.config import Use, duration_s
from schemas.errors import ConfigError

GPU_SHARE = 0.9  # of a card that vLLM takes, unless its option says otherwise
MOST_WEIGHTS = 0.8  # of what vLLM has: the rest is for keys and values
MOST_RANKS = 1024


class Machine(msgspec.Struct, frozen=True):
    """Memory in bytes. gpu: Memory of one GPU, 0 for none. host: Memory of one host. shm: Free in /dev/shm. step_s: Seconds
    from one optimizer step to the next.
    """

    gpu: float
    host: float
    shm: float
    step_s: float


class SizeEstimate(msgspec.Struct, frozen=True):
    """Needs of the settings.

    size: Size of the model. plan: Settings of the learner. learner: Memory of one rank. engines: Memory by the role that runs
    one. shm: Bytes in /dev/shm, of the served version and the next of each role. version: Cost of each version. stored: Bytes
    that the store holds in the long run. problems: Everything that does not fit, with the setting that mends it.
    """

    size: ModelSize
    plan: LearnerPlan
    learner: ProcessMemory
    engines: dict[str, ProcessMemory]
    shm: float
    version: VersionCost
    stored: float
    problems: tuple[str, ...]


def this_machine(gpu_gb: float | None, host_gb: float | None, shm_gb: float | None, step_s: float) -> Machine:
    """The options, and for those left out this machine; a GPU of 80 GB where it has none."""
    gpu = gpu_bytes() or 80e9
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    shm = shared.f_bavail * shared.f_frsize if shared else 0
    return Machine(
        gpu=gpu if gpu_gb is None else gpu_gb * 1e9,
        host=host if host_gb is None else host_gb * 1e9,
        shm=shm if shm_gb is None else shm_gb * 1e9,
        step_s=step_s,
    )


def estimate(settings: Settings, machine: Machine) -> SizeEstimate:
    """Compute the needs of the settings on such machines. Raises ConfigError."""
    if not settings.policy.model:
        raise ConfigError("policy.model: missing, expected the folder or name of a model")
    size, plan = model_size(settings.model_path, configured_adapter(settings)), learner_plan(settings)
    learner = learner_needs(size, plan)
    uses = engines_by_role(settings)
    engines = {
        role: vllm_engine_needs(size, engine_dtype(use.options, plan), plan.dtype, use.options)
        if use.use.endswith(":VllmEngine")
        else torch_engine_needs(size, str(use.options.get("dtype", "float32")), plan.dtype)
        for role, use in uses.items()
        if use.use.endswith((":VllmEngine", ":TorchEngine"))
    }
    on_shm = sum(use.use.endswith(":VllmEngine") for use in uses.values())
    saved = MOMENTS_AND_WEIGHT + (4 if plan.reference else 0) + (MOMENTS_AND_WEIGHT if plan.critic else 0)
    version = version_cost(
        size, plan.dtype, every_s=machine.step_s * settings.pacing.steps_per_version,
        checkpoint_every=settings.trainer.checkpoint_every, saved=saved,
    )  # fmt: skip
    days = duration_s(settings.keep.replay) / 86_400
    stored = days * (version.anchor_bytes + version.delta_bytes)
    stored += settings.trainer.keep_checkpoints * saved * size.trained
    found = SizeEstimate(
        size=size, plan=plan, learner=learner, engines=engines, version=version, stored=stored, problems=(),
        shm=on_shm * 2 * size.published * WIDTH[plan.dtype],
    )  # fmt: skip
    return msgspec.structs.replace(found, problems=tuple(problems(settings, machine, found)))


def configured_adapter(settings: Settings) -> Adapter | None:
    """The adapter of [trainer.lora], None without. Raises ConfigError."""
    lora = settings.trainer.lora
    if lora is None:
        return None
    return named_adapter(settings.model_path, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def engines_by_role(settings: Settings) -> dict[str, Use]:
    """The engines that the settings name, by the role that runs one."""
    gateway = settings.gateway.engine if settings.gateway is not None else None
    return {"explore": settings.engine} | ({"serve": gateway} if gateway is not None else {})


def learner_plan(settings: Settings) -> LearnerPlan:
    """The learner's part of the settings. Raises ConfigError for a learner whose needs are unknown."""
    from trainer.learners.lanes import reference_dtype
    from trainer.losses.loss import open_objectives

    config = settings.trainer
    kind = config.learner.use.rpartition(":")[2]
    if kind not in ("TorchLearner", "DeepSpeedLearner"):
        raise ConfigError(
            f"trainer.learner: got {config.learner.use}, expected TorchLearner or DeepSpeedLearner to compute its memory"
        )
    compares = any(loss.reference for loss in open_objectives(config.lanes).values())
    return LearnerPlan(
        ranks=config.ranks,
        stage=int(config.learner.options.get("stage", 2)) if kind == "DeepSpeedLearner" else -1,
        dtype=config.dtype,
        tokens=-(-config.max_tokens_per_microbatch // int(config.learner.options.get("sequence_parallel", 1))),
        recomputes=config.activation_checkpointing,
        offload=bool(config.learner.options.get("offload", False)),
        reference=WIDTH[reference_dtype(config)] if compares else 0,
        critic=config.critic is not None,
    )


def engine_dtype(options: dict[str, Any], plan: LearnerPlan) -> str:
    """Dtype of vLLM's weights."""
    option = str(options.get("dtype", "auto"))
    return option if option in WIDTH else plan.dtype


def problems(settings: Settings, machine: Machine, found: SizeEstimate) -> Iterator[str]:
    """Everything that will not fit, each with the setting that mends it."""
    yield from _learner_problems(machine, found)
    for role, needs in found.engines.items():
        yield from _engine_problems(machine, role, needs, engines_by_role(settings)[role].options)
    version = found.version
    if found.shm > machine.shm:
        yield (
            f"the versions that engines hold need {gb(found.shm)} in /dev/shm, which has {gb(machine.shm)} free; they go to "
            "a folder on disk then, which is slower: give the container more (docker --shm-size, or an emptyDir of medium "
            "Memory)"
        )
    every_s = 86_400 / version.versions
    slowest = max(version.publish_s, version.reload_s)
    if slowest > every_s:
        yield (
            f"a version takes {slowest:,.0f} s to publish or to fetch (computed), and comes every {every_s:,.0f} s: "
            f"pacing.steps_per_version = {math.ceil(slowest / machine.step_s)}"
        )


def _learner_problems(machine: Machine, found: SizeEstimate) -> Iterator[str]:
    plan, needs = found.plan, found.learner
    if machine.gpu and needs.gpu_bytes > machine.gpu:
        yield (
            f"a learner's rank needs {gb(needs.gpu_bytes)} of GPU memory, there are {gb(machine.gpu)}: "
            f"{mended(found.size, plan, machine)}"
        )
    on_host = together(needs, plan.ranks, with_gpu=not machine.gpu)
    if on_host > machine.host:
        yield (
            f"{plan.ranks} rank(s) on one host need {gb(on_host)} of its memory, there are {gb(machine.host)}: several "
            "hosts with fewer ranks each, or one with more memory"
        )


def _engine_problems(machine: Machine, role: str, needs: ProcessMemory, options: Mapping[str, Any]) -> Iterator[str]:
    if needs.host_bytes > machine.host:
        yield (
            f"an engine of {role} needs {gb(needs.host_bytes)} of host memory, there are {gb(machine.host)}: a host with more"
        )
    room = machine.gpu * float(options.get("gpu_memory_utilization", GPU_SHARE))
    if room and needs.gpu_bytes > MOST_WEIGHTS * room:
        more = _doubled(lambda parts: needs.gpu_bytes / parts <= MOST_WEIGHTS * room)
        table = "engine" if role == "explore" else "gateway.engine"
        parts = more * int(options.get("tensor_parallel_size", 1))
        yield (
            f"the weights of {role}'s engine take {gb(needs.gpu_bytes)} of each GPU; of vLLM's {gb(room)} keys and "
            f"values need a part: {table}.options.tensor_parallel_size = {parts}"
        )


def mended(size: ModelSize, plan: LearnerPlan, machine: Machine) -> str:
    """Settings with which a rank fits: the fewest that suffice, in this order."""
    tried: list[str] = []
    for name, change in (
        ('trainer.dtype = "bfloat16"', {"dtype": "bfloat16"}),
        ("trainer.activation_checkpointing = true", {"recomputes": True}),
    ):
        changed = msgspec.structs.replace(plan, **change)
        if changed != plan:
            tried.append(name)
            plan = changed
            if learner_needs(size, plan).gpu_bytes <= machine.gpu:
                return ", ".join(tried)

    def fits(ranks: int) -> bool:
        return learner_needs(size, msgspec.structs.replace(plan, ranks=ranks, stage=3)).gpu_bytes <= machine.gpu

    ranks = _doubled(fits)
    learner = '"trainer.learners.deepspeed:DeepSpeedLearner"'
    tried.append(f"trainer.learner = {{ use = {learner}, options = {{ stage = 3 }} }}, trainer.ranks = {ranks}")
    if ranks >= MOST_RANKS:
        tried.append("a smaller trainer.max_tokens_per_microbatch")
    return ", ".join(tried)


def _doubled(fits: Callable[[int], bool]) -> int:
    number = 1
    while number < MOST_RANKS and not fits(number):
        number *= 2
    return number


def model_tables(settings: Settings, machine: Machine, found: SizeEstimate) -> Iterator[Table]:
    """Tables for a person."""
    size, version = found.size, found.version
    table = Table(
        title=f"{settings.policy.model}: {size.frozen or size.trained:,} parameters, {size.layers} layers"
        + (f"; an adapter of {size.trained:,} is trained" if size.frozen else ""),
        show_header=False,
    )
    rows = {
        f"learner, each of {found.plan.ranks} rank(s)": found.learner,
        **{f"engine of {k}": v for k, v in found.engines.items()},
    }
    for role, needs in rows.items():
        for place, parts, total in (("GPU", needs.gpu, needs.gpu_bytes), ("host", needs.host, needs.host_bytes)):
            if not parts:
                continue
            table.add_row(role, place, gb(total), "in all", style="bold")
            for row in parts:
                table.add_row("", "", gb(row.num_bytes), row.what + (" (rough)" if row.is_rough else ""))
    for role, needs in found.engines.items():
        if needs.gpu and machine.gpu:
            left = GPU_SHARE * machine.gpu - needs.gpu_bytes
            tokens = max(0.0, left / (size.kv * 2))
            table.add_row(
                f"engine of {role}", "GPU", gb(max(0.0, left)), f"left for keys and values: {tokens:,.0f} tokens"
            )
    table.add_row(
        "/dev/shm", "host", gb(found.shm), "the served version and the next of each role, shared by its engines"
    )
    yield table
    times = Table(title=f"a version, one each {86_400 / version.versions:,.0f} s (computed)", show_header=False)
    times.add_row(
        "to publish", f"{version.publish_s:,.1f} s", f"an anchor {version.anchor_s:,.1f} s; uploads come on top"
    )
    times.add_row("to reload", f"{version.reload_s:,.1f} s", "before sampling pauses; a first download comes on top")
    times.add_row("anchors and slices", f"{gb(version.anchor_bytes)} a day", "")
    times.add_row("deltas", f"{gb(version.delta_bytes)} a day", "at a learning rate of 1e-6; more at a higher one")
    times.add_row(
        "checkpoints", f"{gb(version.checkpoint_bytes)} a day", f"{settings.trainer.keep_checkpoints} of them stay"
    )
    times.add_row("kept in the store", gb(found.stored), f"with keep.replay = {settings.keep.replay}")
    yield times
