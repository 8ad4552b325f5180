"""The state of one trainer process between steps; everything durable of it is in `position` and the checkpoint."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import msgspec

from infra.chain.chain import Step
from infra.log.log import Log
from infra.policies.policy import Probe
from infra.settings.config import Floor
from infra.store.store import Store
from schemas.journal import Entry
from trainer.batch.image_inputs import ImageInputs
from trainer.config import TrainerConfig
from trainer.journal.checkpoint import Position
from trainer.journal.journal import Lease, append
from trainer.learners.learner import Learner
from trainer.loop.publication import WeightPublisher
from trainer.loop.report import Stopwatch, TrainerReport
from trainer.loop.supply import Supply

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(kw_only=True)
class Learning:
    """A learner and its position: all that executing a journaled step takes, and nothing that could write.

    floor: settings of every role. config: the trainer's. learner: holds the model. report: counters of this process.
    position: after the step executed last. image_inputs: reads the pictures for a model that takes any, None for text
    alone. probe_sequences: token ids whose logprobs are compared between versions. executor: one thread for the learner, so
    that its CPU kernels keep their thread settings and the event loop keeps reading.
    """

    floor: Floor
    config: TrainerConfig
    learner: Learner
    report: TrainerReport
    position: Position
    image_inputs: ImageInputs | None = None
    probe_sequences: tuple[tuple[int, ...], ...] = ()
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="learner"))

    def advance(self, **changes: object) -> None:
        self.position = msgspec.structs.replace(self.position, **changes)

    async def in_thread(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a blocking call of the learner or the store without stopping the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: function(*args, **kwargs))

    async def begin_training(self) -> None:
        """The end of the warm-up: a fresh optimizer, and every lane under its own objective."""
        await self.in_thread(self.learner.begin_phase, "train")
        self.advance(warmed_up=True, first_train_step=self.position.step + 1)


class Unread(msgspec.Struct, frozen=True):
    """The place in the journal from which steps are still to be executed again.

    journal_next: offset of the first such record. journal_token: the highest fence before it.
    """

    journal_next: int
    journal_token: int


@dataclass(kw_only=True)
class Saving:
    """Progress of checkpoints.

    saved_step: of the newest own one, -2 before the first. trimmed: offset of `buffer` below which this process has removed
    everything. journal_begin: the same of `batches`. unread: while journaled steps are executed again, where a checkpoint of
    that time sends a restart back to; `position.journal_next` is past these steps already, since new records are appended
    there. tasks: group whose tasks store checkpoints and versions during the next steps; without it steps wait. running: the
    store in progress. executor: one thread for the store. stop: of the trainer.
    """

    saved_step: int = -2
    trimmed: int = 0
    journal_begin: int = 0
    unread: Unread | None = None
    tasks: asyncio.TaskGroup | None = None
    running: asyncio.Task[None] | None = None
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.running is not None and not self.running.done()

    async def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run `work`, which stores a checkpoint or a version, during the next steps; without a task group, await it."""
        await self.finished()
        if self.tasks is None:
            await work
        else:
            self.running = self.tasks.create_task(work)

    async def finished(self) -> None:
        """Wait for the checkpoint and the version that are being stored; a failure ends the task group."""
        if self.running is not None:
            await asyncio.wait([self.running])

    async def in_thread(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a blocking call of the store in a thread, while the learner works."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: function(*args, **kwargs))


@dataclass(kw_only=True)
class Run(Learning):
    """One trainer. Its position changes only after the facts in it are confirmed.

    log: of the app. store: of checkpoints and versions. lease: the right to write the journal. publisher: of versions. supply:
    groups that wait to be trained. saving: how far checkpoints are. chain: processors of a drawn batch. published_probe: of
    the version this process published last.
    """

    log: Log
    store: Store
    lease: Lease
    publisher: WeightPublisher
    supply: Supply
    saving: Saving = field(default_factory=Saving)
    chain: tuple[Step, ...] = ()
    published_probe: Probe | None = None

    @property
    def name(self) -> str:
        return self.lease.run

    async def begin_training(self) -> None:
        await super().begin_training()
        self.supply.intake.buffer.end_validation()

    def settle(self, sequences: list[int]) -> None:
        """Groups of these issue numbers are being trained: the trainer no longer waits for groups issued before them."""
        self.supply.intake.settle(sequences)
        self.advance(settled=max([self.position.settled, *(number + 1 for number in sequences)]))

    async def journal(self, record: Entry) -> int:
        """Write one record to the journal; returns its log-append time. Raises FencedOut where it does not count."""
        with Stopwatch(self.report, "journal_seconds"):
            at = await append(self.log, self.lease, record, expected=self.position.journal_next)
        self.advance(journal_next=at.offset + 1)
        return at.timestamp_ms

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
