"""The broker's disk is full under every role: they wait or end in one line, and learning goes on once there is room."""

import asyncio
from pathlib import Path

import pytest

from infra.local.broker import EmbeddedKafka
from tests.e2e.light_system import REPOSITORY, Fleet, Running, opened, prepare
from tests.e2e.test_full_disk import fill_disk

pytestmark = pytest.mark.slow

ROLES = ("master", "process", "explore", "train", "serve")


def test_a_full_disk_of_the_broker_costs_no_role_an_answer_and_learning_goes_on_once_there_is_room(
    app_name: str, tmp_path: Path
) -> None:
    async def main(broker: EmbeddedKafka, fleet: Fleet, key: str) -> None:
        async with opened(broker.bootstrap, app_name, fleet, key) as system:
            running = [await system.start(REPOSITORY, role) for role in ROLES]
            loaded = fleet.call(REPOSITORY, "load", "tasks", str(tmp_path / "tasks.jsonl"))
            assert loaded.returncode == 0, loaded.stderr
            await system.learned(2)
            fill_disk(broker)
            assert await asyncio.to_thread(broker.wait) != 0, "a broker whose only disk fails ends"
            broker.kill()
            await asyncio.to_thread(broker.start)
            for one in running:
                if one.watched.process.poll() is not None:
                    assert ended_in_a_line(one), one.log.read_text()[-3000:]
                    await fleet.kill(one)
                    await system.start(REPOSITORY, one.role)
            await system.learned(2)
            assert await system.stop_all() == {}
            judged = await system.judged()
        assert judged["lost"] == judged["trained_twice"] == 0 and judged["audit_clean"], judged
        assert judged["acknowledged"] and judged["trained"]

    with EmbeddedKafka(tmp_path / "kafka") as broker:
        key = prepare(tmp_path, broker.bootstrap, app=app_name, dtype="float32")
        with Fleet(tmp_path) as fleet:
            made = fleet.call(REPOSITORY, "check", "--create")
            assert made.returncode == 0, made.stdout + made.stderr
            asyncio.run(main(broker, fleet, key))


def ended_in_a_line(one: Running) -> bool:
    """Whether its last words are one line that names the broker."""
    last = one.log.read_text(errors="replace").strip().splitlines()[-1]
    return last.startswith("headrace: ") and "broker" in last
