"""A plain aiokafka loop: getmany, the work, everything sent, one commit.

python -m infra.cli.bench.peers.loop BOOTSTRAP STAGE FORM SOURCE SINK
"""

import asyncio
import sys
from typing import cast

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from infra.cli.bench.peers.plain import FORMS, StageName, stage_of


async def run(bootstrap: str, stage: StageName, form: str, source: str, sink: str) -> None:
    """Take records of one topic and send what comes of them to another, for ever."""
    work, wire = stage_of(stage), FORMS[form]
    consumer = AIOKafkaConsumer(
        source, bootstrap_servers=bootstrap, group_id=f"{source}.group", auto_offset_reset="earliest",
        enable_auto_commit=False,
    )  # fmt: skip
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5, max_batch_size=1024 * 1024)
    await producer.start()
    await consumer.start()
    while True:
        found = await consumer.getmany(timeout_ms=1000, max_records=500)
        outputs = [
            out for records in found.values() for record in records for out in work.take(wire.decode(record.value))
        ]
        confirmed = [await producer.send(sink, wire.encode(one), key=one.group.encode()) for one in outputs]
        await asyncio.gather(*confirmed)
        if found:
            await consumer.commit()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], cast(StageName, sys.argv[2]), *sys.argv[3:6]))
