"""A light load of the code that a run consists of: what goes in, what is judged, what is trained, and who watches.

    producer ──┐
               ├─> experiences ─> verify, collect (a worker process) ─> buffer ─> trainer, journal
    outbox ────┘        └─> a reader that commits as it goes

The trainer is the real one with a learner that holds eight numbers. What the writers were told is stored is what must not be
lost; a reader of the log that shares no code with the audit says what became of it.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np

from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.spool import Spool
from infra.ledger.account import audit
from infra.log.bus import CommitRefused
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.config import Floor, Kafka, Pacing
from infra.store.directory import DirectoryStore
from schemas import Block, Message, Span, make_experience
from schemas.errors import BrokerUnavailable
from schemas.ids import experience_id
from schemas.topics import EXPERIENCES
from tests.actors.rig import until
from tests.e2e.crash_ledger import Fates
from tests.role import role_of
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

REPOSITORY = Path(__file__).parents[2]
GROUP_SIZE = 2
GROUPS_PER_STEP = 4
DEADLINE_S = 60.0  # how long a role waits for a broker
DRAIN_S = 180.0
PACING = Pacing(groups_per_step=GROUPS_PER_STEP, max_staleness=10_000, straggler_s=1.0)
CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=50, tensorboard="")


def group_of(sequence: int) -> Block:
    """Two answers to one task, one of them right."""
    name = f"t{sequence}.0"
    asked = Message(role="user", content=f"{sequence}+0=")
    return Block(
        tuple(
            make_experience(
                id=experience_id(name, 0, episode),
                group=name,
                episode=episode,
                group_size=GROUP_SIZE,
                sequence=sequence,
                tokens=np.arange(5) + episode + sequence % 50,
                logprobs=np.full(3, -0.25, dtype=np.float32),
                spans=(Span(start=2, stop=5, version=0),),
                messages=(asked, Message(role="assistant", content=str(sequence) if episode else "?")),
                answer=str(sequence),
            )
            for episode in range(GROUP_SIZE)
        )
    )


class BrokerLoad:
    """What the writers were told, and what the reader saw; `drained` and `judged` come after the last shot."""

    def __init__(self, log: Log, bootstrap: str, folder: Path, groups_per_s: float) -> None:
        self.acknowledged: set[str] = set()
        self.seen: set[str] = set()
        self.shed = 0
        self.unavailable = 0  # sends of the producer that no broker took within the deadline
        self._log, self._bootstrap, self._folder = log, bootstrap, folder
        self._pause_s = 1.0 / groups_per_s
        self._sequence = 0
        self._writing = True
        assert log.store is not None
        self._outbox = Outbox(
            log, Spool(folder / "spool", max_bytes=10**8), Metrics("serve"), held=HeldKeys(log.store, folder / "keys"),
            queue_records=10_000, queue_bytes=10**8, send_s=5.0,
        )  # fmt: skip
        self.stop_trainer = asyncio.Event()

    def tasks(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Everything that runs beside the shots. The first are the writers, which end after `finish`."""
        writers = [group.create_task(self._produce()), group.create_task(self._offer())]
        group.create_task(self._train())
        return [
            *writers,
            *(group.create_task(item) for item in (self._outbox.write(), self._outbox.drain(), self._watch())),
        ]

    def finish(self) -> None:
        """Write no more, once the last step is full."""
        self._writing = False

    async def drained(self) -> None:
        """Until everything that was acknowledged is trained or dropped. Raises TimeoutError."""
        async with asyncio.timeout(DRAIN_S):
            await until(lambda: not self._outbox.num_waiting, seconds=DRAIN_S)
            while True:
                fates = await Fates.read(self._log, PACING.max_staleness)
                trained = {name for name, _, _ in fates.trained}
                if self.acknowledged <= trained | fates.dropped.keys() and self.acknowledged <= self.seen:
                    return
                await asyncio.sleep(2.0)

    async def judged(self) -> dict[str, object]:
        """By the audit, and by rules of our own."""
        account = await audit(self._log, self._log.app)
        fates = await Fates.read(self._log, PACING.max_staleness)
        return {
            "acknowledged": len(self.acknowledged),
            "lost": len(fates.lost(self.acknowledged, set(account.pending_ids))),
            "trained_twice": len(fates.trained_twice()),
            "not_read": len(self.acknowledged - self.seen),
            "pending": account.pending,
            "shed": self.shed,
            "unavailable": self.unavailable,
            "trained": account.trained,
            "steps": fates.steps,
            "audit_clean": account.is_clean,
        }

    def _next(self) -> Block | None:
        """None once nothing more is to be written and the last step is full."""
        if not self._writing and self._sequence % GROUPS_PER_STEP == 0:
            return None
        self._sequence += 1
        return group_of(self._sequence - 1)

    async def _produce(self) -> None:
        """As an explorer: one group after the other, each confirmed before it counts."""
        while (block := self._next()) is not None:
            while True:
                try:
                    await self._log.publish(EXPERIENCES, block)
                    break
                except BrokerUnavailable:
                    self.unavailable += 1
            self.acknowledged |= {experience.id for experience in block.experiences}
            await asyncio.sleep(self._pause_s)

    async def _offer(self) -> None:
        """As a gateway: offered and forgotten, counted once it is kept."""
        waiting: set[asyncio.Task[None]] = set()
        while (block := self._next()) is not None:
            task = asyncio.create_task(self._offered(block))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            await asyncio.sleep(self._pause_s)
        await asyncio.gather(*waiting)

    async def _offered(self, block: Block) -> None:
        async def prepare() -> Block:
            return block

        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._outbox.offer(Outgoing(EXPERIENCES, prepare, 1000, kept)) and await kept:
            self.acknowledged |= {experience.id for experience in block.experiences}
        else:
            self.shed += 1

    async def _watch(self) -> None:
        """A consumer group of one: reads, commits, goes on, whichever broker is its coordinator by now."""
        reader = await self._log.subscribed(EXPERIENCES, group="watch")
        try:
            while True:
                with suppress(BrokerUnavailable, CommitRefused):
                    for message in await self._log.read(reader, timeout_s=0.5):
                        assert isinstance(message.value, Block), message.error
                        self.seen |= {experience.id for experience in message.value.experiences}
                    await reader.commit(reader.positions())
        finally:
            await reader.close()

    async def _train(self) -> None:
        assert self._log.store is not None
        floor = Floor(
            app=self._log.app, pacing=PACING, folder=self._folder,
            kafka=Kafka(bootstrap_servers=self._bootstrap, deadline_s=DEADLINE_S),
        )  # fmt: skip
        role = role_of("train", floor, self._log, self._log.store, stop=self.stop_trainer)
        await run_trainer(role, CONFIG, ScriptedLearner(), seed=3, chain=(), max_tokens=0)


