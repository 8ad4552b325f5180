"""Overlap of sampling and learning: the whole loop compared with its own synchronous mode, with log-normal answer lengths.

Master, explorer, stages and trainer are the product's, on a log in memory in virtual time: hours in seconds, deterministic.
Engine and learner are fakes of given durations, equal on average. Waves are answers per step divided by concurrent requests of
the engine; with one wave the longest answers outlast several steps, and the bound on staleness makes both sides wait. The
journal must show that every step had all of its groups, and that each answer came once.
"""

import asyncio
import bisect
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np

from actors.config import ExploreConfig, MasterConfig
from actors.engines.engine import Completion, LoadReport, OnChunk, Sampling
from actors.engines.scripted import TENSOR, ScriptedEngine, bigram_logprobs
from actors.engines.trace import Trace
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
from schemas import Batch, Experience, Message, Task, topics
from schemas.topics import EXPERIENCES, TASKSET, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.rules import collect_rules
from streams.config import ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from streams.stages.driver import WindowDriver
from streams.stages.verify import Verifier
from tests.bench.report import Row
from tests.simulator.virtual_loop import OneThreadTime
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

SIZE, STALENESS, SYNCHRONOUS = 8, 2, 0  # answers of a group, versions of staleness of either mode
LONGEST = 8  # times the mean
TOKEN_S, LOAD_S, PUBLISH_S = 0.2, 0.1, 0.5
FIRST_STEPS = 6  # before those that are measured
VOCABULARY, EOS, FIRST, LOGPROB = 64, 0, 4, -1.0  # FIRST: of the tokens that answers are made of
APP, NUM_TASKS, PARTITIONS = "overlap", 200, 4
STREAMS = StreamsConfig(score=(ScoreConfig(name="last_word", use="tests.bench.overlap:last_word"),))
WHY = "the longest of 64 answers outlasts the two steps that the bound allows"


