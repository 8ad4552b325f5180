"""The role that each simulated process runs, on its own connections to the log, the store and the clock."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from actors.gateway.serve import run_gateway
from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.cli.govern.channel import check_move, servable
from infra.cli.govern.words import recent_words
from infra.log.bus import CommitRefused, Partition, Record
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from schemas import PolicyEvent
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.fields import Channel, PolicyEventKind
from schemas.topics import EXPERIENCES, EXPERTS, POLICIES, TASKSET_RAW, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.rules import collect_rules
from streams.collect.snapshots import SnapshotPolicy
from streams.sources.source import build_sources, run_sources
from streams.stages.chain_builder import build_tasks
from streams.stages.driver import WindowDriver
from streams.stages.tasks_stage import TaskStage
from streams.stages.verify import Verifier
from tests.role import role_of
from tests.simulator.network import ClientReader
from tests.simulator.plugins import EOS, SmallTokenizer, TableLearner, WatchedEngine
from tests.simulator.scenario import FAULTS_S, TOKEN_S, Scenario, chains
from tests.simulator.virtual_loop import Process
from trainer.train import run_trainer


class GatewayLife(msgspec.Struct, frozen=True):
    """One life of a gateway. role: serve or canary, each with folders of its own."""

    role: str
    folder: Path
    engine: WatchedEngine

    def let_go(self) -> None:
        """The process is dead: the kernel takes its locks back."""
        for lock in self.folder.rglob("lock"):
            lock.unlink()


def next_folder(base: Path, lives: Mapping[Process, GatewayLife], role: str) -> Path:
    """The first folder of a role that no living process has, one with spooled records before others."""
    for folder in orphans(lives, role):
        return folder
    taken = {life.folder for process, life in lives.items() if not process.is_dead}
    return next(path for number in range(100) if (path := base / f"{role}-{number}") not in taken)


def orphans(lives: Mapping[Process, GatewayLife], role: str) -> list[Path]:
    """Folders of a role's dead in which records are spooled."""
    taken = {life.folder for process, life in lives.items() if not process.is_dead}
    folders = {life.folder for life in lives.values() if life.role == role} - taken
    return sorted(folder for folder in folders if any(folder.rglob("*.spool")))


OWNER = "operator"
Move = tuple[PolicyEventKind, Channel]
MOVES: tuple[Move, ...] = (("promoted", "stable"), ("pinned", "stable"), ("rolled_back", "stable"))
TRIALS: tuple[Move, ...] = (("promoted", "canary"), ("promoted", "canary"), ("held", "stable"))
UNPINNED = -1


async def run_operator(scenario: Scenario, log: Log) -> None:
    """All moves of one seed, in time; one that the command would refuse is not made."""
    random = Random(f"operator/{scenario.seed}")
    begin_s = asyncio.get_running_loop().time()
    plan = [
        (random.random() * FAULTS_S, moves) for moves in [MOVES] * scenario.num_moves + [TRIALS] * scenario.num_trials
    ]
    for at_s, moves in sorted(plan):
        await asyncio.sleep(max(0.0, begin_s + at_s - asyncio.get_running_loop().time()))
        policy = scenario.floor.policy.name
        words = await recent_words(log, policy, at_least=None)
        history, stable = words.events, words.stable
        kind, channel = random.choice(moves)
        newest = max((event.version for _, event in history if event.event == "published"), default=0)
        version = UNPINNED if kind == "pinned" and stable.pinned else random.randint(0, newest)
        if kind == "held" and (version := stable.trial) < 0:
            continue
        try:
            check_move(servable(history), stable, kind, version)
        except ConfigError:
            continue
        move = PolicyEvent(event=kind, policy=policy, version=version, channel=channel, owner=OWNER)
        await log.publish(POLICIES, move)


COMMIT_S = 0.5
SNAPSHOT_S, SNAPSHOT_RECORDS = 1.0, 10
STAGE_OF = {TASKSET_RAW.name: "tasks", EXPERIENCES.name: "verify", EXPERTS.name: "verify", VERIFIED.name: "collect"}


def group_of_topic(log: Log, topic: Topic) -> str:
    """The consumer group that reads a topic: one each, so that two topics of a stage rebalance apart."""
    return f"{log.group(STAGE_OF[topic.name])}.{topic.name}"


class PlainDelivery:
    """A Delivery of one record of one generation. nexts: offsets to commit; a driver acknowledges in log order."""

    def __init__(self, record: Record, generation: int, nexts: dict[Partition, int]) -> None:
        self.record = record
        self.generation = generation
        self._nexts = nexts

    def acknowledge(self) -> None:
        self._nexts[Partition(self.record.topic, self.record.partition)] = self.record.offset + 1

    def abandon(self) -> None:
        pass


