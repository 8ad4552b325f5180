"""Stream workers on a real broker: killed and rebalanced they fill the buffer as one does; a bad input or broker ends them in
one line.

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

import numpy as np
import pytest

from infra.cli.data.skip import Lost, skip_lost
from infra.local.broker import EmbeddedKafka
from infra.log.bus import Partition
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.roles.process import EXIT_STUCK
from infra.store.directory import DirectoryStore
from schemas import Block, Closure, DeadLetter, Experience, Message, Progress, Span, encode, make_experience
from schemas.errors import ConfigError
from schemas.ids import experience_id
from schemas.topics import BUFFER, DEAD_LETTERS, EXPERIENCES, EXPERTS, PROGRESS, REPORTS, VERIFIED
from schemas.wire.frame import SEALED_FORMAT
from streams.stages.stage import EXIT_BROKER, EXIT_OPERATOR, EXIT_UNKNOWN_MAJOR
from tests.own_sources import ROOT
from tests.streams.collect import collecting
from tests.streams.collect.collecting import block

pytestmark = pytest.mark.full

# Exact scores, answers under two tokens dropped, equal groups kept.
TOML = """
app = "{app}"
[kafka]
bootstrap_servers = "{bootstrap}"
partitions = {partitions}
deadline_s = {deadline_s}
[store]
url = "../store"
[[score]]
name = "exact"
use = "streams.scores.exact:exact"
[verify]
filter = {{ min_tokens = 2 }}
[collect]
deadline_s = 3600
difficulty = {{ on = false }}
snapshot_s = 1.0
"""
NUM_GROUPS = 400
NUM_PARTITIONS = 6
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


def worker_command(
    app: str, bootstrap: str, folder: Path, disk: str = "disk", *, partitions: int = 2, deadline_s: float = 20.0
) -> list[str]:
    """A stream worker as a process. folder: of the store and of its own disk."""
    config = folder / disk / "headrace.toml"
    config.parent.mkdir()
    config.write_text(TOML.format(app=app, bootstrap=bootstrap, partitions=partitions, deadline_s=deadline_s))
    return [sys.executable, "-m", "infra.cli.main", "process", "-c", str(config)]


@asynccontextmanager
async def opened(bootstrap: str, app: str, folder: Path, *, partitions: int = 2) -> AsyncIterator[Log]:
    bus = KafkaBus(bootstrap)
    await bus.start()
    try:
        log = Log(bus, app, store=DirectoryStore(folder / "store"))
        await log.create_topics(partitions=partitions, keep_ms=24 * 3600 * 1000)
        yield log
    finally:
        await bus.close()


class Crew:
    """Worker processes of one app, replaced when they are killed by others with an empty disk."""

    def __init__(self, bootstrap: str, app: str, folder: Path, size: int) -> None:
        self._place, self._num_disks = (app, bootstrap, folder), 0
        self.said = folder / "workers.log"
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
        command = worker_command(*self._place, f"disk-{self._num_disks}", partitions=NUM_PARTITIONS)
        return subprocess.Popen(command, cwd=ROOT, stdout=self._output, stderr=self._output)


@contextmanager
def crew(bootstrap: str, app: str, folder: Path, size: int) -> Iterator[Crew]:
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
        async for message in log.scan(PROGRESS)
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
    async for message in log.scan(BUFFER):
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
        async for message in log.scan(DEAD_LETTERS)
        if isinstance(message.value, DeadLetter)
    }


async def test_three_workers_killed_at_will_fill_the_buffer_as_one_does(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    """The same input through one worker in peace and through three under fire."""
    records, chosen = traffic(seed=11), random.Random(23)
    num_poison = sum(isinstance(record, bytes) for record in records)
    async with opened(kafka, f"{app_name}-one", tmp_path / "one", partitions=NUM_PARTITIONS) as one:
        await feed(one, records, 0.0)
        with crew(kafka, one.app, tmp_path / "one", 1) as workers:
            expected = await all_closed(one, workers)
            assert workers.stop() == [0]
        async with opened(kafka, f"{app_name}-three", tmp_path / "three", partitions=NUM_PARTITIONS) as three:
            with crew(kafka, three.app, tmp_path / "three", 3) as workers:
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
            assert found == expected
            assert len(await letters(three)) == len(await letters(one)) == num_poison


async def ended(command: list[str], within_s: float = 90.0) -> tuple[int, str]:
    """Exit code of a worker that ends by itself, and what it said."""
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
    )
    return done.returncode, done.stderr


def newer_major(frame: bytes) -> bytes:
    """The same frame as a later headrace would mark it."""
    return frame[:2] + bytes([SEALED_FORMAT + 1]) + frame[3:]


async def test_a_newer_major_stops_the_worker_before_the_ack(kafka: str, app_name: str, tmp_path: Path) -> None:
    async with opened(kafka, app_name, tmp_path) as log:
        await log.publish(EXPERIENCES, block(collecting.answer("t.0", 0)), partition=0)
        frame = newer_major(encode(block(collecting.answer("t.0", 1))))
        await log.bus.send(log.name(EXPERIENCES), frame, key=b"t.0", partition=0)
        code, said = await ended(worker_command(app_name, kafka, tmp_path))
        assert code == EXIT_UNKNOWN_MAJOR and "upgrade readers first" in said
        committed = await log.bus.committed(log.group("verify"), log.name(EXPERIENCES))
        assert committed[Partition(log.name(EXPERIENCES), 0)] <= 1


async def skip_once_gone(log: Log) -> list[Lost]:
    """Skip what was lost, once the broker counts the dead worker no more."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await skip_lost(log, "verify")
            except ConfigError:
                await asyncio.sleep(0.5)