class Plan(msgspec.Struct, frozen=True):
    """One run. steps: measured. groups: of a step. mean: tokens of an answer. sigma: of their logarithm. waves: see above.
    staleness: versions that an answer may be old. seed: of the lengths.
    """

    steps: int
    groups: int
    mean: int
    sigma: float
    waves: int
    staleness: int
    seed: int

    @property
    def places(self) -> int:
        """Answers that the engine samples at once."""
        return max(1, self.groups * SIZE // self.waves)

    @property
    def step_s(self) -> float:
        """Seconds of a step: as long as the engine samples for it."""
        return self.groups * SIZE * self.mean * TOKEN_S / self.places

    def lengths(self) -> Iterator[int]:
        """Tokens of one answer after the other."""
        random = np.random.default_rng(self.seed)
        middle = np.log(self.mean) - self.sigma**2 / 2
        while True:
            yield int(np.clip(round(random.lognormal(middle, self.sigma)), 3, LONGEST * self.mean))


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


class TimedEngine(ScriptedEngine):
    """Answers have the plan's lengths, in the order in which they are asked for; a load stops all."""

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        super().__init__(num_vocabulary=VOCABULARY, max_model_len=10**6)
        self._clock = clock
        self._lengths = plan.lengths()
        self._places = plan.places
        self._free = asyncio.Semaphore(plan.places)
        self._paused_s = 0.0
        self._loads = [(0, 0.0)]  # each version, and the seconds sampled before it
        self._num_asked = self._num_sampled = 0
        self._is_loading = False
        self._busy_s, self._at_s = 0.0, clock()
        self._words = np.random.default_rng(0).integers(FIRST, VOCABULARY, 4096).tolist()

    def busy_s(self) -> float:
        """Seconds until now, each place that samples for its share."""
        passed_s, self._at_s = self._clock() - self._at_s, self._clock()
        if not self._is_loading:
            self._busy_s += passed_s * self._num_sampled / self._places
        return self._busy_s

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        number, self._num_asked = self._num_asked, self._num_asked + 1
        length = min(next(self._lengths), sampling.max_tokens)
        async with self._free:
            self._change(1)
            try:
                begin_s = self._sampled_s()
                end_s = begin_s + length * TOKEN_S
                while (left_s := end_s - self._sampled_s()) > 1e-9:  # noqa: ASYNC110 (a load moves the end)
                    await asyncio.sleep(left_s)
            finally:
                self._change(-1)
        at = number * 17 % (len(self._words) - length)
        versions, at_versions = zip(*self._loads, strict=True)
        trace = Trace(sampling)
        for index, token in enumerate((*self._words[at : at + length - 2], FIRST + number % 2, EOS)):
            now_s = begin_s + (index + 1) * TOKEN_S - 1e-6
            trace.add(token, LOGPROB, versions[bisect.bisect_left(at_versions, now_s) - 1])
        return trace.completion()

    async def load(self, policy: Policy) -> LoadReport:
        at_s = self._sampled_s()
        self._paused_s += LOAD_S
        self.busy_s()
        self._is_loading = True
        await asyncio.sleep(LOAD_S)
        self.busy_s()
        self._is_loading = False
        report = await super().load(policy)
        self._loads.append((policy.version, at_s))
        return report

    def _change(self, by: int) -> None:
        self.busy_s()
        self._num_sampled += by

    def _sampled_s(self) -> float:
        """Seconds that were not spent in loads."""
        return self._clock() - self._paused_s


class TimedLearner(ScriptedLearner):
    """stepping: called at the beginning of each step, and says how long it takes."""

    def __init__(self, stepping: Callable[[], None]) -> None:
        super().__init__()
        self._stepping = stepping

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = float("inf")
    ) -> StepStats:
        self._stepping()
        return super().step(batch, learning_rate=learning_rate, seed=seed, max_grad_norm=max_grad_norm)

    def tensors(self) -> dict[str, Tensor]:
        return {TENSOR: from_numpy(self._table())}

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        table = self._table()
        return Probe(sequences, tuple(bigram_logprobs(table, tokens) for tokens in sequences))

    def _table(self) -> np.ndarray:
        table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
        table[0, : len(self._weights)] = self._weights
        return table


class TimedStore(MemoryStore):
    """A store that takes PUBLISH_S for the manifest of a version, as if for all of it. spend: of VirtualTime."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        super().__init__()
        self._spend = spend

    def put(self, key: str, data: bytes | memoryview) -> None:
        if "/manifests/" in key:
            self._spend(PUBLISH_S)
        super().put(key, data)


class Taken:
    """A Delivery that is delivered once."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.generation = 0

    def acknowledge(self) -> None:
        """Do nothing: the log in memory has no committed offsets."""

    def abandon(self) -> None:
        """Do nothing: the run ends."""


async def feed_stages(log: Log, floor: Floor) -> None:
    """Verify and collect, fed as a stream worker feeds them."""

    async def none_committed(partition: int) -> int:
        return 0

    async def feed(topic: Topic, driver: WindowDriver | CollectDriver) -> None:
        driver.assigned(set(range(PARTITIONS)), 0)
        async for message in log.tail(topic, "beginning"):
            await driver.accept(Taken(message.record))

    metrics, bus = Metrics("process"), log.bus
    assert isinstance(bus, MemoryBus)
    settings = CollectSettings(floor.folder, collect_rules(floor, STREAMS), build_collect(STREAMS))
    async with asyncio.TaskGroup() as tasks:
        verify = WindowDriver("verify", Verifier(build_verify(STREAMS)), log, metrics, tasks)
        collect = CollectDriver(log, metrics, settings, none_committed, tasks, wall_ms=bus.clock)
        tasks.create_task(feed(EXPERIENCES, verify))
        tasks.create_task(feed(VERIFIED, collect))


