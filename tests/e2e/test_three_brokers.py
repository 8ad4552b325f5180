"""Three real brokers: any one is lost at will, and nothing with it; topics are made with copies and keep their partitions."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas.errors import ConfigError
from tests.e2e.broker_loop import attacked, held
from tests.e2e.three_brokers import ThreeBrokers, Watcher

pytestmark = pytest.mark.full


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
    assert "topics created" in call(tmp_path, cluster, app_name, "check", "--create").stdout

    async def asked() -> tuple[set[int], dict[str, str]]:
        async with Watcher(cluster.bootstrap) as watcher:
            return await watcher.replicas(app_name), await watcher.config(f"{app_name}.experiences")

    copies, config = asyncio.run(asked())
    assert copies == {3}
    assert config["min.insync.replicas"] == "2"
    assert config["retention.ms"] == str(2 * 24 * 3600 * 1000)


def test_another_number_of_partitions_is_refused_in_one_line(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    assert call(tmp_path, cluster, app_name, "check", "--create").exit_code == 0
    done = call(tmp_path, cluster, app_name, "check", "--create", "--set", "kafka.partitions=4")
    assert done.exit_code == 2
    assert "got 2 partitions in the log, expected 4 (kafka.partitions)" in " ".join(done.output.split())


def test_more_copies_than_there_are_brokers_are_refused_in_one_line(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    done = call(tmp_path, cluster, app_name, "check", "--create", "--set", "kafka.replication=4")
    assert done.exit_code == 2 and "InvalidReplicationFactorError" in done.output


def test_no_role_starts_on_a_topic_that_was_given_more_partitions(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    """Keys would be elsewhere from then on, and stages join topics by partition."""
    assert call(tmp_path, cluster, app_name, "check", "--create").exit_code == 0

    async def grow_and_start() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        await admin.start()
        await admin.create_partitions({f"{app_name}.experiences": NewPartitions(5)})
        await admin.close()
        bus = KafkaBus(cluster.bootstrap)
        await bus.start()
        try:
            with pytest.raises(ConfigError, match=r"experiences: got 5 partitions .* expected 2"):
                await Log(bus, app_name).require_topics()
        finally:
            await bus.close()

    asyncio.run(grow_and_start())


def test_brokers_killed_one_after_the_other_and_restarted_in_turn_lose_nothing_and_double_nothing(
    cluster: ThreeBrokers, app_name: str, tmp_path: Path
) -> None:
    found, judged = asyncio.run(attacked(cluster, app_name, tmp_path, kills=3, seed=1))
    assert held(judged), judged
    assert judged["acknowledged"] and judged["trained"] and found.moves
    assert sum(found.kills.values()) == 3 and set(found.restarts.values()) == {1}
