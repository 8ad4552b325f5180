"""Three workers, killed and rebalanced at will, on a real broker: the buffer is what one worker makes of the same input.

A worker that is killed takes its disk with it: the next goes on from what was stored of its partitions.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.store.directory import DirectoryStore
from schemas import Block, Closure, DeadLetter, Experience, Message, Span, make_experience
from schemas.ids import experience_id
from schemas.topics import BUFFER, DEAD_LETTERS, EXPERIENCES, EXPERTS, PROGRESS

pytestmark = pytest.mark.full

REPOSITORY = Path(__file__).parents[2]
NUM_GROUPS = 400
GROUP_SIZE = 4
DEADLINE_S = 150.0
Contents = dict[str, dict[str, tuple[object, ...]]]


def answer(group: str, episode: int, chosen: random.Random, lane: str = "usual") -> Experience:
    """One answer: right, wrong, or too short to pass verify."""
    num_sampled = chosen.choice([1, 3, 3, 3])
    right = chosen.random() < 0.5
    return make_experience(
        id=experience_id(group, 0, episode),
        group=group,
        episode=episode,
        group_size=GROUP_SIZE,
        lane=lane,  # type: ignore[arg-type]
        tokens=np.arange(2 + num_sampled) + episode,
        logprobs=np.full(num_sampled, -0.25, dtype=np.float32),
        spans=(Span(start=2, stop=2 + num_sampled, version=3),),
        messages=(Message(role="user", content="1+1="), Message(role="assistant", content="2" if right else "3")),
        answer="2",
    )


def traffic(seed: int) -> list[Block | bytes]:
    """Groups in one to four blocks, interleaved; one record in eight twice; poison now and then."""
    chosen = random.Random(seed)
    records: list[Block | bytes] = []
    for index in range(NUM_GROUPS):
        lane = "expert" if index % 10 == 0 else "usual"
        members = [answer(f"t{index}.0", episode, chosen, lane) for episode in range(GROUP_SIZE)]
        cut = chosen.randrange(GROUP_SIZE + 1)
        pieces = [piece for piece in (members[:cut], members[cut:]) if piece]
        for piece in pieces:
            place = max(0, len(records) - chosen.randrange(6))
            block = Block(experiences=tuple(piece))
            records.insert(place, block)
            if chosen.random() < 0.125:
                records.append(block)
        if index % 25 == 0:
            records.append(chosen.choice([b"", b"HR", b"HR\x01\x00garbage", os.urandom(64)]))
    return records


@asynccontextmanager
async def opened(bootstrap: str, app: str, folder: Path) -> AsyncIterator[Log]:
    bus = KafkaBus(bootstrap)
    await bus.start()
    try:
        log = Log(bus, app, store=DirectoryStore(folder / "store"))
        await log.create_topics(partitions=6, keep_ms=24 * 3600 * 1000)
        yield log
    finally:
        await bus.close()


class Crew:
    """Worker processes of one app, replaced when they are killed by others with an empty disk."""

    def __init__(self, bootstrap: str, app: str, folder: Path, size: int) -> None:
        self._command = [sys.executable, "-m", "tests.e2e.stream_worker", bootstrap, app, str(folder), "20"]
        self._folder, self._num_disks = folder, 0
        self.said = folder / f"{app}.log"
        self._output = self.said.open("ab")
        self.workers = [self._start() for _ in range(size)]

    def replace(self, index: int, number: int, wait_s: float) -> None:
        """Signal a worker, then make sure that it is gone, then start another."""
        worker = self.workers[index]
        worker.send_signal(number)
        try:
            worker.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        self.workers[index] = self._start()

    def fallen(self) -> list[int]:
        """Exit codes of workers that ended by themselves."""
        return [worker.returncode for worker in self.workers if worker.poll() is not None]

    def stop(self) -> list[int]:
        for worker in self.workers:
            worker.terminate()
        return [worker.wait(timeout=60) for worker in self.workers]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self._output.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._num_disks += 1
        command = [*self._command, str(self._folder / f"disk-{self._num_disks}")]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=self._output, stderr=self._output)


@contextmanager
def crew(bootstrap: str, app: str, folder: Path, size: int) -> Iterator[Crew]:
    folder.mkdir(parents=True, exist_ok=True)
    workers = Crew(bootstrap, app, folder, size)
    try:
        yield workers
    finally:
        workers.kill()


async def feed(log: Log, records: list[Block | bytes], pause_s: float) -> None:
    for record in records:
        if isinstance(record, bytes):
            await log.bus.send(log.name(EXPERIENCES), record, key=b"poison")
        else:
            await log.publish(EXPERTS if record.experiences[0].lane == "expert" else EXPERIENCES, record)
        await asyncio.sleep(pause_s)


async def closures(log: Log) -> dict[tuple[str, int, int], Closure]:
    return {
        (message.value.group, message.value.attempt, message.value.revision): message.value
        async for message in log.read_all(PROGRESS)
        if isinstance(message.value, Closure)
    }


async def all_closed(log: Log, workers: Crew) -> dict[tuple[str, int, int], Closure]:
    """Closures once every group has one."""
    give_up_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at:
        found = await closures(log)
        if len({group for group, _, _ in found}) >= NUM_GROUPS:
            return found
        assert not workers.fallen(), f"workers ended by themselves: {workers.fallen()}"
        await asyncio.sleep(0.5)
    raise AssertionError(f"{len(await closures(log))} of {NUM_GROUPS} groups closed within {DEADLINE_S} s")


async def contents(log: Log) -> Contents:
    """Buffer by group and (id, revision), as a reader sees it that knows each of them once."""
    found: Contents = {}
    async for message in log.read_all(BUFFER):
        assert isinstance(message.value, Block)
        for experience in message.value.experiences:
            seen = (
                experience.reward,
                experience.advantage,
                experience.lane,
                experience.scores,
                experience.tokens.tolist(),
                experience.stamps,
            )
            known = found.setdefault(experience.group, {}).setdefault(f"{experience.id}/{experience.revision}", seen)
            assert known == seen, f"{experience.id} reached the buffer with two contents"
    return found


async def letters(log: Log) -> set[tuple[str, int, int, str]]:
    return {
        (message.value.topic, message.value.partition, message.value.offset, message.value.reason)
        async for message in log.read_all(DEAD_LETTERS)
        if isinstance(message.value, DeadLetter)
    }


def compared(found: dict[tuple[str, int, int], Closure]) -> dict[tuple[str, int, int], bytes]:
    """What closures say; members dropped in verify are counted alike, whoever dropped them."""
    return {key: msgspec.msgpack.encode(closure, order="sorted") for key, closure in found.items()}


def test_three_workers_killed_at_will_fill_the_buffer_as_one_does(kafka: str, app_name: str, tmp_path: Path) -> None:
    asyncio.run(compare_with_one(kafka, app_name, tmp_path, records=traffic(seed=11), chosen=random.Random(23)))


async def compare_with_one(
    kafka: str, app_name: str, folder: Path, records: list[Block | bytes], chosen: random.Random
) -> None:
    """The same input through one worker in peace and through three under fire."""
    num_poison = sum(isinstance(record, bytes) for record in records)
    async with opened(kafka, f"{app_name}-one", folder / "one") as one:
        await feed(one, records, 0.0)
        with crew(kafka, one.app, folder / "one", 1) as workers:
            expected = await all_closed(one, workers)
            assert workers.stop() == [0]
        async with opened(kafka, f"{app_name}-three", folder / "three") as three:
            with crew(kafka, three.app, folder / "three", 3) as workers:
                feeding = asyncio.create_task(feed(three, records, 0.04))
                for _ in range(6):
                    await asyncio.sleep(chosen.uniform(2.0, 5.0))
                    number = chosen.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
                    index = chosen.randrange(3)
                    await asyncio.to_thread(workers.replace, index, number, chosen.uniform(0.5, 3.0))
                await feeding
                found = await all_closed(three, workers)
                assert workers.stop() == [0, 0, 0]
                assert "collect_snapshot_taken" in workers.said.read_text()
            assert await contents(three) == await contents(one)
            assert compared(found) == compared(expected)
            assert len(await letters(three)) == len(await letters(one)) == num_poison
