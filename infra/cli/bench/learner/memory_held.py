"""What `infra.cli.bench.learner.memory` measures of a learner's memory: a step, and a step beside what is saved."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.common.peak import held_bytes, peak_bytes

if TYPE_CHECKING:
    from trainer.batch.batch import PackedBatch
    from trainer.config import TrainerConfig
    from trainer.learners.learner import Learner

TOKENS = 512
MODEL, LEAST = "model", "least"  # folders: the model that is measured, and the one that is opened before it


class MemoryPlan(msgspec.Struct, frozen=True):
    """What is measured, on one row of `TOKENS` a rank.

    hidden, layers: of a random Qwen3 (13·hidden² parameters a layer). dtype: of its weights. checkpointing: activations
    are computed again in the backward. ranks: of DeepSpeed, 1 for the learner of one process. stage: of ZeRO.
    """

    hidden: int = 1024
    layers: int = 7
    dtype: str = "bfloat16"
    checkpointing: bool = False
    ranks: int = 1
    stage: int = 3


def build_models(top: Path, plan: MemoryPlan) -> None:
    """The model, and one whose own bytes do not count: a process that has trained it has loaded what it needs of libraries."""
    from infra.cli.demo.char_model import Size, build_char_model

    for name, size in ((MODEL, Size(hidden=plan.hidden, layers=plan.layers)), (LEAST, Size(hidden=128, layers=1))):
        build_char_model(top / name, 1, size=size)


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
    from infra.cli.bench.learning.adding import Problem, demonstration
    from trainer.batch.batch import pack

    every = [tuple(3 + (7 * at + row) % 90 for at in range(TOKENS)) for row in range(count)]
    shown = [demonstration(Problem(f"row-{row}", one[:256], one[256:])) for row, one in enumerate(every)]
    return pack(shown, max_tokens=TOKENS)


def take_step(learner: "Learner", batch: "PackedBatch") -> None:
    """One that must not be refused."""
    if not learner.step(batch, learning_rate=1e-6, seed=0).finite:
        raise RuntimeError("the step was refused")


def held(learner: "Learner", batch: "PackedBatch", before: int, save: Callable[[], object]) -> tuple[int, int]:
    """Bytes above `before` at the peak of a step, and at that of one beside two versions and what `save` gives."""

    def step() -> None:
        take_step(learner, batch)

    for _ in range(2):  # ZeRO 3 gathers weights ahead once it has seen a step
        step()
    opened = held_bytes() - before
    of_step = opened + peak_bytes(step, "cpu")
    beside = (learner.tensors(), learner.tensors(), save())
    of_all = held_bytes() - before + peak_bytes(step, "cpu")
    del beside
    return of_step, of_all
