"""Success rates of an earlier run: what its closures say, and the difficulty the tasks stage makes of it."""

import asyncio
from pathlib import Path

from actors.master.curriculum import smoothed
from actors.tasksets.loader import load_tasks, rated, recorded_rates
from infra.log.log import Log
from schemas import Closure, DeadLetter, Task
from schemas.topics import DEAD_LETTERS, PROGRESS, TASKSET
from streams.config import DifficultyConfig, StreamsConfig, TasksConfig
from tests.actors.rig import memory_log, task
from tests.streams.memory_worker import settled, working


def closure(group: str, mean_reward: float | None, **fields: object) -> Closure:
    return Closure(group=group, outcome="dropped", mean_reward=mean_reward, **fields)  # type: ignore[arg-type]


def test_rates_are_those_of_rollouts_as_the_curriculum_has_them() -> None:
    async def run() -> dict[str, float]:
        log = await memory_log()
        await log.publish_all(
            PROGRESS,
            [
                closure("a.0", 1.0), closure("a.1", 0.0), closure("b.0", None), closure("c.0", 7.0),
                closure("a.1", 1.0, revision=1), closure("d.0", 1.0, lane="live"), closure("eval-dev-3.0", 1.0),
            ],
        )  # fmt: skip
        return await recorded_rates(log)

    assert asyncio.run(run()) == {"a": smoothed(1.0, 0.0), "c": 1.0}


def test_another_app_takes_its_difficulty_from_the_record_and_drops_what_was_too_easy(tmp_path: Path) -> None:
    async def run() -> tuple[dict[str, float | None], list[str]]:
        old = await memory_log()
        await old.publish_all(PROGRESS, [closure("easy.0", 1.0), closure("middle.0", 0.25)])
        log = Log(old.bus, "next")
        await log.create_topics(partitions=2, keep_ms=-1)
        tasks = [task("easy"), task("middle", meta={"success_rate": 0.9}), task("new"), task("told", difficulty=0.7)]
        await load_tasks(log, rated(tasks, await recorded_rates(old), "success_rate"))
        config = StreamsConfig(tasks=TasksConfig(difficulty=DifficultyConfig(easiest=0.1)))
        async with working(log, config, tmp_path):
            await settled(log)
        kept = [one.value async for one in log.read_all(TASKSET) if isinstance(one.value, Task)]
        letters = [one.value async for one in log.read_all(DEAD_LETTERS) if isinstance(one.value, DeadLetter)]
        return {one.id: one.difficulty for one in kept}, [one.reason for one in letters]

    difficulty, dropped = asyncio.run(run())
    assert difficulty == {"middle": 0.75, "new": None, "told": 0.7}
    assert dropped == ["too easy"]
