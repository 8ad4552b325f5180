"""Sampling and learning at the same time: the whole loop beside its own synchronous mode, under log-normal answer lengths.

Master, explorer, stages and trainer are the product's, on a log in memory in virtual time: hours in seconds, exactly the same
each time. Engine and learner are fakes that take a given time, one as much as the other on average. Waves: answers of a step by
the engine's places; with one wave the longest answers outlast several steps, and the bound on staleness makes both sides wait.
The journal has to say that every step had all of its groups, and each answer came once.
"""

import asyncio
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from actors.config import ExploreConfig, MasterConfig
from actors.engines.engine import Completion, LoadReport, OnChunk, Sampling
from actors.engines.scripted import TENSOR, ScriptedEngine, bigram_logprobs
from actors.engines.trace import Start, spans
from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.chain.processor import score
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.observe.metrics import Metrics
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor, from_numpy
from infra.roles.role import Role
from infra.settings.config import Floor, Pacing
from infra.store.images import Pixels
from infra.store.memory import MemoryStore
from schemas import Batch, Closure, Drawn, Experience, Message, Task, topics
from schemas.topics import EXPERIENCES, PROGRESS, TASKS, TASKSET, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.rules import collect_rules
from streams.config import ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from streams.stages.driver import WindowDriver
from streams.stages.verify import Verifier
from tests.bench.report import Row
from tests.simulator.virtual_loop import OneThreadTime, VirtualTime
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

SYNCHRONOUS = 0  # versions of staleness
VOCABULARY, EOS, FIRST, LOGPROB = 64, 0, 4, -1.0  # FIRST: of the tokens that answers are made of
APP, NUM_TASKS, PARTITIONS = "overlap", 200, 4
STREAMS = StreamsConfig(score=(ScoreConfig(name="last_word", use="tests.bench.overlap:last_word"),))
WHY = "the longest of 64 answers outlasts the two steps that the bound allows"


class OverlapPlan(msgspec.Struct, frozen=True):
    """groups, size: Of a step, and answers of a group. staleness: Versions that an answer may be old. mean: Tokens of an
    answer. longest: Times `mean` at most. token_s, load_s: Of the engine. publish_s: Of a version. first: Steps before those
    that are measured.
    """

    groups: int = 8
    size: int = 8
    staleness: int = 2
    mean: int = 48
    longest: int = 8
    token_s: float = 0.2
    publish_s: float = 0.5
    load_s: float = 0.1
    first: int = 6
    steps: int = 24


