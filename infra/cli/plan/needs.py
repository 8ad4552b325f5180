"""Needs of a model and its settings: bytes of a learner's rank and of an engine, seconds and bytes of a version.

P: parameters, N: ranks. A trained parameter has a weight, a float32 gradient, two float32 moments, and in bfloat16 a float32
master. ZeRO (arXiv 1910.02054, figure 1) keeps 1/N of the masters and moments on a rank from stage 1 on, of
the gradients from stage 2 on, of the weights in stage 3. The base of an adapter has weights and nothing else.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from infra.model.size import ModelSize
from infra.policies.chain import NUM_SLICES

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS_AND_WEIGHT = 12  # bytes a parameter in a checkpoint
PROCESS_BYTES = 700_000_000  # of Python with torch and transformers, before any model
AT_ONCE = 20_000_000  # values, of `trainer.learners.engines`
PREFETCHED, KEPT_GATHERED = 50_000_000, 1_000_000_000  # values that ZeRO 3 gathers ahead, and keeps at most
MAX_LOGITS = 2**26  # that a learner holds at once, in float32

# CPU seconds for a GB of published weights, as `make bench NAME=weights` measures them: bfloat16, 1.4 % of the values change,
# on 2.5 GHz virtual CPUs with SHA instructions.
PUBLISH_S = 0.9  # copy, look for NaN, hash, encode, one slice
ANCHOR_S = 0.85  # more, where all is stored
RELOAD_S = 1.1  # fetch a delta, apply, verify, compare, write for the worker: before the pause
DELTA_SHARE = 1 / 120  # of all weights, measured as above


class Row(msgspec.Struct, frozen=True):
    """One need of memory. what: Its purpose. num_bytes: Bytes at most. is_rough: An estimate that kernels and allocators move
    by tens of percent.
    """

    what: str
    num_bytes: float
    is_rough: bool = False


class ProcessMemory(msgspec.Struct, frozen=True):
    """Memory of one process. gpu: On its GPU. host: In its host's memory."""

    gpu: tuple[Row, ...] = ()
    host: tuple[Row, ...] = ()

    @property
    def gpu_bytes(self) -> float:
        return sum(row.num_bytes for row in self.gpu)

    @property
    def host_bytes(self) -> float:
        return sum(row.num_bytes for row in self.host)


def together(needs: ProcessMemory, ranks: int, *, with_gpu: bool) -> float:
    """Host bytes of several ranks on one host. with_gpu: Bytes of GPUs lie there too."""
    return ranks * (needs.host_bytes + (needs.gpu_bytes if with_gpu else 0.0))


class LearnerPlan(msgspec.Struct, frozen=True):
    """The settings that decide a learner's memory.

    ranks: processes. stage: of ZeRO, -1 for the learner of one process. dtype: of the weights. tokens: of a microbatch,
    on one rank. recomputes: activations in the backward. offload: masters and moments lie in the host's memory.
    reference: bytes a parameter of the reference, 0 without one. critic: a second model learns values.
    """

    ranks: int
    stage: int
    dtype: str
    tokens: int
    recomputes: bool
    offload: bool = False
    reference: int = 0
    critic: bool = False


class VersionCost(msgspec.Struct, frozen=True):
    """Computed from the unit costs above; seconds of one thread, bytes of a day.

    publish_s: of a usual version. anchor_s: of one with whole weights. reload_s: in an engine. versions: a day.
    anchor_bytes, delta_bytes, checkpoint_bytes: written to the store.
    """

    publish_s: float
    anchor_s: float
    reload_s: float
    versions: float
    anchor_bytes: float
    delta_bytes: float
    checkpoint_bytes: float


def learner_needs(size: ModelSize, plan: LearnerPlan) -> ProcessMemory:
    """Memory of one rank."""
    state = learner_state(size, plan)
    host = [Row("Python and libraries", PROCESS_BYTES)]
    if plan.offload:
        host += [row for row in state if row.what in ("masters", "moments")] + _at_update(size, plan)
        state = [row for row in state if row.what not in ("masters", "moments")]
    saved = MOMENTS_AND_WEIGHT + (plan.reference and 4)
    host.append(Row("snapshot of a checkpoint", saved * size.trained / plan.ranks))
    host.append(Row("its part of this version and the last", 2 * size.published * WIDTH[plan.dtype] / plan.ranks))
    return ProcessMemory(gpu=(*state, *most_at_once(size, plan)), host=tuple(host))


def learner_state(size: ModelSize, plan: LearnerPlan) -> list[Row]:
    """Rows that a rank holds through a step: weights, gradients, masters, moments, and further models."""
    parameters, width, ranks = size.trained, WIDTH[plan.dtype], plan.ranks
    zero = plan.stage > 0
    rows = [Row("weights", size.computed * width / (ranks if plan.stage == 3 else 1))]
    if width < 4 or zero:
        rows.append(Row("masters", 4 * parameters / (ranks if zero else 1)))
    rows.append(Row("gradients", 4 * parameters / (ranks if plan.stage > 1 else 1)))
    if plan.stage == 3:
        rows.append(Row("gradients that wait for an exchange", 4 * min(parameters, AT_ONCE), is_rough=True))
    rows.append(Row("moments", 8 * parameters / (ranks if zero else 1)))
    if plan.reference:
        rows.append(Row("reference", plan.reference * parameters / (ranks if plan.stage == 3 else 1)))
    if plan.critic:
        alone = msgspec.structs.replace(plan, dtype="float32", reference=0, critic=False)
        rows.append(Row("critic", sum(row.num_bytes for row in learner_state(size, alone) if not row.is_rough)))
    return [row for row in rows if row.num_bytes]


