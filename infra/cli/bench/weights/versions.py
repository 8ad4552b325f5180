"""A trainer beside an engine: the demo's model learns additions in a process of its own, and leaves each version in a folder.

    python -m infra.cli.bench.weights.versions MODEL FOLDER

Each version is one step of the demo's size and learning rate, after a warm-up as the demo's; the samples are demonstrations, so
that the process needs no engine. At most one version is left that was not taken yet, so that the trainer steps as often as its
versions are loaded.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from infra.policies.policy import Policy
    from infra.policies.tensors import Tensor

WARM_STEPS, WARM_BATCH, WARM_RATE = 150, 64, 5e-4
BATCH, RATE = 512, 2e-4
LOOK_S = 0.02
WAIT_S = 600.0


class Versions:
    """What the trainer leaves in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def next(self, version: int) -> "Policy":
        """A version, once it is there. Blocks."""
        from infra.policies.policy import Policy, Probe

        path = self._folder / f"{version}.json"
        deadline = time.monotonic() + WAIT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the trainer beside left no version {version} within {WAIT_S:g} s")
            time.sleep(LOOK_S)
        probe = msgspec.json.decode(path.read_bytes(), type=Probe)
        path.unlink()
        tensors = self.tensors(version)
        return Policy(version=version, tensors=tensors, touched=frozenset(tensors), probe=probe)

    def tensors(self, version: int) -> "dict[str, Tensor]":
        """Those of a version that was left."""
        from infra.policies.tensors import load_tensors

        return load_tensors((self._folder / f"{version}.safetensors").read_bytes())


@contextmanager
def trainer_beside(model: Path, folder: Path) -> Iterator[Versions]:
    """Versions of a trainer that runs while the `with` lasts."""
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-m", __name__, str(model), str(folder)])
    try:
        yield Versions(folder)
    finally:
        process.kill()
        process.wait()


def main(model: Path, folder: Path) -> None:
    """The process: warm up, then a version a step, until it is killed."""
    import torch

    from infra.cli.bench.learning.adding import MAX_TOKENS, deck, demonstration, opened, policy_of, problems
    from infra.policies.tensors import save_tensors
    from trainer.batch.batch import pack
    from trainer.config import LaneConfig, TrainerConfig

    torch.set_num_threads(1)
    lanes = {"usual": LaneConfig(), "expert": LaneConfig(loss="sft")}
    learner = opened(model, TrainerConfig(lanes=lanes, threads=1, learning_rate=RATE, betas=(0.9, 0.98)))  # type: ignore[arg-type]
    shown, step, version = deck(problems(model, 0).train, 0), 0, 0
    learner.begin_phase("warmup")
    while True:
        warm = step < WARM_STEPS
        items = [demonstration(problem) for problem in shown.deal(WARM_BATCH if warm else BATCH)]
        learner.step(pack(items, max_tokens=MAX_TOKENS), learning_rate=WARM_RATE if warm else RATE, seed=step)
        step += 1
        if warm:
            if step == WARM_STEPS:
                learner.begin_phase("train")
            continue
        while version and (folder / f"{version}.json").exists():
            time.sleep(LOOK_S)
        version += 1
        policy = policy_of(learner, version)
        (folder / f"{version}.safetensors").write_bytes(save_tensors(policy.tensors))
        (folder / "new").write_bytes(msgspec.json.encode(policy.probe))
        (folder / "new").rename(folder / f"{version}.json")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
