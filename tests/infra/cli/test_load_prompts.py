"""Recorded production prompts as an eval suite: the newest, each once, with whose data it is."""

import asyncio

from msgspec.structs import replace

from infra.cli.data.prompts import newest_prompts, recorded
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Block, Experience, Message, topics
from tests.schemas.record_samples import group_block


def asked(number: int, prompt: str, lane: str = "live") -> Experience:
    base = group_block(num_members=1).experiences[0]
    messages = (Message(role="user", content=prompt), Message(role="assistant", content="yes"))
    one = replace(base.with_bulk(messages=messages), id=f"g{number}.0-0-0", group=f"g{number}", subject="ann")
    return replace(one, lane=lane)  # type: ignore[arg-type]


def test_the_newest_prompt_comes_first_and_each_once() -> None:
    found = [(1, asked(1, "old?")), (3, asked(3, "new?")), (2, asked(2, "new?"))]
    tasks = list(newest_prompts(found, "production"))
    assert [task.messages[0].content for task in tasks] == ["new?", "old?"]
    assert all(task.split == "production" and len(task.messages) == 1 for task in tasks)
    assert tasks[0].meta == {"experience": "g3.0-0-0"}
    assert [task.id for task in tasks] == [task.id for task in newest_prompts(found, "production")]


def test_what_is_sealed_becomes_no_task() -> None:
    open_, shut = asked(1, "open?"), replace(asked(2, "sealed?"), key_id="ann-00")
    tasks = newest_prompts([(1, open_), (2, shut)], "production")
    assert [task.messages[0].content for task in tasks] == ["open?"]


async def recorded_lanes() -> list[str]:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=2, keep_ms=1)
    for number, lane in enumerate(("live", "usual", "live")):
        await log.publish(topics.EXPERIENCES, Block(experiences=(asked(number, "why?", lane),)))
    return [one.lane for _, one in await recorded(log)]


def test_only_production_is_taken() -> None:

    assert asyncio.run(recorded_lanes()) == ["live", "live"]
