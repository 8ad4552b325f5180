"""Rig of the actors' tests: a memory log, tokenizers, stand-ins for streams, roles to kill, and people who rate answers."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from actors.config import ExploreConfig, MasterConfig
from actors.engines.engine import Completion, Engine, OnChunk, Sampling
from actors.engines.scripted import ScriptedEngine
from actors.master.gate.gate import Gate
from actors.master.master import run_master
from actors.master.plan import Decisions, Plan
from actors.rollout.explorer import run_explorer
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.settings.config import Floor, Pacing
from infra.store.images import Pixels
from infra.store.memory import MemoryStore
from infra.store.open import open_store
from infra.store.store import Store
from schemas import Block, Closure, DropMarker, Experience, Message, PolicyEvent, Rating, Score, Task
from schemas.ids import request_group
from schemas.topics import EVALS, EXPERIENCES, PROGRESS, TASKSET, VERIFIED, Topic
from tests.names import session_name
from tests.role import role_of

EOS = 0


@contextmanager
def serving_child(
    command: Sequence[str | Path], port: int, *, patience_s: float, stderr: int | None = None
) -> Iterator[None]:
    """A process that serves a port of this machine, from when it can be reached until the end of the block; it and all that it
    started end there.
    """
    process = subprocess.Popen([*command], stderr=stderr, start_new_session=True)
    try:
        until = time.monotonic() + patience_s
        while not is_reachable(port):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_reachable(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


FLOOR = Floor(app="test")
PACING = Pacing(groups_per_step=2, max_staleness=1, steps_per_version=1, reissue_s=0.3)
EXPLORE = ExploreConfig(report_s=0.05, linger_s=0.05, drain_s=0.2, eval_hold_s=5.0)
MASTER = MasterConfig(num_episodes=3, max_tokens=4, report_s=0.05)


class CharTokenizer:
    """One token per ASCII character."""

    eos_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: Iterable[Message]) -> list[int]:
        return self.encode("".join(message.content for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != EOS)


def task(name: str, split: str = "train", **fields: object) -> Task:
    base = Task(id=name, messages=(Message(role="user", content=f"{name}?"),), answer="yes", split=split)
    return replace(base, **fields)


async def memory_log(*, store: Store | None = None) -> Log:
    """A log by the clock of the running loop, which may be a virtual one."""
    loop, start_ms = asyncio.get_running_loop(), wall_ms()
    start_s = loop.time()
    log = Log(MemoryBus(lambda: start_ms + int(1000 * (loop.time() - start_s))), FLOOR.app, store=store)
    await log.create_topics(partitions=2, keep_ms=1)
    return log


def folder_store(folder: Path) -> Store:
    return open_store(str(folder), base=folder)


def gone(pid: int) -> bool:
    """True if a process has ended, also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Wait for a condition; a deadline ends a test that would hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(*loops: asyncio.Task[None]) -> AsyncIterator[None]:
    """Roles for the length of a block; one that dies in it fails the test."""
    try:
        yield
    finally:
        died = [loop.exception() for loop in loops if loop.done() and not loop.cancelled()]
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for error in died:
            if error is not None:
                raise error


def explorer(
    log: Log,
    store: Store,
    engine: Engine,
    config: ExploreConfig = EXPLORE,
    *,
    stop: asyncio.Event | None = None,
    floor: Floor = FLOOR,
) -> asyncio.Task[None]:
    return asyncio.create_task(
        run_explorer(role_of("explore", floor, log, store, stop=stop), config, engine, CharTokenizer(), (EOS,))
    )


def master(
    log: Log, config: MasterConfig = MASTER, pacing: Pacing = PACING, *, store: Store | None = None
) -> asyncio.Task[None]:
    floor = msgspec.structs.replace(FLOOR, pacing=pacing)
    return asyncio.create_task(run_master(role_of("master", floor, log, store or MemoryStore()), config))


class TopicArrivals:
    """Everything in one topic, as it arrives."""

    def __init__(self, log: Log, topic: Topic) -> None:
        self.log = log
        self.topic = topic
        self.records: list[object] = []

    async def listen(self) -> None:
        async for message in self.log.tail(self.topic, "beginning"):
            assert message.error is None
            self.records.append(message.value)

    @property
    def experiences(self) -> list[Experience]:
        return [experience for record in self.records if isinstance(record, Block) for experience in record.experiences]

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [record for record in self.records if isinstance(record, kind)]