async def consume(log: Log, topic: Topic, driver: WindowDriver | CollectDriver) -> None:
    """Feed a driver for ever."""
    reader = await log.bus.subscribed([log.name(topic)], group=group_of_topic(log, topic))
    assert isinstance(reader, ClientReader)
    generation, nexts = -1, dict[Partition, int]()
    clock = asyncio.get_running_loop().time
    commit_at = clock() + COMMIT_S
    while True:
        try:
            records = await reader.get_many(timeout_s=max(0.05, commit_at - clock()), max_records=64)
        except BrokerUnavailable:
            continue
        if reader.generation != generation:
            driver.retire(generation)
            driver.abandon()
            generation, nexts = reader.generation, {}
            driver.assigned({partition.index for partition in reader.positions()}, generation)
        for record in records:
            await driver.accept(PlainDelivery(record, generation, nexts))
        if clock() >= commit_at:
            commit_at = clock() + COMMIT_S
            if done := dict(nexts):
                with suppress(
                    CommitRefused, BrokerUnavailable
                ):  # the next round commits again, or follows the rebalance
                    await reader.commit(done)
                    for at in [at for at, offset in done.items() if nexts[at] == offset]:
                        del nexts[at]


async def run_streams(scenario: Scenario, log: Log, metrics: Metrics, folder: Path, wall_ms: Callable[[], int]) -> None:
    """All stages and the feedback source of one worker."""
    verify_steps, collect_steps = chains(scenario.late, scenario.picky, bool(scenario.num_customers))
    sources = build_sources(scenario.streams.feedback, folder)

    async def committed(partition: int) -> int:
        offsets = await log.bus.committed(group_of_topic(log, VERIFIED), log.name(VERIFIED))
        return offsets.get(Partition(log.name(VERIFIED), partition), 0)

    async with asyncio.TaskGroup() as tasks:
        settings = CollectSettings(
            folder,
            collect_rules(scenario.floor, scenario.streams),
            collect_steps,
            snapshots=SnapshotPolicy(SNAPSHOT_S, SNAPSHOT_RECORDS),
        )
        drivers: list[tuple[Topic, WindowDriver | CollectDriver]] = [
            (TASKSET_RAW, WindowDriver("tasks", TaskStage(build_tasks(scenario.streams)), log, metrics, tasks)),
            (EXPERIENCES, WindowDriver("verify", Verifier(verify_steps), log, metrics, tasks)),
            (EXPERTS, WindowDriver("verify", Verifier(verify_steps), log, metrics, tasks)),
            (VERIFIED, CollectDriver(log, metrics, settings, committed, tasks, wall_ms=wall_ms)),
        ]
        for topic, driver in drivers:
            tasks.create_task(consume(log, topic, driver))
        tasks.create_task(run_sources(sources, log, metrics, folder))


if TYPE_CHECKING:
    from tests.simulator.world import World

Running = Coroutine[None, None, None]


def given(world: "World", process: Process, metrics: Metrics) -> Role:
    log = world.log_of(process)
    assert log.store is not None
    return role_of(
        process.name,
        world.scenario.floor,
        log,
        log.store,
        metrics=metrics,
        stop=world.stop_of(process),
        instance=process.name,
    )


def master(world: "World", process: Process) -> Running:
    return run_master(given(world, process, Metrics("master")), world.scenario.master, finish=world.finish)


def explorer(world: "World", process: Process) -> Running:
    role = given(world, process, world.metrics_of(process))
    loaded, seed = functools.partial(world.watch.loaded, process), world.draw_seed()
    engine = WatchedEngine(loaded, seed=seed, token_s=0.2 + 0.6 * world.random.random())
    return run_explorer(role, world.scenario.explore, engine, SmallTokenizer(), (EOS,))


def trainer(world: "World", process: Process) -> Running:
    scenario = world.scenario
    stepping = functools.partial(world.watch.stepping, process)
    learner = TableLearner(stepping, scenario.fail_at, scenario.poison_at)
    return run_trainer(given(world, process, Metrics("train")), scenario.trainer, learner, seed=scenario.seed)


def gateway(world: "World", process: Process) -> Running:
    role, config = process.name.partition("#")[0], world.scenario.gateway
    config = config.as_canary() if role == "canary" else config
    life = world.gateways[process] = GatewayLife(
        role,
        next_folder(world.folder, world.gateways, role),
        WatchedEngine(functools.partial(world.watch.loaded, process), seed=world.draw_seed(), token_s=TOKEN_S),
    )
    floor = msgspec.structs.replace(world.scenario.floor, folder=life.folder)
    given_here = msgspec.structs.replace(given(world, process, world.metrics_of(process)), floor=floor)
    return run_gateway(given_here, config, life.engine, SmallTokenizer(), reads_feedback=True, epoch=world.draw_seed())


def worker(world: "World", process: Process) -> Running:
    index = next(n for n in range(100) if n not in world.workers or world.workers[n].is_dead)
    world.workers[index] = process
    folder = world.folder / f"worker-{index}"
    if world.mixture.lost_disks and world.random.random() < 0.4 and folder.exists():
        world.watch.happened(process, "finds an empty disk")
        folder = world.folder / f"worker-{index}-{process.name}"
    skew_ms = world.mixture.skew_ms
    wall_ms = lambda: world.cluster.now_ms() + skew_ms  # noqa: E731
    metrics = world.metrics[process] = Metrics("process")
    return run_streams(world.scenario, world.log_of(process), metrics, folder, wall_ms)
