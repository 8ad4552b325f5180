"""An archive of a run for each loss, replayed: this code gives the batches of the archive, and on its CPU the bits.

    python -m tests.test_loss_bits LOSS…     # makes archives anew and prints their rows of the table in `measured/training.md`

To change bits: new archives, their rows in `tests/bench/areas/training.md`, and the hash of their weights in CHANGELOG.md.
"""

import asyncio
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from infra.cli.demo.char_model import Size
from infra.cli.repeat.export import fill
from infra.cli.repeat.source import ReplaySource, unpacked
from infra.ledger.archive import writing
from tests.own_sources import ROOT
from tests.test_settings_to_steps import WEBHOOK, rated, settings, taught
from tests.trainer.memory_run import replaying
from tests.whole_run import BASE, trained, written
from trainer.batch.batch import PackedBatch
from trainer.config import LOSSES
from trainer.journal.origin import differences
from trainer.learners.learner import Learner, StepStats, open_learner
from trainer.replay.replay import find_start, replay

ARCHIVES = ROOT / "tests" / "archives"
MAX_BYTES = 1_500_000
SIZE = Size(hidden=16, layers=1)
STEPS = 4
# A rate at which later steps meet ratios far from 1, so that clips and masks act.
RUN = (
    BASE.replace("learning_rate = 1e-3", "learning_rate = 0.5\ncheckpoint_every = 1")
    .replace("max_steps = 3", f"max_steps = {STEPS}")
    .replace("num_episodes = 2\nmax_tokens = 4", "num_episodes = 4\nmax_tokens = 8")
)
MACHINE = ("torch", "device", "cpu", "cpu_model", "threads")  # other ones give other bits


class HashingLearner:
    """A learner that hashes the inputs of its steps."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self.batches = learner, hashlib.sha256()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def step(self, batch: PackedBatch, **numbers: Any) -> StepStats:
        for rows in batch.microbatches:
            for name, values in msgspec.structs.asdict(rows).items():
                if values.size:
                    self.batches.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
        self.batches.update(repr([batch.lane_tokens, batch.lane_sequences, batch.version, numbers["seed"]]).encode())
        self.batches.update(np.float64(numbers["learning_rate"]).tobytes())
        return self._learner.step(batch, **numbers)


class Replayed(NamedTuple):
    """Hash of the batches of an archive by this code, and of the weights after each step: as recorded, and by this code. other:
    what differs here of the machine.
    """

    batches: str
    recorded: list[str]
    weights: list[str]
    other: dict[str, tuple[str, str]]


async def replayed(loss: str, folder: Path) -> Replayed:
    source = unpacked(ARCHIVES / f"{loss}.headrace", folder)
    start = await find_start(source.log, source.store, source.run, from_step=-1, to_step=None)
    learner = HashingLearner(open_learner(source.settings.trainer, source.model))
    run = replaying(learner, source.settings.trainer, source.settings)
    found = [checkpoint async for checkpoint in replay(run, source.run, source.log, source.store, start)]
    run.executor.shutdown()
    differ = differences(start.manifest.made_with, learner.numerics())
    return Replayed(
        learner.batches.hexdigest()[:8],
        [each.expected[0].removeprefix("chunks ")[:8] for each in found[1:]],
        [each.got.removeprefix("chunks ")[:8] for each in found[1:]],
        {name: both for name, both in differ.items() if name in MACHINE},
    )


def rows() -> dict[str, list[str]]:
    """Rows of the table of losses: batches, weights and commit are its last cells."""
    lines = (ROOT / "tests/bench/areas/training.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0]: row for row in cells if row[0] in LOSSES}


@pytest.fixture(scope="module", params=LOSSES)
def again(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Replayed]:
    return request.param, asyncio.run(replayed(request.param, tmp_path_factory.mktemp(request.param)))


def test_the_archive_of_a_loss_gives_its_batches_on_any_machine(again: tuple[str, Replayed]) -> None:
    loss, found = again
    assert len(found.weights) == STEPS
    assert found.batches == rows()[loss][-3], f"other batches: declare them, see {__name__}"


def test_the_archive_of_a_loss_gives_its_bits_on_its_cpu(again: tuple[str, Replayed]) -> None:
    loss, found = again
    if found.other:
        pytest.skip(f"batches alone are promised: {found.other}")
    assert found.weights == found.recorded, f"other bits: declare them, see {__name__}"
    assert found.weights[-1] == rows()[loss][-2]


def test_the_bits_of_every_loss_are_recorded_and_declared() -> None:
    paths = list(ARCHIVES.iterdir())
    assert {path.name for path in paths} == {f"{loss}.headrace" for loss in LOSSES} and {*rows()} == {*LOSSES}
    assert sum(path.stat().st_size for path in paths) <= MAX_BYTES
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert [loss for loss, row in rows().items() if f"`{loss}` {row[-2]}" not in changelog] == []
    tests = (ROOT / "tests/trainer/test_losses.py").read_text()
    assert [row[2] for row in rows().values() if f"def {row[2]}(" not in tests] == []


async def make(loss: str, folder: Path) -> None:
    """Run a loss from its settings to its last step, and export that."""
    if loss == "distill":
        async with taught(folder, RUN, SIZE) as found:
            log, store, _ = await trained(found)
    elif loss == "topr":
        found = written(folder, WEBHOOK, RUN, SIZE)
        log, store, _ = await rated(found, folder)
    else:
        found = written(folder, settings(loss), RUN, SIZE)
        log, store, _ = await trained(found)
    source = ReplaySource(found, log, store, found.model_path)
    start = await find_start(log, store, source.run, from_step=-1, to_step=None)
    path = ARCHIVES / f"{loss}.headrace"
    path.unlink(missing_ok=True)
    with writing(path) as archive:
        archive.finish(await fill(archive, source, start))


def main(losses: list[str]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    for loss in losses or LOSSES:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(make(loss, Path(name)))
        with tempfile.TemporaryDirectory() as name:
            found = asyncio.run(replayed(loss, Path(name)))
        assert found.weights == found.recorded, f"{loss}: {found}"
        print(f"{loss} | {found.batches} | {found.weights[-1]} | {commit} |")


if __name__ == "__main__":
    main(sys.argv[1:])
