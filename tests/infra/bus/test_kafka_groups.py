"""Groups whose members were killed: whoever joins waits for them to expire, and takes that for what it is."""

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest

from infra.log.kafka import KafkaBus
from schemas.topics import EXPERIENCES, topic_config

DEADLINE_S = 90.0
MEMBER = """
import asyncio, sys
from infra.log.kafka import KafkaBus

async def join(bootstrap: str, topic: str) -> None:
    bus = KafkaBus(bootstrap)
    await bus.start()
    reader = await bus.subscribed([topic], group=topic)
    while not reader.positions():
        await reader.get_many(timeout_s=0.1)
    print("joined", flush=True)
    await asyncio.Event().wait()

asyncio.run(join(*sys.argv[1:]))
"""


@pytest.mark.full
def test_joining_a_group_with_a_killed_member_is_no_broker_that_is_away(kafka: str, app_name: str) -> None:
    async def run() -> None:
        bus = KafkaBus(kafka, deadline_s=2.0)
        await bus.start()
        await bus.create_topic(app_name, 1, topic_config(EXPERIENCES, 60_000_000))
        await bus.send(app_name, b"x", key=b"k")
        member = await asyncio.create_subprocess_exec(sys.executable, "-c", MEMBER, kafka, app_name, stdout=PIPE)
        assert member.stdout is not None
        assert await member.stdout.readline() == b"joined\n"
        member.kill()
        await member.wait()
        reader = await bus.subscribed([app_name], group=app_name)
        async with asyncio.timeout(DEADLINE_S):
            while not (records := await reader.get_many(timeout_s=0.5)):
                pass
        assert [record.value for record in records] == [b"x"]
        await reader.close()
        await bus.close()

    asyncio.run(run())
