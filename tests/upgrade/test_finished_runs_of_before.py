"""A run that an earlier release finished can be looked at, though its broker's folder lacks a topic of this one."""

import asyncio
from pathlib import Path

import pytest

from infra.cli.connect import bootstrap_of, kafka_folder, reading
from infra.cli.look.status import read_status
from infra.cli.settings import load_settings
from infra.local.broker import EmbeddedKafka
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas.topics import ALL, REPORTS, topic_config

pytestmark = pytest.mark.full


def test_a_finished_run_without_the_topic_of_reports_can_be_looked_at(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text('app = "before"\n[kafka]\npartitions = 1\n[policy]\nmodel = "model"\n[store]\nurl = "store"\n')
    settings = load_settings(config)
    broker = EmbeddedKafka(kafka_folder(settings))
    broker.start()

    async def fill() -> None:
        bus = KafkaBus(bootstrap_of(settings))
        await bus.start()
        try:
            log = Log(bus, settings.app)
            for topic in ALL:
                if topic is not REPORTS:
                    await bus.create_topic(log.name(topic), 1, topic_config(topic, -1))
        finally:
            await bus.close()

    async def look() -> None:
        async with reading(settings) as log:
            state = await read_status(log, now_s=0.0, max_lag=100)
        assert state["roles"] == []

    try:
        asyncio.run(fill())
    finally:
        broker.stop()
    asyncio.run(look())