def start_worker(bootstrap: str, app: str, folder: Path) -> "subprocess.Popen[bytes]":
    """The process that verifies and collects."""
    command = [sys.executable, "-m", "tests.e2e.stream_worker", bootstrap, app, str(folder), str(DEADLINE_S)]
    with (folder / "process.log").open("wb") as output:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)


@asynccontextmanager
async def loaded(bootstrap: str, app: str, folder: Path, groups_per_s: float) -> AsyncIterator[BrokerLoad]:
    """The load, for the length of a block; whatever of it ends by itself ends the block."""
    bus = KafkaBus(bootstrap, deadline_s=DEADLINE_S)
    await bus.start()
    log = Log(bus, app, store=DirectoryStore(folder / "store"))
    await log.create_topics(partitions=3, keep_ms=24 * 3600 * 1000, replication=3)
    worker = start_worker(bootstrap, app, folder)
    try:
        load = BrokerLoad(log, bootstrap, folder, groups_per_s)
        async with asyncio.TaskGroup() as group:
            tasks = load.tasks(group)
            yield load
            assert worker.poll() is None, f"the stream worker ended; see {folder / 'process.log'}"
            load.stop_trainer.set()
            for task in tasks:
                task.cancel()
    finally:
        worker.kill()
        worker.wait()
        await bus.close()
