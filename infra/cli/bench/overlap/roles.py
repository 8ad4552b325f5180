"""The roles of the benchmark of overlap: those of the product, on a log in memory.

Engine and learner take a given virtual time.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec

from actors.config import ExploreConfig, MasterConfig
from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.cli.bench.overlap.plan import OverlapCase, OverlapPlan
from infra.cli.bench.overlap.sides import EOS, Letters, SidesAccount, TimedEngine, TimedLearner, TimedStore
from infra.cli.bench.overlap.virtual_time import VirtualTime
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from infra.settings.config import Floor, Pacing
from schemas import Closure, Drawn, Message, Task
from schemas.topics import EXPERIENCES, PROGRESS, TASKS, TASKSET, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.config import ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from streams.stages.driver import WindowDriver
from streams.stages.verify import Verifier
from streams.worker import rules_of
from trainer.config import TrainerConfig
from trainer.train import run_trainer

APP = "overlap"
NUM_TASKS = 200
PARTITIONS = 4
STREAMS = StreamsConfig(score=(ScoreConfig(name="last_word", use="infra.cli.bench.overlap.sides:last_word"),))


class StepMark(msgspec.Struct, frozen=True):
    """The beginning of a step. at_s: virtual time. seconds: busy time of each side until then, by name."""

    at_s: float
    seconds: dict[str, float]


class Taken:
    """A Delivery that is delivered once."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.generation = 0

    def acknowledge(self) -> None:
        """See Delivery. Nothing to do: the log in memory has no committed offsets."""

    def abandon(self) -> None:
        """See Delivery. Nothing to do: the run ends."""


class OverlapLoop:
    """All roles in one event loop. Built by `of`, run once."""

    def __init__(
        self, plan: OverlapPlan, case: OverlapCase, floor: Floor, log: Log, store: TimedStore, loop: VirtualTime
    ) -> None:
        self.log = log
        self._plan = plan
        self._places = case.places(plan)
        self._step_s = case.step_s(plan)
        self._floor = floor
        self._store = store
        self._loop = loop
        self._stop = asyncio.Event()
        pacing = floor.pacing
        most = (pacing.max_staleness * pacing.steps_per_version + 1) * pacing.groups_per_step
        self._account = SidesAccount(loop.time, places=self._places, most=most, step=plan.groups, size=plan.size)
        self._marks: list[StepMark] = []

    @classmethod
    async def of(cls, plan: OverlapPlan, case: OverlapCase, loop: VirtualTime, folder: Path) -> "OverlapLoop":
        """The roles on a log that holds the tasks."""
        pacing = Pacing(groups_per_step=plan.groups, max_staleness=case.staleness)
        start_ms, start_s = wall_ms(), loop.time()
        bus = MemoryBus(lambda: start_ms + int(1000 * (loop.time() - start_s)))
        store = TimedStore(loop.spend, plan.publish_s)
        log = Log(bus, APP, store=store, clock=loop.time)
        await log.create_topics(partitions=PARTITIONS, keep_ms=-1)
        tasks = [Task(id=f"t{at}", messages=(Message(role="user", content=f"{at}+1="),)) for at in range(NUM_TASKS)]
        await log.publish_all(TASKSET, tasks)
        return cls(plan, case, Floor(app=APP, pacing=pacing, folder=folder), log, store, loop)

    async def run(self, lengths: Iterator[int]) -> list[StepMark]:
        """Runs until the trainer has made its steps. Returns the beginning of each."""
        plan = self._plan
        engine = TimedEngine(lengths, self._account, places=self._places, token_s=plan.token_s, load_s=plan.load_s)
        master = MasterConfig(num_episodes=plan.size, max_tokens=plan.longest * plan.mean)
        trainer = TrainerConfig(max_steps=plan.first + plan.steps + 1, tensorboard="")
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(one)
                for one in (
                    self._count(TASKS),
                    self._count(PROGRESS),
                    self._stages(),
                    run_master(self._role("master"), master),
                    run_explorer(self._role("explore"), ExploreConfig(), engine, Letters(), (EOS,)),
                )
            ]
            await run_trainer(self._role("train"), trainer, TimedLearner(self._stepping))
            for one in others:
                one.cancel()
        return self._marks

    def _role(self, name: str) -> Role:
        metrics, instance = Metrics(name), f"{name}/bench"
        return Role(
            floor=self._floor, log=self.log, store=self._store, metrics=metrics, stop=self._stop, instance=instance
        )

    def _stepping(self) -> None:
        """A step begins, and takes its time."""
        self._marks.append(StepMark(self._loop.time(), self._account.settle()))
        self._account.add(learning=1)
        self._loop.spend(self._step_s)
        self._loop.call_later(self._step_s, lambda: self._account.add(learning=-1))

    async def _count(self, topic: Topic) -> None:
        """Count the tasks that are issued, or how each group ended."""
        async for message in self.log.read_all(topic, until_end=False):
            record = message.value
            if isinstance(record, Task):
                self._account.add(issued=1)
            elif isinstance(record, Closure) and record.outcome == "buffered":
                self._account.add(buffered=1)
            elif isinstance(record, Closure):
                self._account.add(dropped=1)
            elif isinstance(record, Drawn):
                self._account.add(drawn=len(record.groups))

    async def _stages(self) -> None:
        """Verify and collect, fed as a stream worker feeds them."""

        async def none_committed(partition: int) -> int:
            return 0

        log, metrics = self.log, Metrics("process")
        settings = CollectSettings(self._floor.folder, rules_of(self._floor, STREAMS), build_collect(STREAMS))
        async with asyncio.TaskGroup() as tasks:
            verify = WindowDriver("verify", Verifier(build_verify(STREAMS)), log, metrics, tasks)
            collect = CollectDriver(log, metrics, settings, none_committed, tasks, wall_ms=self._wall_ms)
            tasks.create_task(self._feed(EXPERIENCES, verify))
            tasks.create_task(self._feed(VERIFIED, collect))

    async def _feed(self, topic: Topic, driver: WindowDriver | CollectDriver) -> None:
        driver.assigned(set(range(PARTITIONS)), 0)
        async for message in self.log.read_all(topic, until_end=False):
            await driver.accept(Taken(message.record))

    def _wall_ms(self) -> int:
        bus = self.log.bus
        assert isinstance(bus, MemoryBus)
        return bus.clock()
