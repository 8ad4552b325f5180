"""An app that lost its broker and its store comes back from a backup, on a real broker."""

import asyncio
import threading
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
PER_GROUP_S = 0.2  # so that the newest checkpoint is kept for as long as a copy takes
MORE = msgspec.structs.replace(CONFIG, max_steps=STEPS + STEPS_MORE)
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
        found[topic.name] = [message.record async for message in log.read_all(topic)]
    return {name: sorted(records, key=lambda one: (one.partition, one.offset)) for name, records in found.items()}


async def edges(log: Log) -> Edges:
    """Where each partition begins and ends."""
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


async def go_on(bootstrap: str, folder: Path, groups_from: int = 2 * STEPS, more: int = STEPS_MORE) -> list[int]:
    """Train more steps on more groups; all steps of the journal."""
    async with OpenedLog(bootstrap, folder) as log:
        assert log.store is not None
        for sequence in range(groups_from, groups_from + 2 * more):
            await log.publish(topics.BUFFER, block(sequence))
        before = steps_of([message async for message in log.read_all(topics.BATCHES)])
        counted = [item for item in before if item.phase == "train"]
        config = msgspec.structs.replace(CONFIG, max_steps=len({each.step for each in counted}) + more)
        await train(log, log.store, ScriptedLearner(), config)
        return [entry.step for entry in await journal(log) if isinstance(entry, Batch)]


def steps_of(messages: Sequence[LogMessage]) -> list[Batch]:
    return [message.value for message in messages if isinstance(message.value, Batch)]


async def work(bootstrap: str, folder: Path, begun: threading.Event, enough: threading.Event) -> None:
    """Publish groups and train on them until it is enough; begun: set behind the first checkpoint."""

    async def feed(log: Log) -> None:
        sequence = 0
        while True:
            await log.publish(topics.BUFFER, block(sequence))
            sequence += 1
            await asyncio.sleep(PER_GROUP_S)

    async with OpenedLog(bootstrap, folder) as log:
        assert log.store is not None
        await log.create_topics(partitions=2, keep_ms=-1)
        for number in range(4):
            await log.publish(topics.BUFFER, block(number, "expert"))
        feeding = asyncio.create_task(feed(log))
        steps = STEPS
        while not enough.is_set():
            await train(log, log.store, ScriptedLearner(), msgspec.structs.replace(CONFIG, max_steps=steps))
            begun.set()
            steps += 3
        feeding.cancel()


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
        assert again.exit_code == 2 and "name another place" in again.output
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


def test_a_backup_of_an_app_that_works_meanwhile_is_a_beginning_of_it_and_can_be_gone_on_from(tmp_path: Path) -> None:
    backup, begun, enough = tmp_path / "backup", threading.Event(), threading.Event()
    with EmbeddedKafka(tmp_path / "kafka-1") as first:
        old = settings(tmp_path / "old", first.bootstrap)
        working = threading.Thread(target=lambda: asyncio.run(work(first.bootstrap, old, begun, enough)))
        working.start()
        try:
            assert begun.wait(60)
            done = call(old, "backup", str(backup))
            while done.exit_code == 2 and "Type the command again" in done.output:
                done = call(old, "backup", str(backup))
        finally:
            enough.set()
            working.join()
        assert done.exit_code == 0, done.output
        records = asyncio.run(after(first.bootstrap, old))[0]
    with EmbeddedKafka(tmp_path / "kafka-2") as second:
        new = settings(tmp_path / "new", second.bootstrap)
        assert call(new, "restore", str(backup)).exit_code == 0
        found, bounds, _ = asyncio.run(after(second.bootstrap, new))
        ends = {(name, part): end for name, (_, ends) in bounds.items() for part, end in ends.items()}
        assert found == {
            name: [item for item in some if item.offset < ends[name, item.partition]] for name, some in records.items()
        }
        assert len(found["batches"]) < len(records["batches"]), "it worked on behind the copy"
        audited = call(new, "audit")
        assert audited.exit_code == 0, audited.output
        groups = {record.key for record in found["buffer"] if record.key.startswith(b"usual")}
        steps = asyncio.run(go_on(second.bootstrap, new, len(groups)))
        assert sorted(steps) == list(range(len(steps)))
