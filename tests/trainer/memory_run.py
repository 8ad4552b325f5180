"""A trainer on an in-memory log, killed where a test says: the log is filled, the learner is a hash chain."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from infra.chain.chain import Step
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.observe.metrics import Metrics
from infra.settings.config import Floor, Pacing
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import Block, Message, PolicyEvent, Span, make_experience, topics
from tests.role import role_of
from trainer.batch.image_inputs import ImageInputs
from trainer.config import LaneConfig, TrainerConfig, WarmupConfig
from trainer.journal.checkpoint import Position
from trainer.learners.learner import Learner
from trainer.loop.report import TrainerReport
from trainer.loop.state import Learning
from trainer.train import run_trainer

STEPS = 12
FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=2, straggler_s=0.01))
CONFIG = TrainerConfig(
    lanes={"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1, max_uses=100, optional=True)},
    warmup=WarmupConfig(every=2, stop_at=0.5, max_steps=8, min_experiences=4, batch=4),
    checkpoint_every=3,
    keep_checkpoints=3,
    max_steps=STEPS,
)


def block(sequence: int, lane: str = "usual", **header: object) -> Block:
    group = f"{lane}-{sequence}.0"
    span = Span(2, 4, 10_000) if lane == "usual" else Span(2, 4, -1, ratio=False)
    return Block(
        tuple(
            make_experience(
                tokens=[1, 2, 3 + sequence % 7, episode], logprobs=[-0.5, -0.25], messages=(Message(role="user", content="q"),),
                id=f"{group}.0-{episode}-0", group=group, episode=episode, group_size=2, spans=(span,), lane=lane,
                sequence=sequence if lane == "usual" else -1, reward=float(episode), advantage=float(episode) - 0.5, **header,
            )
            for episode in range(2)
        )
    )  # fmt: skip


async def filled_log(store: Store, bus: MemoryBus | None = None) -> Log:
    log = Log(bus or MemoryBus(), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    for number in range(4):
        await log.publish(topics.BUFFER, block(number, "expert"))
    await log.publish(topics.BUFFER, block(9, "expert", held_out=True))
    for sequence in range(2 * STEPS):
        await log.publish(topics.BUFFER, block(sequence))
    return log


async def new_run() -> tuple[Log, MemoryStore]:
    """A filled log, and its store in memory."""
    store = MemoryStore()
    return await filled_log(store), store


async def train(
    log: Log,
    store: Store,
    learner: Learner,
    config: TrainerConfig = CONFIG,
    floor: Floor = FLOOR,
    chain: tuple[Step, ...] = (),
    max_tokens: int = 0,
) -> None:
    role = role_of("train", floor, log, store)
    await run_trainer(role, config, learner, seed=3, chain=chain, max_tokens=max_tokens)


def replaying(
    learner: Learner, config: TrainerConfig = CONFIG, floor: Floor = FLOOR, image_inputs: ImageInputs | None = None
) -> Learning:
    """A learner at the start of a replay."""
    return Learning(
        floor=floor, config=config, learner=learner, report=TrainerReport(Metrics("replay")), position=Position(),
        image_inputs=image_inputs,
    )  # fmt: skip


async def journal(log: Log) -> list[object]:
    return [message.value async for message in log.scan(topics.BATCHES)]


async def published(log: Log) -> list[PolicyEvent]:
    events = [message.value async for message in log.scan(topics.POLICIES)]
    return [event for event in events if isinstance(event, PolicyEvent) and event.event == "published"]


class Killed(Exception):
    """The process died here."""


class KillingBus(MemoryBus):
    """A bus whose trainer dies at its n-th send: before it (even n) or after it was stored (odd n). What others put into
    `buffer` does not count.
    """

    def __init__(self, clock: Callable[[], int] = wall_ms) -> None:
        super().__init__(clock)
        self.sends = 0
        self.kill_at = -1

    async def send(self, *args, **kwargs):
        if args[0].endswith(".buffer"):
            return await super().send(*args, **kwargs)
        self.sends += 1
        is_last = self.sends == self.kill_at  # now: other tasks may send while this one waits
        if is_last and self.kill_at % 2 == 0:
            raise Killed
        position = await super().send(*args, **kwargs)
        if is_last:
            raise Killed
        return position


class PutsThatKill:
    """Counts puts; the process dies at the n-th: before it (even n), or after it was stored (odd n)."""

    puts = 0
    kill_at = -1

    @contextmanager
    def put_counted(self) -> Iterator[None]:
        self.puts += 1
        if self.puts == self.kill_at and self.kill_at % 2 == 0:
            raise Killed
        yield
        if self.puts == self.kill_at:
            raise Killed


class KillingStore(PutsThatKill, MemoryStore):
    """A store in memory whose process dies at the n-th put."""

    def put(self, key: str, data: bytes) -> None:
        with self.put_counted():
            super().put(key, data)


async def ends(run: Awaitable[None]) -> bool:
    """True if the trainer came to its end; False if it was killed."""
    try:
        await run
    except Killed:
        return False
    except BaseExceptionGroup as errors:
        if errors.subgroup(Killed) is None:
            raise
        return False
    return True


async def train_through_kills(
    bus: KillingBus,
    store: KillingStore,
    learner: Callable[[], Learner],
    kills: Iterable[tuple[int, int]],
    log: Log,
    config: TrainerConfig = CONFIG,
) -> tuple[Learner, int]:
    """Start the trainer again and again, each process dying at (send, put) counted from its start; -1 for never.

    Returns the learner that came to the end, and how many died.
    """
    for died, (bus.kill_at, store.kill_at) in enumerate((*kills, (-1, -1))):
        bus.sends = store.puts = 0
        each = learner()
        if await ends(train(log, store, each, config)):
            return each, died
    raise AssertionError("the run never ended")