async def first_verified(log: Log) -> None:
    async with asyncio.timeout(60):
        async for message in log.tail(VERIFIED, "beginning"):
            if isinstance(message.value, Block):
                return


async def test_records_deleted_unread_stop_the_worker_until_somebody_skips_them(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    async with opened(kafka, app_name, tmp_path) as log:
        await log.bus.commit_beginnings(log.group("verify"), log.name(EXPERIENCES))
        for episode in range(4):
            await log.publish(EXPERIENCES, block(collecting.answer("t.0", episode, size=4)), partition=0)
        await log.bus.delete_records(Partition(log.name(EXPERIENCES), 0), 3)
        command = worker_command(app_name, kafka, tmp_path)
        code, said = await ended(command)
        assert code == EXIT_OPERATOR, "a restart would only meet it again"
        assert "`headrace skip verify`" in said
        (lost,) = await skip_once_gone(log)
        assert (lost.topic, lost.partition, lost.start, lost.stop) == (EXPERIENCES, 0, 0, 3)
        assert await skip_lost(log, "verify") == [], "once is enough"
        (letter,) = [message.value async for message in log.scan(DEAD_LETTERS)]
        assert isinstance(letter, DeadLetter) and "offsets 0 to 2 were deleted" in letter.error
        with started(command, tmp_path / "worker.log"):
            await first_verified(log)


@contextmanager
def started(command: list[str], said: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker until the end of the block."""
    with said.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_worker_whose_broker_falls_silent_ends_by_itself(app_name: str, tmp_path: Path) -> None:
    """Frozen, not gone: connections stay open and nothing answers, so that Faust waits for ever for its acknowledgements."""
    said = tmp_path / "worker.log"
    with EmbeddedKafka(tmp_path / "kafka") as broker:
        assert broker.pid is not None
        async with opened(broker.bootstrap, app_name, tmp_path) as log:
            command = worker_command(app_name, broker.bootstrap, tmp_path, deadline_s=25.0)
            with started(command, said) as process:
                async with asyncio.timeout(60):
                    async for message in log.tail(REPORTS, "beginning"):
                        if isinstance(message.value, Progress) and message.value.partitions.get("collect"):
                            break
                for group in range(200):
                    await log.publish(EXPERIENCES, block(collecting.answer(f"t.{group}", 0, size=1)))
                os.killpg(broker.pid, signal.SIGSTOP)
                try:
                    code = await asyncio.to_thread(process.wait, 180)
                finally:
                    os.killpg(broker.pid, signal.SIGCONT)
    assert code in (EXIT_BROKER, EXIT_STUCK), said.read_text()[-2000:]