async def streams(log: Log, *, correct: Callable[[Experience], bool] = lambda _: True) -> None:
    """Scores evals; closes every group whose episodes all came, as buffered."""
    members: dict[tuple[str, int], set[int]] = {}

    async def seen(group: str, attempt: int, episode: int, size: int, sequence: int) -> None:
        key = (group, attempt)
        members.setdefault(key, set()).add(episode)
        if len(members[key]) == size:
            closure = Closure(group=group, attempt=attempt, outcome="buffered", sequence=sequence, mean_reward=0.5)
            await log.publish(PROGRESS, closure)

    async def raw() -> None:
        async for message in log.tail(EXPERIENCES, "beginning"):
            assert isinstance(message.value, Block)
            first = message.value.experiences[0]
            if first.suite:
                score = Score(name="exact", value=1.0 if correct(first) else 0.0)
                await log.publish(EVALS, Block((replace(first, scores=(score,)),)))
                continue
            for experience in message.value.experiences:
                await seen(
                    experience.group, experience.attempt, experience.episode, experience.group_size, experience.sequence
                )

    async def stubs() -> None:
        async for message in log.tail(VERIFIED, "beginning"):
            if isinstance(stub := message.value, DropMarker):
                await seen(stub.group, stub.attempt, stub.episode, stub.group_size, stub.sequence)

    async with asyncio.TaskGroup() as group:
        group.create_task(raw())
        group.create_task(stubs())


async def load(log: Log, *, train: int = 4, dev: int = 0) -> None:
    await log.publish_all(TASKSET, [task(f"task-{index}") for index in range(train)])
    await log.publish_all(TASKSET, [task(f"dev-{index}", "dev") for index in range(dev)])


def rollouts(plan: Plan) -> list[Task]:
    return _acted(plan, "rollouts")


def reissues(plan: Plan) -> list[Task]:
    return _acted(plan, "reissues")


def eval_tasks(plan: Plan) -> list[Task]:
    return _acted(plan, "evals")


def _acted(plan: Plan, kind: Literal["rollouts", "reissues", "evals"]) -> list[Task]:
    """Decisions of one kind; those of the others are left for later."""
    found = plan.decide()
    assert found == plan.decide(), "to decide changes nothing"
    only = Decisions(**{kind: getattr(found, kind)})
    plan.apply(only)
    return [task for tasks in only.tasks.values() for task in tasks]


def decisions(gate: Gate) -> list[PolicyEvent]:
    found = gate.decisions()
    assert found == gate.decisions(), "to decide changes nothing"
    for event in found:
        gate.event(event)
    return found


BLOCK_MS = 600_000


def rated_group(person: str, tenant: str = "acme", number: int = 0) -> str:
    return request_group(session_name(tenant, person), 7, number)


def rated(
    person: str,
    version: int,
    *values: float,
    at_ms: int = 0,
    trial: int = -1,
    tenant: str = "acme",
    rater: str = "",
    number: int = 0,
    revision: int = 0,
    late_ms: int = 0,
) -> Closure:
    """An answer to somebody, and what was said of it. number: of their answers."""
    ratings = tuple(Rating(source="user", value=value, rater=rater, time_ms=at_ms + late_ms) for value in values)
    return Closure(
        group=rated_group(person, tenant, number), outcome="buffered", lane="live", version=version, trial=trial,
        revision=revision, ratings=ratings, answered_ms=at_ms,
    )  # fmt: skip


def crowd(name: str, version: int, people: int, down: int, **more: object) -> Iterable[Closure]:
    """So many people of one answer each, the first of whom complain."""
    for number in range(people):
        yield rated(f"{name}{version}-{number}", version, float(number >= down), **more)  # type: ignore[arg-type]


class Looking(ScriptedEngine):
    """Takes images. seen: those of each request. kept: maximum number of requests in `seen`, None for all."""

    def __init__(self, *, kept: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.seen = deque[tuple[Pixels, ...]](maxlen=kept)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        self.seen.append(tuple(images))
        return await super().generate(prompt, sampling, on_chunk=on_chunk)
