"""Three real brokers: any is lost at will, and nothing with it; topics are made with the copies and retention of the settings.

    producer ──┐
               ├─> experiences ─> verify, collect (a worker process) ─> buffer ─> trainer, journal
    outbox ────┘

BROKER_KILLS=100 python -m pytest -m full tests/e2e/test_three_brokers.py     as many kills as you like
"""

import asyncio
import os
import random
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from typer.testing import CliRunner, Result

from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.spool import Spool
from infra.cli.main import app
from infra.ledger.account import audit
from infra.local.broker import HOST, EmbeddedKafka, plan_address
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
from tests.e2e.crash_loop import lost
from tests.e2e.test_streams_kill import started, worker_command
from tests.role import role_of
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

pytestmark = pytest.mark.full
KILLS = int(os.environ.get("BROKER_KILLS", "3"))
ROLLING_EVERY = 20  # kills between rolling restarts
PAUSE_S = 0.25  # between groups of each of the two writers
NODES = (1, 2, 3)
GROUP_SIZE = 2
GROUPS_PER_STEP = 4
DEADLINE_S = 60.0  # how long a role waits for a broker
DRAIN_S = 180.0
PACING = Pacing(groups_per_step=GROUPS_PER_STEP, max_staleness=10_000, straggler_s=1.0)
CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=50, tensorboard="")


class ThreeBrokers:
    """Replication 3, two in sync for every confirmed record, all three in the quorum. Also a context manager."""

    def __init__(self, folder: Path) -> None:
        ports = {node: plan_address(folder / str(node)) for node in NODES}
        cluster = urlsafe_b64encode(uuid4().bytes).rstrip(b"=").decode()
        self.bootstrap = ",".join(port.bootstrap for port in ports.values())
        shared = {
            "controller.quorum.voters": ",".join(f"{n}@{HOST}:{port.controller_port}" for n, port in ports.items()),
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            "transaction.state.log.replication.factor": "3",
            "transaction.state.log.min.isr": "2",
            "leader.imbalance.check.interval.seconds": "2",  # leaders also move between kills
        }
        options = (f"--cluster-id={cluster}",)
        self.brokers = {
            node: EmbeddedKafka(
                folder / str(node), settings={"node.id": str(node), **shared}, format_options=options
            )
            for node in NODES
        }  # fmt: skip

    def start(self, node: int) -> None:
        """Return once the broker answers: the others must be a quorum by then, or become one meanwhile."""
        broker = self.brokers[node]
        broker.start()
        assert broker.bootstrap in self.bootstrap.split(","), f"broker {node} came up at {broker.bootstrap}"

    def __enter__(self) -> "ThreeBrokers":
        with ThreadPoolExecutor(len(NODES)) as pool:
            list(pool.map(self.start, NODES))
        return self

    def __exit__(self, *_: object) -> None:
        for broker in self.brokers.values():  # the last two have no quorum left to stop in order
            broker.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    with ThreeBrokers(tmp_path_factory.mktemp("cluster")) as brokers:
        yield brokers


def call(folder: Path, cluster: ThreeBrokers, app_name: str, *arguments: str) -> Result:
    config = folder / "headrace.toml"
    config.write_text(
        f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{cluster.bootstrap}"\npartitions = 2\nreplication = 3\n'
        '[keep]\nreplay = "2d"\n'
    )
    return CliRunner().invoke(app, [*arguments, "-c", str(config)], env={"COLUMNS": "160", "TERM": "dumb"})


