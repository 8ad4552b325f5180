"""The master on the memory log, with explorers on the scripted engine and a stand-in for streams and trainer."""

import asyncio
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from actors.config import EvalSuite, StopRule
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.rollout.scheduler import require_issued
from infra.log.log import Log
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import from_numpy
from infra.store.store import Store
from schemas import Closure, Drawn, EvalResult, Experience, Issued, Progress, Task
from schemas.topics import EVALS, EXPERIENCES, POLICIES, PROGRESS, REPORTS, TASKS
from tests.actors.rig import (
    MASTER,
    PACING,
    TopicArrivals,
    explorer,
    folder_store,
    load,
    master,
    memory_log,
    running,
    streams,
    until,
)
from tests.simulator.virtual_loop import run_virtual

SUITE = EvalSuite(suite="dev", every=2, tasks=3)


def listening(*heard: TopicArrivals) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(record.listen()) for record in heard]


def issued_in(heard: TopicArrivals) -> list[Issued]:
    return sorted((require_issued(task) for task in heard.of(Task)), key=lambda item: (item.sequence, item.attempt))


async def train(log: Log, store: Store, *, steps: int) -> dict[int, int]:
    """Draw full steps in issue order, publish a version after each; returns the staleness of what each step drew."""
    versions: dict[str, list[int]] = {}
    buffered: dict[int, str] = {}
    oldest: dict[int, int] = {}
    experiences, progress = TopicArrivals(log, EXPERIENCES), TopicArrivals(log, PROGRESS)
    async with running(*listening(experiences, progress)):
        for step in range(steps):
            size = PACING.groups_per_step

            def ready() -> bool:
                for closure in progress.of(Closure):
                    if closure.outcome == "buffered":
                        buffered[closure.sequence] = closure.group
                due = range(step * size, (step + 1) * size)  # noqa: B023
                return all(sequence in buffered for sequence in due)

            await until(ready)
            due = [buffered[sequence] for sequence in range(step * size, (step + 1) * size)]
            versions = {
                group: [experience.min_version for experience in experiences.experiences if experience.group == group]
                for group in due
            }
            oldest[step] = max(step - min(found) for found in versions.values())
            await log.publish(PROGRESS, Drawn(token=0, step=step, version=step, groups=tuple(due)))
            table = np.random.default_rng(step).normal(size=(128, 128)).astype(np.float32)
            event = await asyncio.to_thread(
                publish,
                store,
                NewVersion(policy="main", token=0, version=step + 1, parent=step, step=step),
                {TENSOR: from_numpy(table)},
                previous=None,
                probe=None,
            )
            await log.publish(POLICIES, event)
    return oldest


def test_master_explorers_and_a_trainer_turn_within_the_staleness_bound(tmp_path: Path) -> None:
    async def run() -> tuple[dict[int, int], list[Issued], list[Experience]]:
        store = folder_store(tmp_path)
        log = await memory_log()
        await load(log)
        tasks, heard = TopicArrivals(log, TASKS), TopicArrivals(log, EXPERIENCES)
        first, second = explorer(log, store, ScriptedEngine()), explorer(log, store, ScriptedEngine())
        roles = (master(log), first, second, asyncio.create_task(streams(log)))
        async with running(*roles, *listening(tasks, heard)):
            oldest = await train(log, store, steps=12)
        return oldest, issued_in(tasks), heard.experiences

    oldest, issued, experiences = run_virtual(run())
    assert max(oldest.values()) <= PACING.max_staleness
    assert len({issue.group for issue in issued}) == len(issued)
    assert [issue.sequence for issue in issued] == list(range(len(issued)))
    assert len({experience.id for experience in experiences}) == len(experiences)