def most_at_once(size: ModelSize, plan: LearnerPlan) -> list[Row]:
    """Rows that come and go in a step, at the moment that needs most of it: the end of a forward, the first exchange of
    gradients in the backward, or the update.
    """
    moments = [_after_forward(size, plan), _at_exchange(size, plan)]
    if not plan.offload:
        moments.append(_at_update(size, plan))
    return [row for row in max(moments, key=lambda rows: sum(row.num_bytes for row in rows)) if row.num_bytes]


def _after_forward(size: ModelSize, plan: LearnerPlan) -> list[Row]:
    """Rows of one microbatch, without attention's own."""
    width = WIDTH[plan.dtype]
    kept = size.layers * size.hidden + size.kept if plan.recomputes else size.layers * size.kept
    logits = min(plan.tokens * size.vocabulary, MAX_LOGITS)
    gradient = (
        size.vocabulary * size.hidden if width < 4 and not size.frozen else 0
    )  # of the output matrix, until a microbatch is done
    rows = [
        Row(f"activations of {plan.tokens:,} tokens", width * plan.tokens * kept, is_rough=True),
        Row("logits in float32", 4 * (gradient + 3 * logits), is_rough=True),
    ]
    if plan.stage < 3:
        return rows
    # ZeRO 3 gathers ahead of each layer until it holds so many, the backward's too: a smaller model is whole by the end of its
    # forward. What came in one message stays as it came until the next message is taken apart.
    gathered = min(size.computed, max(KEPT_GATHERED, size.largest))
    message = min(size.computed, PREFETCHED + size.largest)
    return [
        Row("weights gathered for the layers at work", width * gathered, is_rough=True),
        Row("weights of one message, as they came", width * message, is_rough=True),
        *rows,
    ]


def _at_exchange(size: ModelSize, plan: LearnerPlan) -> list[Row]:
    """The backward is through the layers whose gradients fill a message."""
    if plan.stage < 1:
        return []
    sent = min(size.trained, AT_ONCE)
    left = 1 - sent / size.trained
    before = [msgspec.structs.replace(row, num_bytes=left * row.num_bytes) for row in _after_forward(size, plan)]
    # In one piece, and what is computed of that with the other ranks'.
    return [*before, Row("gradients on their way", 4 * sent * 2, is_rough=True)]


def _at_update(size: ModelSize, plan: LearnerPlan) -> list[Row]:
    """Two values of AdamW for each gradient; at stage 3, part by part, and of each part's gradients a copy in one piece."""
    if plan.stage < 1:
        return []
    num_bytes = 8 * size.trained / plan.ranks
    if plan.stage == 3:
        num_bytes = 12 * min(size.trained, AT_ONCE * plan.ranks + size.largest) / plan.ranks
    return [Row("what AdamW makes of gradients", num_bytes, is_rough=True)]


def torch_engine_needs(size: ModelSize, dtype: str, published: str) -> ProcessMemory:
    """Memory of an engine that runs on the CPU."""
    held = (
        max(2 * size.published, size.frozen) * WIDTH[published]
    )  # before its first adapter it holds a copy of the base
    return ProcessMemory(
        host=(
            Row("Python and libraries", PROCESS_BYTES),
            Row("weights", size.computed * WIDTH[dtype]),
            Row("the served version and the next", held),
        )
    )


def vllm_engine_needs(size: ModelSize, dtype: str, published: str, options: Mapping[str, Any]) -> ProcessMemory:
    """Memory of one engine: GPU bytes on each of its cards, without keys and values; host bytes of its process."""
    split = int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
    version = size.published * WIDTH[published]
    return ProcessMemory(
        gpu=(Row("weights", size.computed * WIDTH[dtype] / split),),
        host=(
            Row("Python and libraries", PROCESS_BYTES),
            Row("the served version and the next, in /dev/shm", 2 * version),
        ),
    )


def version_cost(size: ModelSize, dtype: str, *, every_s: float, checkpoint_every: int, saved: int) -> VersionCost:
    """every_s: seconds from one version to the next. saved: bytes a parameter in a checkpoint."""
    num_bytes = size.published * WIDTH[dtype]
    gigabytes, versions = num_bytes / 1e9, 86_400 / every_s
    # In float32 nearly every value changes in every step, and in an adapter's, so that every version is an anchor.
    always_anchor = dtype == "float32" or size.frozen > 0
    whole = versions if always_anchor else versions / NUM_SLICES
    deltas = 0.0 if always_anchor else versions * num_bytes * DELTA_SHARE
    return VersionCost(
        publish_s=gigabytes * (PUBLISH_S + (ANCHOR_S if always_anchor else 0.0)),
        anchor_s=gigabytes * (PUBLISH_S + ANCHOR_S),
        reload_s=gigabytes * RELOAD_S,
        versions=versions,
        anchor_bytes=whole * num_bytes,
        delta_bytes=deltas,
        checkpoint_bytes=versions / checkpoint_every * saved * size.trained,
    )
