"""The console over an archive of `headrace export`: what was said and measured of every version is there."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.cli.console.pages_look import ARCHIVED
from infra.cli.console.serve import source_of
from infra.cli.repeat.export import fill, records_from
from infra.cli.repeat.source import ReplaySource
from infra.cli.settings import Settings
from infra.ledger.archive import writing
from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import PolicyConfig, Use
from infra.store.memory import MemoryStore
from schemas import EvalResult, PolicyEvent, topics
from schemas.errors import OffsetOutOfRange
from tests.infra.cli.console_rig import looking_at
from tests.infra.cli.test_console_pages import text_of
from tests.trainer.memory_run import CONFIG, FLOOR, filled_log, train
from trainer.learners.scripted import ScriptedLearner
from trainer.replay.replay import find_start

SCRIPTED = "trainer.learners.scripted:ScriptedLearner"


def test_an_archive_of_before_can_be_exported_though_it_lacks_what_versions_were_said() -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        assert not await log.holds(topics.POLICIES)
        await log.create_topics(partitions=1, keep_ms=-1)
        assert await log.holds(topics.POLICIES)

    asyncio.run(main())


def test_an_export_ends_at_a_hole_in_a_topic_and_names_its_offset() -> None:
    class Compacted(Log):
        async def chunks(self, *args: Any, **kwargs: Any) -> AsyncGenerator[list[Record], None]:
            async for records in super().chunks(*args, **kwargs):
                yield [record for record in records if record.offset != 2]

    async def main() -> None:
        log = Compacted(MemoryBus(), "t")
        await log.create_topics(partitions=1, keep_ms=-1)
        for version in range(4):
            await log.publish(
                topics.EVALS, EvalResult(policy="main", version=version, suite="dev", num_tasks=1, num_correct=1)
            )
        read = []
        with pytest.raises(OffsetOutOfRange, match="evals: offset 2 is missing, the next record is 3"):
            async for record in records_from(log, topics.EVALS, 1):
                read.append(record.offset)
        assert read == [1]

    asyncio.run(main())


def test_an_archive_says_why_a_version_was_held_and_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "run.headrace"

    async def main() -> None:
        store = MemoryStore()
        log = await filled_log(store)
        config = msgspec.structs.replace(CONFIG, learner=Use(use=SCRIPTED))
        await train(log, store, ScriptedLearner(), config)
        for version in (0, 1):
            result = EvalResult(policy="main", version=version, suite="dev", num_tasks=4, num_correct=3 - version)
            await log.publish(topics.EVALS, result)
        held = PolicyEvent(
            event="held", policy="main", version=1, channel="stable", owner="gate", token=1,
            reason="dev: 0.500, expected at least 0.600", stats={"dev": 0.5, "stable/dev": 0.75},
        )  # fmt: skip
        await log.publish(topics.POLICIES, held)
        settings = Settings(app="t", pacing=FLOOR.pacing, policy=PolicyConfig(model="somebody/tiny"), trainer=config)
        with writing(file) as archive:
            start = await find_start(log, store, "t", to_step=None)
            counts = await fill(archive, ReplaySource(settings, log, store, "somebody/tiny"), start)
            archive.close()
        assert counts["evals"] == 2 and counts["policies"] > 2
        async with (
            source_of(file, []) as (read, restored, _, state),
            looking_at(read, restored, state) as (client, _),
        ):
            page = (await client.get("/versions/1")).text
            assert "Held back by gate: dev: 0.500, expected at least 0.600." in page and "0.75" in page
            assert "2 of 4" in page
            flow = text_of(await client.get("/"))
            assert ARCHIVED in flow and "No alarms." in flow, "roles that are not in it are no alarm"
            learning = (await client.get("/learning")).text
            assert "Suite dev" in learning and "Loss" in learning

    asyncio.run(main())
