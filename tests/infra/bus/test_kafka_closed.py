"""A reader of Kafka that is closed leaves nothing behind."""

import asyncio
import gc
import tracemalloc

import pytest

from infra.log.bus import Partition
from infra.log.kafka import KafkaBus
from schemas.topics import EXPERIENCES, topic_config

READERS = 6
VALUE, VALUES = 64 * 1024, 64  # bytes, and how many: 4 MiB


@pytest.mark.slow
def test_what_a_reader_fetched_ahead_goes_with_it(kafka: str, app_name: str) -> None:
    async def left_bytes() -> float:
        bus, topic = KafkaBus(kafka), f"{app_name}.topic"
        await bus.start()
        try:
            await bus.create_topic(topic, 1, topic_config(EXPERIENCES, -1))
            at = Partition(topic, 0)
            await asyncio.gather(*(bus.send(topic, bytes(VALUE), key=b"k") for _ in range(VALUES)))

            async def read_one() -> None:
                reader = await bus.assigned({at: 0})
                while not await reader.get_many(timeout_s=1.0, max_records=1):
                    pass
                await reader.close()

            await read_one()
            gc.collect()
            gc.disable()  # what only a search for garbage finds is left behind
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(READERS):
                await read_one()
            return (tracemalloc.get_traced_memory()[0] - before) / READERS
        finally:
            gc.enable()
            await bus.close()

    tracemalloc.start()
    try:
        assert asyncio.run(left_bytes()) < VALUE * VALUES / 8
    finally:
        tracemalloc.stop()
