"""Every role in one process on a log in a file: what a whole cluster does in an hour, in a second, so that it can be killed
at every failpoint.

Master, explorer (scripted engine), streams (their own drivers, fed from the log without Faust) and trainer (scripted
learner, some of whose steps are not finite) work as they do in a cluster. A feeder adds what users would: tasks,
demonstrations, feedback, frames that nobody can read, groups that never complete, a frame too large for the log.
"""

import asyncio
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from actors.config import EvalSuite, ExploreConfig, MasterConfig
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log
from infra.observe.failpoint import VARIABLE
from infra.observe.metrics import Metrics
from infra.policies.policy import Probe
from infra.policies.tensors import Tensor, from_numpy
from infra.settings.config import Floor, Pacing
from infra.store.directory import DirectoryStore
from schemas import Block, Feedback, Message, Received, Span, Task, make_experience, topics
from schemas.experience import Experience
from schemas.topics import Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.rules import Rules
from streams.config import CollectConfig, FilterConfig, ScoreConfig, StreamsConfig, Switch, VerifyConfig
from streams.stages.chain_builder import build_collect, build_tasks, build_verify
from streams.stages.driver import WindowDriver
from streams.stages.tasks_stage import TaskStage
from streams.stages.verify import Verifier
from tests.actors.rig import CharTokenizer
from tests.crash.file_bus import FileBus
from tests.role import role_of
from trainer.batch.batch import PackedBatch
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

APP = "world"
VOCABULARY = 128
FLOOR = Floor(
    app=APP, pacing=Pacing(groups_per_step=2, max_staleness=2, steps_per_version=1, reissue_s=0.4, straggler_s=0.05)
)
MASTER = MasterConfig(num_episodes=2, max_tokens=3, report_s=0.2, evals=(EvalSuite(suite="dev", every=3, tasks=2),))
EXPLORE = ExploreConfig(report_s=0.2, linger_s=0.02, drain_s=0.1, eval_hold_s=0.3)
STREAMS = StreamsConfig(
    score=(ScoreConfig(name="coin", use="tests.crash.coin:coin"),),
    verify=VerifyConfig(filter=FilterConfig(min_tokens=2)),
    collect=CollectConfig(difficulty=Switch(on=False)),
)
RULES = Rules(deadline_ms=1500, keep_ms=3_600_000)
TRAINER = TrainerConfig(
    lanes={
        "usual": LaneConfig(loss="tis", weight=0.8),
        "expert": LaneConfig(loss="sft", weight=0.2, share=1.0, optional=True),
    },
    checkpoint_every=2,
    max_skips=2,
)
Counted = dict[str, int]


class UnsteadyLearner(ScriptedLearner):
    """A scripted learner with a policy that a scripted engine can load; one step in four is not finite."""

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        if hashlib.sha256(str(seed).encode()).digest()[0] % 4 == 0:
            return StepStats(finite=False, loss=float("nan"), grad_norm=float("nan"), values={})
        return super().step(batch, learning_rate=learning_rate, seed=seed, max_grad_norm=max_grad_norm)

    def tensors(self) -> dict[str, Tensor]:
        return {TENSOR: from_numpy(self._table())}

    def save(self) -> dict[str, Tensor]:
        steps = Tensor("I64", (1,), np.asarray([self._steps], dtype="<i8").tobytes())
        return {"weights": from_numpy(self._weights.copy()), "steps": steps}

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        rows = self._table().astype(np.float64)
        rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
        logprobs = tuple(
            tuple(float(rows[one, two]) for one, two in itertools.pairwise(tokens)) for tokens in sequences
        )
        return Probe(sequences=sequences, logprobs=logprobs)

    def _table(self) -> np.ndarray:
        return np.resize(self._weights, (VOCABULARY, VOCABULARY)).astype(np.float32)


class Polled:
    """A Delivery whose acknowledgement commits; the window gives them back in offset order."""

    generation = 1

    def __init__(self, record: Record, committed: dict[Partition, int]) -> None:
        self.record = record
        self._committed = committed

    def acknowledge(self) -> None:
        self._committed[Partition(self.record.topic, self.record.partition)] = self.record.offset + 1

    def abandon(self) -> None:
        return


async def host(log: Log, topic: Topic, group: str, driver: WindowDriver | CollectDriver) -> None:
    """Feed one driver, and commit what it acknowledged, as Faust does in a worker."""
    reader: Reader = await log.subscribed(topic, group=group)
    committed: dict[Partition, int] = {}
    driver.assigned(set(range(len(await log.bus.partitions(log.name(topic))))), 1)
    try:
        while True:
            for record in await reader.get_many(timeout_s=0.02, max_records=64):
                await driver.accept(Polled(record, committed))
            if committed:
                offsets = dict(committed)
                committed.clear()
                await reader.commit(offsets)
    finally:
        await reader.close()


