"""What a stream worker does when its input or its broker is not as it should be: it says so in one line and stops."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.cli.data.skip import skip_lost
from infra.local.broker import EmbeddedKafka
from infra.log.bus import Partition
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.roles.process import EXIT_STUCK
from schemas import Block, DeadLetter, Progress, encode
from schemas.topics import DEAD_LETTERS, EXPERIENCES, REPORTS, VERIFIED
from schemas.wire.frame import SEALED_FORMAT
from streams.stages.stage import EXIT_BROKER, EXIT_OPERATOR, EXIT_UNKNOWN_MAJOR
from tests.streams.collect.collecting import answer, block

pytestmark = pytest.mark.full

REPOSITORY = Path(__file__).parents[2]


async def prepared(bootstrap: str, app: str) -> Log:
    bus = KafkaBus(bootstrap)
    await bus.start()
    log = Log(bus, app)
    await log.create_topics(partitions=2, keep_ms=24 * 3600 * 1000)
    return log


def worker(bootstrap: str, app: str, folder: Path, deadline_s: float = 20.0) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.stream_worker", bootstrap, app, str(folder), str(deadline_s)],
        cwd=REPOSITORY,
        text=True,
        stderr=subprocess.PIPE,
    )


def ended(process: "subprocess.Popen[str]", within_s: float = 90.0) -> tuple[int, str]:
    """Exit code and what was said; the process is gone afterwards."""
    try:
        _, said = process.communicate(timeout=within_s)
        return process.returncode, said
    finally:
        process.kill()
        process.wait()


def newer_major(frame: bytes) -> bytes:
    """The same frame as a later headrace would mark it."""
    return frame[:2] + bytes([SEALED_FORMAT + 1]) + frame[3:]


def test_a_newer_major_stops_the_worker_before_the_ack(kafka: str, app_name: str, tmp_path: Path) -> None:
    async def feed() -> None:
        log = await prepared(kafka, app_name)
        await log.publish(EXPERIENCES, block(answer("t.0", 0)), partition=0)
        frame = newer_major(encode(block(answer("t.0", 1))))
        await log.bus.send(log.name(EXPERIENCES), frame, key=b"t.0", partition=0)
        await log.bus.close()

    async def committed() -> int:
        log = await prepared(kafka, app_name)
        offsets = await log.bus.committed(log.group("verify"), log.name(EXPERIENCES))
        await log.bus.close()
        return offsets[Partition(log.name(EXPERIENCES), 0)]

    asyncio.run(feed())
    code, said = ended(worker(kafka, app_name, tmp_path))
    assert code == EXIT_UNKNOWN_MAJOR
    assert "upgrade readers first" in said
    assert asyncio.run(committed()) <= 1


def test_records_deleted_unread_stop_the_worker_until_somebody_skips_them(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    async def feed() -> None:
        log = await prepared(kafka, app_name)
        await log.bus.commit_beginnings(log.group("verify"), log.name(EXPERIENCES))
        for episode in range(4):
            await log.publish(EXPERIENCES, block(answer("t.0", episode, size=4)), partition=0)
        await log.bus.delete_records(Partition(log.name(EXPERIENCES), 0), 3)
        await log.bus.close()

    asyncio.run(feed())
    code, said = ended(worker(kafka, app_name, tmp_path))
    assert code == EXIT_OPERATOR, "a restart would only meet it again"
    assert "`headrace skip verify`" in said

    async def skip() -> None:
        log = await prepared(kafka, app_name)
        try:
            (lost,) = await skip_lost(log, "verify")
            assert (lost.topic, lost.partition, lost.start, lost.stop) == (EXPERIENCES, 0, 0, 3)
            assert await skip_lost(log, "verify") == [], "once is enough"
            (letter,) = [message.value async for message in log.read_all(DEAD_LETTERS)]
            assert isinstance(letter, DeadLetter) and "offsets 0 to 2 were deleted" in letter.error
            process = worker(kafka, app_name, tmp_path)
            try:
                async with asyncio.timeout(60):
                    async for message in log.read_all(VERIFIED, until_end=False):
                        if isinstance(message.value, Block):
                            break
            finally:
                process.kill()
                process.wait()
        finally:
            await log.bus.close()

    asyncio.run(skip())


def test_a_worker_whose_broker_falls_silent_ends_by_itself(app_name: str, tmp_path: Path) -> None:
    """Frozen, not gone: connections stay open and nothing answers, so that Faust waits for ever for its acknowledgements."""
    with EmbeddedKafka(tmp_path / "kafka") as broker:
        log_file = tmp_path / "worker.log"

        async def feed() -> None:
            log = await prepared(broker.bootstrap, app_name)
            async with asyncio.timeout(60):
                async for message in log.read_all(REPORTS, until_end=False):
                    if isinstance(message.value, Progress) and message.value.partitions.get("collect"):
                        break
            for group in range(200):
                await log.publish(EXPERIENCES, block(answer(f"t.{group}", 0, size=1)))
            await log.bus.close()

        assert broker.pid is not None

        async def prepare() -> None:
            await (await prepared(broker.bootstrap, app_name)).bus.close()

        asyncio.run(prepare())
        with log_file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.stream_worker", broker.bootstrap, app_name, str(tmp_path), "25"],
                cwd=REPOSITORY,
                stderr=output,
            )
        try:
            asyncio.run(feed())
            os.killpg(broker.pid, signal.SIGSTOP)
            code = process.wait(timeout=180)
        finally:
            process.kill()
            process.wait()
            os.killpg(broker.pid, signal.SIGCONT)
        assert code in (EXIT_BROKER, EXIT_STUCK), log_file.read_text()[-2000:]