class OverlapCase(msgspec.Struct, frozen=True):
    """One run. sigma, waves: see OverlapPlan. staleness: versions, 0 for the synchronous mode. seed: of the lengths."""

    sigma: float
    waves: int
    staleness: int
    seed: int

    def places(self, plan: OverlapPlan) -> int:
        """Of the engine."""
        return max(1, plan.groups * plan.size // self.waves)

    def step_s(self, plan: OverlapPlan) -> float:
        """Of the learner: as long as the engine samples for a step."""
        return plan.groups * plan.size * plan.mean * plan.token_s / self.places(plan)


@score(version=1, inline=True)
def last_word(experience: Experience) -> float:
    """A verdict on the last token but the end: answers of a group differ in it."""
    return float(int(experience.tokens[-2]) % 2)


class Letters:
    """A tokenizer of a letter a token."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(message.content for message in messages)
        return [FIRST + ord(letter) % (VOCABULARY - FIRST) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("0") + token) for token in ids)


class SidesState(msgspec.Struct):
    """How both sides stand. running: answers that have a place. loading, learning: 1 while the engine, the learner is at it.
    issued, buffered, drawn, dropped: groups so far. begun: answers that the engine was asked for.
    """

    running: int = 0
    loading: int = 0
    learning: int = 0
    issued: int = 0
    begun: int = 0
    buffered: int = 0
    drawn: int = 0
    dropped: int = 0


class SidesAccount:
    """Seconds of each side, by what it did or waited for; places of the engine count by their share of all.

    places: of the engine. most: groups that may be outstanding. step: groups of a step. size: answers of a group.
    """

    def __init__(self, clock: Callable[[], float], *, places: int, most: int, step: int, size: int) -> None:
        self.state = SidesState()
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._places = places
        self._most = most
        self._step = step
        self._size = size
        self._at_s = clock()

    def add(self, **changes: int) -> None:
        """The state changes by so much now."""
        self.settle()
        for name, change in changes.items():
            setattr(self.state, name, getattr(self.state, name) + change)

    def settle(self) -> dict[str, float]:
        """What was until now is counted; returns all of it."""
        now_s, state = self._clock(), self.state
        passed_s, self._at_s = now_s - self._at_s, now_s
        busy = state.running / self._places
        if state.loading:
            self.seconds["engine_loads"] += passed_s
        else:
            self.seconds["engine_busy"] += busy * passed_s
            self.seconds[f"engine_{self._why_free()}"] += (1 - busy) * passed_s
        self.seconds["learner_busy" if state.learning else f"learner_{self._why_idle()}"] += passed_s
        return dict(self.seconds)

    def _why_free(self) -> str:
        """Why a place of the engine has no answer."""
        state = self.state
        if state.begun < state.issued * self._size:
            return "waits_for_a_version"
        outstanding = state.issued - state.drawn - state.dropped
        return "waits_for_the_bound" if outstanding >= self._most else "waits_for_the_log"

    def _why_idle(self) -> str:
        """Why the learner has no step."""
        waiting = self.state.buffered - self.state.drawn
        return "waits_for_an_older_group" if waiting >= self._step else "waits_for_groups"


class TimedEngine(ScriptedEngine):
    """lengths: tokens of the answers, in the order in which they are asked for. load_s: for which a load stops all."""

    def __init__(
        self,
        lengths: Iterator[int],
        account: SidesAccount,
        *,
        places: int,
        token_s: float,
        load_s: float,
    ) -> None:
        super().__init__(num_vocabulary=VOCABULARY, max_model_len=10**6)
        self._lengths = lengths
        self._account = account
        self._free = asyncio.Semaphore(places)
        self._token_s = token_s
        self._load_s = load_s
        self._paused_s = 0.0
        self._loads: list[Start] = [Start(0, 0)]
        self._loaded_s: list[float] = [0.0]
        self._num_asked = 0
        self._words = np.random.default_rng(0).integers(FIRST, VOCABULARY, 4096).tolist()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        """As many tokens as are due."""
        number, self._num_asked = self._num_asked, self._num_asked + 1
        length = min(next(self._lengths), sampling.max_tokens)
        self._account.add(begun=1)
        async with self._free:
            self._account.add(running=1)
            try:
                begin_s = self._sampled_s()
                end_s = begin_s + length * self._token_s
                while (left_s := end_s - self._sampled_s()) > 1e-9:  # noqa: ASYNC110 (a load moves the end)
                    await asyncio.sleep(left_s)
            finally:
                self._account.add(running=-1)
        at = number * 17 % (len(self._words) - length)
        return Completion(
            tokens=(*self._words[at : at + length - 2], FIRST + number % 2, EOS),
            logprobs=(LOGPROB,) * length,
            spans=spans(self._starts(begin_s, length), length, sampling),
            stopped=True,
        )

    async def load(self, policy: Policy) -> LoadReport:
        """Nothing is sampled meanwhile."""
        at_s = self._sampled_s()
        self._paused_s += self._load_s
        self._account.add(loading=1)
        await asyncio.sleep(self._load_s)
        self._account.add(loading=-1)
        report = await super().load(policy)
        self._loads.append(Start(policy.version, 0))
        self._loaded_s.append(at_s)
        return report

    def _sampled_s(self) -> float:
        """Seconds that were sampled in."""
        return asyncio.get_running_loop().time() - self._paused_s

    def _starts(self, begin_s: float, length: int) -> list[Start]:
        """Which version sampled from which token on."""
        sampled = [
            Start(one.version, max(0, int((at_s - begin_s) / self._token_s + 1e-6)))
            for one, at_s in zip(self._loads, self._loaded_s, strict=True)
        ]
        return [one for one, after in pairwise((*sampled, Start(-1, length))) if one.at < min(after.at, length)]


class TimedLearner(ScriptedLearner):
    """stepping: called at the beginning of each step, and says how long it takes."""

    def __init__(self, stepping: Callable[[], None]) -> None:
        super().__init__()
        self._stepping = stepping

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = float("inf")
    ) -> StepStats:
        """The scripted one's, and its time."""
        self._stepping()
        return super().step(batch, learning_rate=learning_rate, seed=seed, max_grad_norm=max_grad_norm)

    def tensors(self) -> dict[str, Tensor]:
        """A table for the engine."""
        return {TENSOR: from_numpy(self._table())}

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        """Logprobs under the table."""
        table = self._table()
        return Probe(sequences=sequences, logprobs=tuple(bigram_logprobs(table, one) for one in sequences))

    def _table(self) -> np.ndarray:
        table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
        table[0, : len(self._weights)] = self._weights
        return table


class TimedStore(MemoryStore):
    """A store in memory that takes `publish_s` for the manifest of a version, as if for all of it. spend: of VirtualTime."""

    def __init__(self, spend: Callable[[float], None], publish_s: float) -> None:
        super().__init__()
        self._spend = spend
        self._publish_s = publish_s

    def put(self, key: str, data: bytes | memoryview) -> None:
        if "/manifests/" in key:
            self._spend(self._publish_s)
        super().put(key, data)


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
        settings = CollectSettings(self._floor.folder, collect_rules(self._floor, STREAMS), build_collect(STREAMS))
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


class Played(msgspec.Struct, frozen=True):
    """One run. wall_s: of the steps measured. shares: of that time, by what a side did. too_old: share of the answers drawn of
    which no token was young enough to be trained on.
    """

    wall_s: float
    shares: dict[str, float]
    too_old: float


def run(steps: int = 24, seeds: int = 2, groups: int = 8, mean: int = 48) -> Iterator[Row]:
    """steps: Measured. seeds: Of answer lengths. groups: Of 8 answers, in a step. mean: Tokens of an answer."""
    plan = OverlapPlan(steps=steps, groups=groups, mean=mean)
    for sigma, waves in itertools.product((0.5, 1.0), (1, 4)):
        pairs = [
            [played(plan, OverlapCase(sigma, waves, staleness, seed)) for staleness in (plan.staleness, SYNCHRONOUS)]
            for seed in range(seeds)
        ]
        case = f"sigma {sigma:g}, {waves} wave{'s' * (waves > 1)}"
        busy = statistics.fmean(max(loop.shares["engine_busy"], loop.shares["learner_busy"]) for loop, _ in pairs)
        low = 0.95 if sigma == 0.5 else None
        yield Row(f"{case}, busier", busy, "of the time", low=low, why=WHY if low and busy < low else "")
        faster = statistics.fmean(alone.wall_s / loop.wall_s for loop, alone in pairs)
        yield Row(f"{case}, faster", faster, "times", low=1.8)


def played(plan: OverlapPlan, case: OverlapCase) -> Played:
    """One run in virtual time."""
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=OneThreadTime) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTime)
        return runner.run(_played(plan, case, loop, Path(name)))