def test_what_a_killed_explorer_held_is_issued_again_with_other_ids(tmp_path: Path) -> None:
    async def run() -> tuple[list[Issued], list[Experience]]:
        store = folder_store(tmp_path)
        log = await memory_log()
        await load(log)
        tasks, heard = TopicArrivals(log, TASKS), TopicArrivals(log, EXPERIENCES)
        stuck = ScriptedEngine(token_s=30.0)
        async with running(master(log), asyncio.create_task(streams(log)), *listening(tasks, heard)):
            async with running(explorer(log, store, stuck)):
                await until(lambda: stuck.num_running == 4 * MASTER.num_episodes)
            async with running(explorer(log, store, ScriptedEngine())):
                await until(lambda: len({experience.group for experience in heard.experiences}) == 4)
                await until(lambda: len(heard.experiences) == 4 * MASTER.num_episodes)
        return issued_in(tasks), heard.experiences

    issued, experiences = run_virtual(run())
    assert {experience.attempt for experience in experiences} == {1}
    for sequence in range(4):
        attempts = [issue for issue in issued if issue.sequence == sequence]
        assert [attempt.attempt for attempt in attempts] == [0, 1]
        assert len({attempt.group for attempt in attempts}) == 1


def test_a_restarted_master_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    async def run() -> tuple[list[Issued], list[EvalResult]]:
        store = folder_store(tmp_path)
        log = await memory_log()
        await load(log, dev=3)
        config = replace(MASTER, evals=(SUITE,), eval_lead=0)
        tasks, evals = TopicArrivals(log, TASKS), TopicArrivals(log, EVALS)
        progress, reports = TopicArrivals(log, PROGRESS), TopicArrivals(log, REPORTS)
        roles = (explorer(log, store, ScriptedEngine()), asyncio.create_task(streams(log)))
        async with running(*roles, *listening(tasks, evals, progress, reports)):
            async with running(master(log, config)):
                await until(lambda: bool(evals.of(EvalResult)) and len(issued_in(tasks)) == 4 + 3)
            before = len(reports.records)
            async with running(master(log, config)):
                await until(lambda: len(reports.records) > before + 20)
                groups = [item.group for item in issued_in(tasks) if not item.suite]
                await until(lambda: len(progress.of(Closure)) == 4)
                await log.publish(PROGRESS, Drawn(token=0, step=0, version=0, groups=tuple(groups[:2])))
                await until(lambda: len(issued_in(tasks)) == 6 + 3)
        return issued_in(tasks), evals.of(EvalResult)

    issued, results = run_virtual(run())
    assert [issue.sequence for issue in issued if not issue.suite] == list(range(6))
    assert [(result.version, result.suite, result.num_tasks, result.num_correct) for result in results] == [
        (0, "dev", 3, 3)
    ]


def test_accuracy_is_measured_at_the_pinned_versions_and_at_the_end(tmp_path: Path) -> None:
    async def run() -> tuple[list[EvalResult], list[Experience]]:
        store = folder_store(tmp_path)
        log = await memory_log()
        await load(log, dev=3)
        config = replace(MASTER, evals=(SUITE,), stop=StopRule(versions=5), eval_lead=2, drain="1500ms")
        evals, heard, progress = TopicArrivals(log, EVALS), TopicArrivals(log, EXPERIENCES), TopicArrivals(log, REPORTS)

        def correct(experience: Experience) -> bool:
            return experience.max_version >= 2

        roles = (master(log, config), explorer(log, store, ScriptedEngine()))
        stages = asyncio.create_task(streams(log, correct=correct))
        async with running(*roles, stages, *listening(evals, heard, progress)):
            await train(log, store, steps=5)

            def done() -> bool:
                return any(report.role == "master" and report.state == "done" for report in progress.of(Progress))

            await until(done, seconds=20)
        return evals.of(EvalResult), [experience for experience in heard.experiences if experience.suite]

    results, answers = run_virtual(run())
    assert [(item.version, item.num_correct) for item in sorted(results, key=lambda result: result.version)] == [
        (0, 0),
        (2, 3),
        (4, 3),
        (5, 3),
    ]
    assert all(answer.group.startswith(f"eval-dev-{answer.max_version}.") for answer in answers)
