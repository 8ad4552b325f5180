"""What a learner holds, of one process or rank 0 of several, beside what `headrace check --size` says that it needs.

At the peak of a step, and at that of a step beside a snapshot, this version and the last. Above what the process held before it
opened the model; on a CPU, where all of it is host memory.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.peak import held_bytes, peak_bytes
from infra.cli.needs import PROCESS_BYTES, LearnerPlan, learner_needs
from infra.model.size import model_size

if TYPE_CHECKING:
    from trainer.batch.batch import PackedBatch
    from trainer.config import TrainerConfig
    from trainer.learners.learner import Learner

TOKENS = 512
MB = 1e6


class MemoryPlan(msgspec.Struct, frozen=True):
    """What is measured: a random Qwen3 of 13·hidden² parameters a layer, on one row of `TOKENS` a rank. ranks: of DeepSpeed at
    this stage, 1 for the learner of one process.
    """

    hidden: int = 1024
    layers: int = 7
    dtype: str = "bfloat16"
    checkpointing: bool = False
    ranks: int = 1
    stage: int = 3


def run(plan: MemoryPlan) -> dict[str, float]:
    """Megabytes of one process, rank 0 where there are several, and what was said over what was held."""
    from infra.cli.demo.char_model import Size, build_char_model

    with tempfile.TemporaryDirectory(prefix="headrace-bench-memory-") as name:
        folder = str(build_char_model(Path(name) / "model", 1, size=Size(hidden=plan.hidden, layers=plan.layers)))
        if plan.ranks > 1:
            from infra.cli.bench.memory_ranks import held_by_rank_0

            of_step, of_all = held_by_rank_0(plan, Path(name))
        else:
            of_step, of_all = _held_by_one(plan, folder)
        size = model_size(folder)
    stage = plan.stage if plan.ranks > 1 else -1
    needs = learner_needs(
        size, LearnerPlan(ranks=plan.ranks, stage=stage, dtype=plan.dtype, tokens=TOKENS, recomputes=plan.checkpointing)
    )
    said_of_all = needs.gpu_bytes + needs.host_bytes - PROCESS_BYTES
    return {
        "parameters_m": size.trained / 1e6,
        "step_mb": of_step / MB,
        "step_said_mb": needs.gpu_bytes / MB,
        "step_said_over_held": needs.gpu_bytes / of_step,
        "with_versions_mb": of_all / MB,
        "with_versions_said_mb": said_of_all / MB,
        "with_versions_said_over_held": said_of_all / of_all,
    }


def settings(plan: MemoryPlan) -> "TrainerConfig":
    """Of the learner."""
    from trainer.config import LaneConfig, TrainerConfig

    return TrainerConfig(
        lanes={"expert": LaneConfig(loss="sft")},
        dtype=plan.dtype,  # type: ignore[arg-type]
        activation_checkpointing=plan.checkpointing,
    )


def rows(count: int) -> "PackedBatch":
    """So many rows of `TOKENS`, half of them sampled."""
    from infra.cli.bench.adding import Problem, demonstration
    from trainer.batch.batch import pack

    every = [tuple(3 + (7 * at + row) % 90 for at in range(TOKENS)) for row in range(count)]
    shown = [demonstration(Problem(f"row-{row}", one[:256], one[256:])) for row, one in enumerate(every)]
    return pack(shown, max_tokens=TOKENS)


def held(learner: "Learner", batch: "PackedBatch", before: int, save: Callable[[], object]) -> tuple[int, int]:
    """Bytes above `before` at the peak of a step, and at that of one beside two versions and what `save` gives."""

    def step() -> None:
        if not learner.step(batch, learning_rate=1e-6, seed=0).finite:
            raise RuntimeError("the step was refused")

    step()
    opened = held_bytes() - before
    of_step = opened + peak_bytes(step, "cpu")
    beside = (learner.tensors(), learner.tensors(), save())
    of_all = held_bytes() - before + peak_bytes(step, "cpu")
    del beside
    return of_step, of_all


def _held_by_one(plan: MemoryPlan, folder: str) -> tuple[int, int]:
    from trainer.learners.torch import TorchLearner

    batch, before = rows(1), held_bytes()
    learner = TorchLearner(folder, settings(plan), device="cpu")
    return held(learner, batch, before, learner.save)