async def described(bootstrap: str, app_name: str) -> tuple[set[int], dict[str, str]]:
    """Copies of the app's partitions, and the settings of a topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        topics = [topic for topic in await admin.describe_topics() if topic["topic"].startswith(app_name)]
        resource = ConfigResource(ConfigResourceType.TOPIC, f"{app_name}.experiences")
        (answer,) = await admin.describe_configs([resource])
    finally:
        await admin.close()
    ((_, _, _, _, entries),) = answer.resources
    copies = {len(partition["replicas"]) for topic in topics for partition in topic["partitions"]}
    return copies, {name: value for name, value, *_ in entries}


def test_topics_are_made_with_the_copies_and_the_retention_of_the_settings(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    done = call(tmp_path, cluster, app_name, "check", "--create", "--set", "kafka.replication=4")
    assert done.exit_code == 2 and "InvalidReplicationFactorError" in done.output
    assert "topics created" in call(tmp_path, cluster, app_name, "check", "--create").stdout
    copies, config = asyncio.run(described(cluster.bootstrap, app_name))
    assert copies == {3} and config["min.insync.replicas"] == "2"
    assert config["retention.ms"] == str(2 * 24 * 3600 * 1000)


def answers_to(sequence: int) -> Block:
    """Two answers to a task, one of them right."""
    group = f"t{sequence}.0"
    asked = Message(role="user", content=f"{sequence}+0=")
    return Block(
        tuple(
            make_experience(
                id=experience_id(group, 0, episode),
                group=group,
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


class Writers:
    """An explorer's writes and a gateway's outbox. acknowledged: ids of what was confirmed. shed: groups of the outbox that
    were not kept."""

    def __init__(self, log: Log, folder: Path) -> None:
        assert log.store is not None
        self.acknowledged: set[str] = set()
        self.shed = 0
        self.is_stopping = False
        self.outbox = Outbox(
            log, Spool(folder / "spool", max_bytes=10**8), Metrics("serve"), held=HeldKeys(log.store, folder / "keys"),
            queue_records=10_000, queue_bytes=10**8, send_s=5.0,
        )  # fmt: skip
        self._log = log
        self._sequence = 0

    def _next(self) -> Block | None:
        """The next group; None once the writers are to stop and the last step is full."""
        if self.is_stopping and self._sequence % GROUPS_PER_STEP == 0:
            return None
        self._sequence += 1
        return answers_to(self._sequence - 1)

    def _confirmed(self, block: Block) -> None:
        self.acknowledged |= {experience.id for experience in block.experiences}

    async def publish(self) -> None:
        """Send one group after the other, each until it is confirmed."""
        while (block := self._next()) is not None:
            sent = False
            while not sent:
                with suppress(BrokerUnavailable):
                    await self._log.publish(EXPERIENCES, block)
                    sent = True
            self._confirmed(block)
            await asyncio.sleep(PAUSE_S)

    async def offer(self) -> None:
        """Offer groups to the outbox, without waiting until they are kept."""
        async with asyncio.TaskGroup() as waiting:
            while (block := self._next()) is not None:
                waiting.create_task(self._offer(block))
                await asyncio.sleep(PAUSE_S)

    async def _offer(self, block: Block) -> None:
        async def prepare() -> Block:
            return block

        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.outbox.offer(Outgoing(EXPERIENCES, prepare, 1000, kept)) and await kept:
            self._confirmed(block)
        else:
            self.shed += 1


async def drained(log: Log, writers: Writers) -> None:
    """Wait until everything in the log is trained or dropped. Raises TimeoutError."""
    async with asyncio.timeout(DRAIN_S):
        await until(lambda: not writers.outbox.num_waiting, seconds=DRAIN_S)
        while (await audit(log, log.app)).pending:  # noqa: ASYNC110
            await asyncio.sleep(2.0)


@asynccontextmanager
async def loaded(bootstrap: str, app: str, folder: Path) -> AsyncIterator[tuple[Log, Writers]]:
    """Writers, stream worker and trainer, until the block ends; a part that fails ends the block."""
    bus = KafkaBus(bootstrap, deadline_s=DEADLINE_S)
    await bus.start()
    log = Log(bus, app, store=DirectoryStore(folder / "store"))
    assert log.store is not None
    await log.create_topics(partitions=3, keep_ms=24 * 3600 * 1000, replication=3)
    kafka = Kafka(bootstrap_servers=bootstrap, deadline_s=DEADLINE_S)
    role = role_of("train", Floor(app=app, pacing=PACING, folder=folder, kafka=kafka), log, log.store)
    writers = Writers(log, folder)
    command = worker_command(app, bootstrap, folder, partitions=3, deadline_s=DEADLINE_S)
    with started(command, folder / "process.log") as worker:
        async with asyncio.TaskGroup() as group:
            training = run_trainer(role, CONFIG, ScriptedLearner(), seed=3, chain=(), max_tokens=0)
            running = (writers.publish(), writers.offer(), writers.outbox.write(), writers.outbox.drain())
            group.create_task(training)
            tasks = [group.create_task(item) for item in running]
            yield log, writers
            assert worker.poll() is None, f"the stream worker ended; see {folder / 'process.log'}"
            role.stop.set()
            for task in tasks:
                task.cancel()
    await bus.close()


async def test_brokers_killed_one_after_the_other_and_restarted_in_turn_lose_nothing_and_double_nothing(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    chosen = random.Random(1)
    async with loaded(cluster.bootstrap, app_name, tmp_path) as (log, writers):
        await until(lambda: len(writers.acknowledged) > 10, seconds=60.0)
        for number in range(1, KILLS + 1):
            await asyncio.sleep(chosen.uniform(0.2, 2.0))
            node = chosen.choice(NODES)
            await asyncio.to_thread(cluster.brokers[node].kill)
            await asyncio.to_thread(cluster.start, node)
            if number % ROLLING_EVERY == 0 or number == KILLS:
                for other in NODES:
                    await asyncio.to_thread(cluster.brokers[other].stop)
                    await asyncio.to_thread(cluster.start, other)
        writers.is_stopping = True
        await drained(log, writers)
        account = await audit(log, app_name)
        missing = await lost(log, writers.acknowledged)
    assert writers.acknowledged and account.trained and account.is_clean
    assert not missing and not account.pending and not writers.shed