async def streams(log: Log, folder: Path) -> None:
    """The three stages of one worker."""
    metrics = Metrics("process")

    async def committed(partition: int) -> int:
        found = await log.bus.committed(log.group("collect"), log.name(topics.VERIFIED))
        return found.get(Partition(log.name(topics.VERIFIED), partition), 0)

    async with asyncio.TaskGroup() as tasks:
        settings = CollectSettings(folder / "state", RULES, build_collect(STREAMS))
        tasks.create_task(
            host(
                log,
                topics.TASKSET_RAW,
                "tasks",
                WindowDriver("tasks", TaskStage(build_tasks(STREAMS), log), log, metrics, tasks),
            )
        )
        for topic in (topics.EXPERIENCES, topics.EXPERTS):
            verify = WindowDriver("verify", Verifier(build_verify(STREAMS)), log, metrics, tasks)
            tasks.create_task(host(log, topic, f"verify-{topic.name}", verify))
        collect = CollectDriver(log, metrics, settings, committed, tasks)
        tasks.create_task(host(log, topics.VERIFIED, "collect", collect))


def answer(group: str, *, size: int, lane: str = "usual", text: str = "q") -> Experience:
    """One answer as somebody else would publish it."""
    return make_experience(
        id=f"{group}.0-0-0", group=group, episode=0, group_size=size, lane=lane, tokens=[1, 2, 3, 4],  # type: ignore[arg-type]
        logprobs=np.full(2, -0.5), messages=(Message(role="user", content=text),), origin="feeder",
        spans=(Span(2, 4, -1, 1.0, lane == "usual"),), answer="yes",
    )  # fmt: skip


async def feed(log: Log, life: int) -> None:
    """What one life of the cluster gets from outside, with names of its own."""
    for index in range(2):
        question = (Message(role="user", content=f"q{index}?"),)
        await log.publish(topics.TASKSET, Task(id=f"task-{index}", messages=question, answer="yes"))
        await log.publish(topics.TASKSET, Task(id=f"dev-{index}", messages=question, answer="yes", split="dev"))
    raw = Task(id=f"raw-{life}", messages=(Message(role="user", content=f"r{life}"),), answer="yes", split="rare")
    await log.publish(topics.TASKSET_RAW, raw)
    await log.bus.send(log.name(topics.EXPERIENCES), b"nonsense", key=b"x")
    await log.publish(topics.EXPERTS, Block((answer(f"expert-{life}.0", size=1, lane="expert"),)))
    await log.publish(topics.EXPERIENCES, Block((answer(f"half-{life}.0", size=2),)))
    opinion = Feedback(ref=f"expert-{life}.0.0-0-0", id=f"opinion-{life}", value=1.0, source="csat")
    received = Received(path="/v1/feedback", body=b'{"value": 1}', id=f"{life}-0", ref=f"hr-{opinion.ref}")
    await log.publish(topics.FEEDBACK, received)
    await log.publish(topics.VERIFIED, opinion)
    if "blobs." in os.environ.get(VARIABLE, ""):
        text = np.random.default_rng(life).bytes(1_700_000).hex()  # more than half of it is left when compressed
        await log.publish(topics.EXPERTS, Block((answer(f"expert-big-{life}.0", size=1, lane="expert", text=text),)))


async def live(folder: Path, *, life: int, quiet: bool = False, finish: bool = False, limit_s: float = 20.0) -> bool:
    """One life: until something ends it, or limit_s; with finish, until everything is drained. quiet: nothing but streams.

    True if it came to its end.
    """
    store = DirectoryStore(folder / "store")
    log = Log(FileBus(folder / "log"), APP, store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    ending, stop = asyncio.Event(), asyncio.Event()
    if finish:
        ending.set()
    counts = iter(range(10**9))
    engine = ScriptedEngine(script=lambda prompt: [65] if next(counts) % 7 == 0 else [65, 66, 67])
    role = lambda name: role_of(name, FLOOR, log, store, stop=stop, instance=f"{name}/{life}")  # noqa: E731
    roles = [streams(log, folder)]
    if quiet:
        await log.publish(topics.EXPERIENCES, Block((answer(f"half-{life}.0", size=2),)))
    else:
        roles += [
            feed(log, life),
            run_master(role("master"), MASTER, finish=ending),
            run_explorer(role("explore"), EXPLORE, engine, CharTokenizer(), (0,)),
            run_trainer(role("train"), TRAINER, UnsteadyLearner(), seed=7),
        ]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(role) for role in roles]
        done = await until_drained(log, limit_s) if finish else await asyncio.sleep(limit_s, False)
        stop.set()
        for task in running:
            task.cancel()
    return bool(done)


async def until_drained(log: Log, limit_s: float) -> bool:
    """Whether the master says so in time."""
    started_s = time.time()
    async with asyncio.timeout(limit_s):
        async for message in log.read_all(topics.REPORTS, until_end=False):
            report = message.value
            role: Mapping[str, object] = {"role": getattr(report, "role", ""), "state": getattr(report, "state", "")}
            if role == {"role": "master", "state": "done"} and message.timestamp_ms / 1000 >= started_s:
                return True
    return False
