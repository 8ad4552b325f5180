"""The ranks of `infra.cli.bench.learner.memory`: each a process of this machine with gloo between them; rank 0 measures itself.

The others hold what it does, but for the versions.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from infra.cli.bench.learner.memory_held import LEAST, MODEL, MemoryPlan, held, rows, settings
from infra.local.ranks import RankGroup, run_ranks

FOLDER = "checkpoints/bench/000000000001-0"


def held_by_rank_0(plan: MemoryPlan, top: Path) -> tuple[int, int]:
    """See `held`. top: a folder with the models. Raises RuntimeError with a rank's last words."""
    (top / "plan.json").write_bytes(msgspec.json.encode(plan))
    least, found = _held(plan, top, LEAST), _held(plan, top, MODEL)
    return found[0] - least[0], found[1] - least[1]


def _held(plan: MemoryPlan, top: Path, model: str) -> tuple[int, int]:
    """By ranks of their own, which open one model."""
    group = RankGroup(
        argv=(sys.executable, "-m", "infra.cli.bench.learner.memory_ranks", str(top), model),
        num_ranks=plan.ranks,
        log=top,
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        max_failures=0,
    )
    if code := asyncio.run(run_ranks(group, asyncio.Event())):
        words = (top / "train-rank-0.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"ranks ended with {code}:\n{words}")
    return msgspec.json.decode((top / "held.json").read_bytes(), type=tuple[int, int])


def main(top: Path, model: str) -> None:
    """One rank."""
    from infra.store.directory import DirectoryStore
    from trainer.learners.deepspeed import DeepSpeedLearner

    plan = msgspec.json.decode((top / "plan.json").read_bytes(), type=MemoryPlan)
    store, batch = DirectoryStore(top / "store"), rows(plan.ranks)
    learner = DeepSpeedLearner(str(top / model), settings(plan), stage=plan.stage)
    if learner.rank:
        learner.follow(store)
        return
    taken = []

    def save() -> object:
        taken.append(learner.snapshot(store, f"{FOLDER}-{model}"))
        return taken

    found = held(learner, batch, 0, save)
    taken[0].write()  # which the others are waiting for
    (top / "held.json").write_bytes(msgspec.json.encode(found))
    learner.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