def lengths(plan: OverlapPlan, case: OverlapCase) -> Iterator[int]:
    """Tokens of one answer after the other."""
    random = np.random.default_rng(case.seed)
    middle = np.log(plan.mean) - case.sigma**2 / 2
    while True:
        yield int(np.clip(round(random.lognormal(middle, case.sigma)), 3, plan.longest * plan.mean))


async def _played(plan: OverlapPlan, case: OverlapCase, loop: VirtualTime, folder: Path) -> Played:
    roles = await OverlapLoop.of(plan, case, loop, folder)
    marks = await roles.run(lengths(plan, case))
    before, after = marks[plan.first], marks[plan.first + plan.steps]
    passed = {name: seconds - before.seconds.get(name, 0.0) for name, seconds in after.seconds.items()}
    wall_s = after.at_s - before.at_s
    too_old = await _too_old(roles.log, plan)
    return Played(wall_s, {name: seconds / wall_s for name, seconds in passed.items()}, too_old)


async def _too_old(log: Log, plan: OverlapPlan) -> float:
    """Share of the answers. Raises RuntimeError where the journal does not say what it should."""
    seen: set[str] = set()
    num_old = 0
    async with aclosing(log.read_all(topics.BATCHES)) as messages:
        async for message in messages:
            if not isinstance(batch := message.value, Batch):
                continue
            drawn = [item.id for item in (*batch.items, *batch.dropped)]
            if len(drawn) != plan.groups * plan.size:
                raise RuntimeError(f"step {batch.step}: got {len(drawn)} answers, expected {plan.groups * plan.size}")
            if len({*drawn} - seen) != len(drawn):
                raise RuntimeError(f"step {batch.step}: got an answer twice")
            seen.update(drawn)
            num_old += len(batch.dropped)
    return num_old / len(seen)
