"""What one trainer process holds between steps; everything durable of it is in `position` and the checkpoint."""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import msgspec

from infra.bus.log import Log
from infra.config import Floor
from infra.store import Store
from schemas import Batch
from trainer.checkpoint import Position
from trainer.config import TrainerConfig
from trainer.guard import GuardState
from trainer.intake import Intake
from trainer.journal import Lease
from trainer.learner import Learner
from trainer.publication import Publisher
from trainer.report import Report

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass
class Run:
    """One trainer. position changes only after what it says is confirmed. kept_steps: checkpoints that remain."""

    floor: Floor
    config: TrainerConfig
    log: Log
    store: Store
    learner: Learner
    lease: Lease
    publisher: Publisher
    intake: Intake
    report: Report
    position: Position
    seed: int
    guard: GuardState = field(default_factory=GuardState)
    given_up: dict[int, float] = field(default_factory=dict)
    probe_sequences: tuple[tuple[int, ...], ...] = ()
    # One thread for the learner: its CPU kernels keep their thread settings, and the event loop keeps reading.
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="learner"))

    @property
    def name(self) -> str:
        """The run's name: one lineage of policies."""
        return self.lease.run

    def advance(self, **changes: object) -> None:
        """Move the position."""
        self.position = msgspec.structs.replace(self.position, **changes)

    async def in_thread(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a blocking call of the learner or the store without stopping the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: function(*args, **kwargs))

    def is_published(self, batch: Batch) -> bool:
        """Whether the weights this batch meets are exactly those of its version, so that a mismatch is the engine's."""
        done = batch.step - self.position.first_train_step
        return batch.phase == "train" and done % self.floor.pacing.steps_per_version == 0

    def publication_due(self) -> bool:
        """True when the steps since the warm-up make a whole number of versions."""
        done = self.position.step + 1 - self.position.first_train_step
        return done > 0 and done % self.floor.pacing.steps_per_version == 0

    def checkpoint_due(self) -> bool:
        """True when a publication is due that takes a checkpoint with it."""
        done = self.position.step + 1 - self.position.first_train_step
        return (
            self.publication_due() and done % (self.floor.pacing.steps_per_version * self.config.checkpoint_every) == 0
        )


def config_hash(config: TrainerConfig, floor: Floor) -> str:
    """Of the settings that shape a step, so that the journal shows where they changed."""
    shaping = {"trainer": msgspec.to_builtins(config), "pacing": msgspec.to_builtins(floor.pacing)}
    return hashlib.sha256(msgspec.json.encode(shaping, order="deterministic")).hexdigest()[:16]