async def train(plan: Plan, loop: OneThreadTime, folder: Path) -> tuple[float, float]:
    """All roles in one event loop until the trainer has made its steps: wall seconds of those that are measured, and seconds
    for which the engine was busy meanwhile.
    """
    pacing = Pacing(groups_per_step=plan.groups, max_staleness=plan.staleness)
    floor, start_ms, start_s = Floor(app=APP, pacing=pacing, folder=folder), wall_ms(), loop.time()
    store = TimedStore(loop.spend)
    log = Log(MemoryBus(lambda: start_ms + int(1000 * (loop.time() - start_s))), APP, store=store, clock=loop.time)
    await log.create_topics(partitions=PARTITIONS, keep_ms=-1)
    tasks = [Task(id=f"t{at}", messages=(Message(role="user", content=f"{at}+1="),)) for at in range(NUM_TASKS)]
    await log.publish_all(TASKSET, tasks)
    engine, stop, marks = TimedEngine(plan, loop.time), asyncio.Event(), list[tuple[float, float]]()

    def role(name: str) -> Role:
        metrics, instance = Metrics(name), f"{name}/bench"
        return Role(floor=floor, log=log, store=store, metrics=metrics, stop=stop, instance=instance)

    def stepping() -> None:
        marks.append((loop.time(), engine.busy_s()))
        loop.spend(plan.step_s)

    master = MasterConfig(num_episodes=SIZE, max_tokens=LONGEST * plan.mean)
    trainer = TrainerConfig(max_steps=FIRST_STEPS + plan.steps + 1, tensorboard="")
    async with asyncio.TaskGroup() as group:
        others = [
            group.create_task(role_task)
            for role_task in (
                feed_stages(log, floor),
                run_master(role("master"), master),
                run_explorer(role("explore"), ExploreConfig(), engine, Letters(), (EOS,)),
            )
        ]
        await run_trainer(role("train"), trainer, TimedLearner(stepping))
        for task in others:
            task.cancel()
    await check_journal(log, plan.groups * SIZE)
    wall_s, busy_s = np.subtract(marks[FIRST_STEPS + plan.steps], marks[FIRST_STEPS]).tolist()
    return wall_s, busy_s


async def check_journal(log: Log, num_answers: int) -> None:
    """Raise RuntimeError unless every step had so many answers, and each answer came once."""
    seen: set[str] = set()
    async with aclosing(log.scan(topics.BATCHES)) as messages:
        async for message in messages:
            if not isinstance(batch := message.value, Batch):
                continue
            drawn = [item.id for item in (*batch.items, *batch.dropped)]
            if len(drawn) != num_answers or len({*drawn} - seen) != num_answers:
                raise RuntimeError(f"step {batch.step}: got {len(drawn)} answers, expected {num_answers} new ones")
            seen.update(drawn)


def run(steps: int = 24, seeds: int = 2, groups: int = 8, mean: int = 48) -> Iterator[Row]:
    """steps: measured steps. seeds: seeds of answer lengths. groups: groups of 8 per step. mean: mean tokens per answer."""
    for sigma, waves in itertools.product((0.5, 1.0), (1, 4)):
        busy, faster = [], []
        for seed in range(seeds):
            plans = [Plan(steps, groups, mean, sigma, waves, stale, seed) for stale in (STALENESS, SYNCHRONOUS)]
            (wall_s, engine_s), (alone_s, _) = map(played, plans)
            busy.append(max(engine_s, steps * plans[0].step_s) / wall_s)
            faster.append(alone_s / wall_s)
        case = f"sigma {sigma:g}, {waves} wave{'s' * (waves > 1)}"
        low, share = 0.95 if sigma == 0.5 else None, statistics.fmean(busy)
        yield Row(f"{case}, busier", share, "of the time", low=low, why=WHY if low and share < low else "")
        yield Row(f"{case}, faster", statistics.fmean(faster), "times", low=1.8)


def played(plan: Plan) -> tuple[float, float]:
    """See `train`."""
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=OneThreadTime) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, OneThreadTime)
        return runner.run(train(plan, loop, Path(name)))
