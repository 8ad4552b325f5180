"""`headrace check` on an app that has started: a log or a store that was lost is told with the command that helps."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.roles.identity import claim
from infra.settings.config import Floor
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import PolicyEvent
from schemas.errors import StoreError
from schemas.topics import POLICIES

LEASE = PolicyEvent(event="lease", policy="main", owner="train/1")


def check(config: Path) -> tuple[int, str]:
    """Exit code and output, without its line breaks."""
    result = CliRunner().invoke(app, ["check", "-c", str(config)], env={"TERM": "dumb", "COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def settings(folder: Path, app_name: str, bootstrap: str = "") -> Path:
    file = folder / "headrace.toml"
    file.write_text(f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{bootstrap}"\npartitions = 1\n')
    return file


def test_an_app_that_has_not_begun_has_nothing_to_compare_and_nothing_is_made_for_it(tmp_path: Path) -> None:
    code, said = check(settings(tmp_path, "bot"))
    assert code == 0 and "compared" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace.toml"]


def test_a_store_whose_embedded_log_is_gone_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "store").put("checkpoints/bot/000000000001-0/manifest.json", b"{}")
    code, said = check(settings(tmp_path, "bot"))
    assert code == 2
    assert 'the log of app "bot" is empty' in said and "`headrace recover`" in said


def test_a_broker_that_does_not_answer_is_told_and_refuses_nothing(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "store").put("checkpoints/bot/000000000001-0/manifest.json", b"{}")
    code, said = check(settings(tmp_path, "bot", "127.0.0.1:1"))
    assert (
        code == 0
        and "log and store were not compared, as the roles do when they start: no broker answers at 127.0.0.1:1" in said
    )


class NoBucket(MemoryStore):
    """A store whose bucket is not there."""

    def get(self, key: str) -> bytes:
        raise StoreError(f"get {key}: NoSuchBucket")

    def keys(self, prefix: str) -> Iterator[str]:
        raise StoreError(f"list {prefix}: NoSuchBucket")


def test_a_bucket_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, "bot")
    config.write_text(config.read_text() + f'[store]\nuse = "{__name__}:NoBucket"\n')
    code, said = check(config)
    assert code == 1 and said.endswith("NoSuchBucket")


def test_a_password_of_the_broker_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, "bot", "127.0.0.1:1")
    secured = 'security_protocol = "SASL_PLAINTEXT"\nsasl_username = "a"\nsasl_password_env = "NOBODY_SET_THIS"\n'
    config.write_text(config.read_text() + secured)
    code, said = check(config)
    assert code == 2 and "kafka.sasl_password_env: the environment has no NOBODY_SET_THIS" in said


@pytest.mark.slow
def test_a_log_and_a_store_of_two_apps_and_a_store_that_is_gone_are_refused(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    async def main(name: str, *events: PolicyEvent, claimed: bool) -> None:
        bus = KafkaBus(kafka, deadline_s=30)
        await bus.start()
        log = Log(bus, name)
        await log.create_topics(partitions=1, keep_ms=-1)
        for event in events:
            await log.publish(POLICIES, event)
        if claimed:
            await claim(log, DirectoryStore(tmp_path / "store"), Floor(app=app_name))
        await bus.close()

    config = settings(tmp_path, app_name, kafka)
    published = PolicyEvent(event="published", policy="main", version=1, manifest="policies/main/0/manifests/1.json")
    asyncio.run(main(f"{app_name}-other", LEASE, claimed=True))
    asyncio.run(main(app_name, LEASE, published, claimed=False))
    code, said = check(config)
    assert code == 2 and "belongs to the log" in said and f'and the log of app "{app_name}" is' in said
    assert "`headrace recover`" in said
    shutil.rmtree(tmp_path / "store")
    code, said = check(config)
    assert code == 2 and "names policies/main/0/manifests/1.json, which is not in store (nothing is there)" in said
    assert not (tmp_path / "store").exists(), "looking makes nothing"
    asyncio.run(main(app_name, claimed=True))
    (tmp_path / "store" / "policies/main/0/manifests").mkdir(parents=True)
    assert check(config)[0] == 0
