"""Two versions side by side: whole answers are compared, and what is left out is said."""

import asyncio
from pathlib import Path

import msgspec

from infra.cli.console.versions import MAX_TASKS
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, EvalResult, topics
from tests.infra.cli.console_rig import looking, of_suite
from tests.infra.cli.test_console_pages import text_of


def test_whole_answers_are_compared_and_what_is_not_shown_of_them_is_said(tmp_path: Path) -> None:
    """One pair differs behind what the index holds, one is the same; more pairs than are shown; a second sample of a task."""
    long = "so on " * 500

    def said(version: int, task: int, text: str, sample: int = 0) -> Block:
        one = of_suite(version, task)
        both = (one.messages[0], msgspec.structs.replace(one.messages[1], content=text))
        name = f"{one.group}.0-{sample}-0"
        return Block((msgspec.structs.replace(one, id=name, episode=sample, group_size=2).with_bulk(messages=both),))

    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        for version in (1, 4):
            result = EvalResult(policy="main", version=version, suite="dev", num_tasks=MAX_TASKS + 3, num_correct=1)
            await log.publish(topics.EVALS, result)
            await log.publish(topics.EXPERIENCES, said(version, 0, long + str(version)))
            await log.publish(topics.EXPERIENCES, said(version, 0, "another sample", sample=1))
            await log.publish(topics.EXPERIENCES, said(version, 1, long + "the same"))
            for task in range(2, MAX_TASKS + 3):
                await log.publish(topics.EXPERIENCES, said(version, task, f"version {version}"))
        async with looking(tmp_path, log) as (client, _):
            text = text_of(await client.get("/versions/compare?a=1&b=4&suite=dev"))
            assert f"{MAX_TASKS + 2} answers differ, 1 are the same" in text
            assert "2 more of these are not shown." in text and "2 more answers are not compared" in text
            assert "They differ only in the 1,001 characters that follow." in text

    asyncio.run(main())
