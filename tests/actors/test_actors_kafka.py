"""Master and explorers on the real broker: the same loop as on the memory log, with one explorer killed."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.config import EvalSuite
from actors.engines.scripted import ScriptedEngine
from actors.rollout.scheduler import issued_of
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas import EvalResult, Experience, Issued, Task
from schemas.topics import EVALS, EXPERIENCES, TASKS
from tests.actors.rig import (
    MASTER,
    PACING,
    TopicArrivals,
    explorer,
    folder_store,
    load,
    master,
    running,
    streams,
    until,
)

pytestmark = pytest.mark.full


def test_rollouts_evals_and_reissues_on_the_real_broker(kafka: str, app_name: str, tmp_path: Path) -> None:
    async def run() -> tuple[list[Issued], list[Experience], list[EvalResult]]:
        store = folder_store(tmp_path)
        log = Log(KafkaBus(kafka), app_name)
        await log.bus.start()
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        await load(log, dev=50)
        config = replace(MASTER, evals=(EvalSuite(suite="dev", every=10, tasks=50),), eval_lead=0)
        tasks, heard, evals = TopicArrivals(log, TASKS), TopicArrivals(log, EXPERIENCES), TopicArrivals(log, EVALS)
        listening = [asyncio.create_task(one.listen()) for one in (tasks, heard, evals)]
        stuck = ScriptedEngine(token_s=60.0)
        pacing = replace(PACING, reissue_s=3.0)
        async with running(master(log, config, pacing), asyncio.create_task(streams(log)), *listening):
            async with running(explorer(log, store, stuck)):
                await until(lambda: stuck.num_running == 4 * MASTER.num_episodes + 50, seconds=60)
            async with running(explorer(log, store, ScriptedEngine())):

                def finished() -> bool:
                    rollouts = [one for one in heard.experiences if not one.suite]
                    return len(rollouts) >= 4 * MASTER.num_episodes and bool(evals.of(EvalResult))

                await until(finished, seconds=60)
        await log.bus.close()
        issued = [issued_of(one) for one in tasks.of(Task)]
        return issued, heard.experiences, evals.of(EvalResult)

    issued, experiences, results = asyncio.run(run())
    assert {one.attempt for one in experiences} == {1}
    assert len({one.id for one in experiences}) == len(experiences)
    assert {one.sequence for one in issued if not one.suite} == {0, 1, 2, 3}
    assert [(one.version, one.num_tasks) for one in results] == [(0, 50)]
