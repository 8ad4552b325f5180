"""What a learner of one process holds, beside what `headrace check --size` says that it needs.

At the peak of a step, and at that of a step beside a snapshot, this version and the last. Above what the process held before it
opened the model; on a CPU, where all of it is host memory.
"""

import tempfile
from pathlib import Path

import msgspec

from infra.cli.bench.peak import held_bytes, peak_bytes
from infra.cli.needs import PROCESS_BYTES, LearnerPlan, learner_needs
from infra.model.size import model_size

TOKENS = 512
MB = 1e6


class MemoryPlan(msgspec.Struct, frozen=True):
    """What is measured: a random Qwen3 of 13·hidden² parameters a layer, on one row of `TOKENS`."""

    hidden: int = 1024
    layers: int = 7
    dtype: str = "bfloat16"
    checkpointing: bool = False


def run(plan: MemoryPlan) -> dict[str, float]:
    """Megabytes, and what was said over what was held."""
    from infra.cli.bench.adding import Problem, demonstration
    from infra.cli.demo.char_model import Size, build_char_model
    from trainer.batch.batch import pack
    from trainer.config import LaneConfig, TrainerConfig
    from trainer.learners.torch import TorchLearner

    config = TrainerConfig(
        lanes={"expert": LaneConfig(loss="sft")},
        dtype=plan.dtype,  # type: ignore[arg-type]
        activation_checkpointing=plan.checkpointing,
    )
    tokens = tuple(3 + 7 * at % 90 for at in range(TOKENS))
    batch = pack([demonstration(Problem("a", tokens[:256], tokens[256:]))], max_tokens=TOKENS)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-memory-") as name:
        folder = str(build_char_model(Path(name) / "model", 1, size=Size(hidden=plan.hidden, layers=plan.layers)))
        size = model_size(folder)
        before = held_bytes()
        learner = TorchLearner(folder, config, device="cpu")

        def step() -> None:
            if not learner.step(batch, learning_rate=1e-6, seed=0).finite:
                raise RuntimeError("the step was refused")

        step()
        opened = held_bytes() - before
        of_step = opened + peak_bytes(step, "cpu")
        beside = (learner.tensors(), learner.tensors(), learner.save())
        of_all = held_bytes() - before + peak_bytes(step, "cpu")
        del beside
    needs = learner_needs(
        size, LearnerPlan(ranks=1, stage=-1, dtype=plan.dtype, tokens=TOKENS, recomputes=plan.checkpointing)
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
