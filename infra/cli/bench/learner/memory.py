"""What a learner holds, of one process or rank 0 of several, beside what `headrace check --size` says that it needs.

At the peak of a step, and at that of a step beside a snapshot, this version and the last. Above what the process holds once it
has trained a tiny model, which loads the libraries that a learner needs; on a CPU, where all of it is host memory.
"""

import tempfile
from pathlib import Path

from infra.cli.bench.common.peak import held_bytes
from infra.cli.bench.learner.memory_held import (
    LEAST,
    MODEL,
    TOKENS,
    MemoryPlan,
    build_models,
    held,
    rows,
    settings,
    take_step,
)
from infra.cli.bench.learner.memory_ranks import held_by_rank_0
from infra.cli.check.needs import PROCESS_BYTES, LearnerPlan, learner_needs
from infra.model.size import model_size

MB = 1e6


def run(plan: MemoryPlan) -> dict[str, float]:
    """Megabytes of one process, rank 0 where there are several, and what was said over what was held."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-memory-") as name:
        top = Path(name)
        build_models(top, plan)
        of_step, of_all = held_by_rank_0(plan, top) if plan.ranks > 1 else _held_by_one(plan, top)
        size = model_size(top / MODEL)
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


def _held_by_one(plan: MemoryPlan, top: Path) -> tuple[int, int]:
    from trainer.learners.torch import TorchLearner

    batch = rows(1)
    take_step(TorchLearner(str(top / LEAST), settings(plan), device="cpu"), batch)
    before = held_bytes()
    learner = TorchLearner(str(top / MODEL), settings(plan), device="cpu")
    return held(learner, batch, before, learner.save)
