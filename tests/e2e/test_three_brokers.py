"""Three real brokers: any is lost at will, and nothing with it; topics are made with the copies and retention of the settings.

BROKER_KILLS=100 python -m pytest -m full tests/e2e/test_three_brokers.py     as many kills as one likes
"""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from typer.testing import CliRunner, Result

from infra.cli.main import app
from tests.actors.rig import until
from tests.e2e.broker_load import loaded
from tests.e2e.three_brokers import NODES, ThreeBrokers

pytestmark = pytest.mark.full
KILLS = int(os.environ.get("BROKER_KILLS", "3"))
ROLLING_EVERY = 20  # kills between rolling restarts
GROUPS_PER_S = 4.0  # of each of the two writers


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


def test_topics_are_made_with_the_copies_and_the_retention_of_the_settings(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    done = call(tmp_path, cluster, app_name, "check", "--create", "--set", "kafka.replication=4")
    assert done.exit_code == 2 and "InvalidReplicationFactorError" in done.output
    assert "topics created" in call(tmp_path, cluster, app_name, "check", "--create").stdout

    async def asked() -> tuple[set[int], dict[str, str]]:
        admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        await admin.start()
        try:
            described = [each for each in await admin.describe_topics() if each["topic"].startswith(app_name)]
            resource = ConfigResource(ConfigResourceType.TOPIC, f"{app_name}.experiences")
            (answer,) = await admin.describe_configs([resource])
            ((_, _, _, _, entries),) = answer.resources
        finally:
            await admin.close()
        copies = {len(partition["replicas"]) for each in described for partition in each["partitions"]}
        return copies, {name: value for name, value, *_ in entries}

    copies, config = asyncio.run(asked())
    assert copies == {3} and config["min.insync.replicas"] == "2"
    assert config["retention.ms"] == str(2 * 24 * 3600 * 1000)


async def attacked(cluster: ThreeBrokers, app_name: str, folder: Path) -> dict[str, object]:
    """What the ledgers say of a light load while brokers are killed in random order and, at times, restarted in turn."""
    chosen = random.Random(1)
    async with loaded(cluster.bootstrap, app_name, folder, GROUPS_PER_S) as load:
        await until(lambda: len(load.seen) > 10, seconds=60.0)  # both writers and the reader work
        for number in range(1, KILLS + 1):
            await asyncio.sleep(chosen.uniform(0.2, 2.0))
            node = chosen.choice(NODES)
            await asyncio.to_thread(cluster.kill, node)
            await asyncio.to_thread(cluster.start, node)
            if number % ROLLING_EVERY == 0 or number == KILLS:
                for other in NODES:
                    await asyncio.to_thread(cluster.restart, other)
        load.finish()
        await load.drained()
        return await load.judged()


def test_brokers_killed_one_after_the_other_and_restarted_in_turn_lose_nothing_and_double_nothing(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    judged = asyncio.run(attacked(cluster, app_name, tmp_path))
    assert judged["acknowledged"] and judged["trained"] and judged["audit_clean"]
    assert not any(judged[name] for name in ("lost", "trained_twice", "not_read", "pending", "shed")), judged
