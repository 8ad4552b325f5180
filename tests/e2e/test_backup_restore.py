"""An app that lost its broker and its store comes back from a backup, on a real broker."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.local.broker import EmbeddedKafka
from infra.log.bus import Partition, Record
from infra.log.kafka import KafkaBus
from infra.log.log import Log, LogMessage
from infra.store.directory import DirectoryStore
from schemas import Batch, decode, topics
from tests.trainer.memory_run import CONFIG, STEPS, block, journal, train
from trainer.learners.scripted import ScriptedLearner

pytestmark = pytest.mark.full

STEPS_MORE = 6
GROUP = "t.verify"
Edges = dict[str, tuple[dict[int, int], dict[int, int]]]


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, [*arguments, "-c", str(folder / "headrace.toml")], env={"COLUMNS": "200", "TERM": "dumb"}
    )


def settings(folder: Path, bootstrap: str) -> Path:
    folder.mkdir()
    file = folder / "headrace.toml"
    file.write_text(f'app = "t"\n[kafka]\nbootstrap_servers = "{bootstrap}"\npartitions = 2\n[store]\nurl = "store"\n')
    return folder


async def everything(log: Log) -> dict[str, list[Record]]:
    """All records, with offsets and times."""
    found: dict[str, list[Record]] = {}
    for topic in topics.ALL:
        found[topic.name] = [message.record async for message in log.scan(topic)]
    return {name: sorted(records, key=lambda one: (one.partition, one.offset)) for name, records in found.items()}


async def edges(log: Log) -> Edges:
    """First and end offset of each partition."""
    return {topic.name: await log.bounds(topic) for topic in topics.ALL}


class OpenedLog:
    """A log on a broker, for as long as the block takes."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.store = DirectoryStore(folder / "store")
        self.bus = KafkaBus(bootstrap, deadline_s=30)

    async def __aenter__(self) -> Log:
        await self.bus.start()
        return Log(self.bus, "t", store=self.store)

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()


async def lived(bootstrap: str, folder: Path) -> tuple[dict[str, list[Record]], Edges]:
    """An app with a past: trained, trimmed, with committed offsets."""
    async with OpenedLog(bootstrap, folder) as log:
        assert log.store is not None
        await log.create_topics(partitions=2, keep_ms=-1)
        for number in range(4):
            await log.publish(topics.BUFFER, block(number, "expert"))
        for sequence in range(2 * STEPS):
            await log.publish(topics.BUFFER, block(sequence))
            await log.publish(topics.VERIFIED, block(sequence))
        await train(log, log.store, ScriptedLearner())
        trimmed = Partition(log.name(topics.VERIFIED), 0)
        await log.bus.delete_records(trimmed, 3)
        reader = await log.bus.assigned({trimmed: 3}, group=GROUP)
        await reader.commit({trimmed: 5})
        await reader.close()
        return await everything(log), await edges(log)


async def after(bootstrap: str, folder: Path) -> tuple[dict[str, list[Record]], Edges, dict[Partition, int]]:
    async with OpenedLog(bootstrap, folder) as log:
        return await everything(log), await edges(log), await log.bus.committed(GROUP, log.name(topics.VERIFIED))


async def go_on(bootstrap: str, folder: Path) -> list[int]:
    """Train more steps on more groups; all steps of the journal."""
    async with OpenedLog(bootstrap, folder) as log:
        assert log.store is not None
        for sequence in range(2 * STEPS, 2 * (STEPS + STEPS_MORE)):
            await log.publish(topics.BUFFER, block(sequence))
        before = steps_of([message async for message in log.scan(topics.BATCHES)])
        counted = [item for item in before if item.phase == "train"]
        config = msgspec.structs.replace(CONFIG, max_steps=len({each.step for each in counted}) + STEPS_MORE)
        await train(log, log.store, ScriptedLearner(), config)
        return [entry.step for entry in await journal(log) if isinstance(entry, Batch)]


def steps_of(messages: Sequence[LogMessage]) -> list[Batch]:
    return [message.value for message in messages if isinstance(message.value, Batch)]


def test_a_restored_app_has_every_record_at_its_offset_and_time_and_its_trainer_goes_on(tmp_path: Path) -> None:
    backup, keys = tmp_path / "backup", tmp_path / "keys"
    with EmbeddedKafka(tmp_path / "kafka-1") as first:
        old = settings(tmp_path / "old", first.bootstrap)
        store = DirectoryStore(old / "store")
        records, bounds = asyncio.run(lived(first.bootstrap, old))
        store.put("gateway/secret", b"s" * 32)
        done = call(old, "backup", str(backup), "--keys", str(keys))
        assert done.exit_code == 0 and "whole" in done.output, done.output
        again = call(old, "backup", str(backup))
        assert again.exit_code == 2 and "choose another place" in again.output
    assert not list(DirectoryStore(backup).keys("gateway/"))
    with EmbeddedKafka(tmp_path / "kafka-2") as second:
        new = settings(tmp_path / "new", second.bootstrap)
        done = call(new, "restore", str(backup), "--keys", str(keys))
        assert done.exit_code == 0, done.output
        found, there, committed = asyncio.run(after(second.bootstrap, new))
        assert there == bounds and found == records
        assert committed == {Partition("t.verified", 0): 5}
        restored = DirectoryStore(new / "store")
        assert {key: restored.get(key) for key in restored.keys("")} == {key: store.get(key) for key in store.keys("")}
        assert call(new, "audit").exit_code == 0
        restored.delete("gateway/secret")
        back = call(new, "restore", "--keys", str(keys))
        assert (back.exit_code, restored.get("gateway/secret")) == (0, b"s" * 32), back.output
        refused = call(new, "restore", str(backup))
        assert refused.exit_code == 2 and "nothing was changed" in refused.output
        steps = asyncio.run(go_on(second.bootstrap, new))
        before = len([record for record in records["batches"] if isinstance(decode(record.value), Batch)])
        assert steps == list(range(before + STEPS_MORE))
