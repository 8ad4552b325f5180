"""What an explorer reports to hold is not issued again, however long it runs; what nobody holds is."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from actors.config import EvalSuite, MasterConfig
from actors.engines.scripted import ScriptedEngine
from actors.master.plan import Plan
from actors.rollout.scheduler import Scheduler, issued_of
from infra.settings.config import Pacing
from schemas import Message, PolicyEvent, Progress, Task
from schemas.reports import MAX_HELD
from schemas.topics import REPORTS, TASKS
from tests.actors.acting import eval_tasks, reissues, rollouts
from tests.actors.rig import EXPLORE, FLOOR, TopicArrivals, explorer, folder_store, memory_log, running, until
from tests.actors.test_explorer import ask, issue

REPORT_S = 2
HALF_AN_HOUR_S = 1800


def plan(config: MasterConfig | None = None, pacing: Pacing | None = None, *, split: str = "train") -> Plan:
    made = Plan(config or MasterConfig(), pacing or Pacing(groups_per_step=1, max_staleness=0), policy="main")
    made.tick(1)
    made.task(Task(id="task", messages=(Message(role="user", content="?"),), split=split))
    return made


def report(made: Plan, at_s: float, holds: dict[str, int] | None) -> None:
    made.tick(int(1000 * at_s))
    made.progress(Progress(role="explore", instance="e", life="working", holds=holds), int(1000 * at_s))


def test_a_group_of_half_an_hour_is_issued_once() -> None:
    """With the settings as they come, and an explorer that reports what it holds as often as the role does."""
    made = plan()
    scheduler = Scheduler(max_episodes=8)
    (task,) = rollouts(made)
    scheduler.waiting.add(task)
    assert scheduler.take(0) is task
    attempts = {issued_of(task).attempt}
    for at_s in range(1, HALF_AN_HOUR_S, REPORT_S):
        tells = at_s % (made.pacing.reissue_s / 3) < REPORT_S
        report(made, at_s, scheduler.holds(MAX_HELD) if tells else None)
        attempts |= {issued_of(one).attempt for one in reissues(made)}
    assert attempts == {0}


def test_what_a_dead_explorer_held_is_issued_again_when_nobody_has_told_of_it_for_reissue_s() -> None:
    made = plan()
    (task,) = rollouts(made)
    group = issued_of(task).group
    last_told_s = 600
    for at_s in range(1, last_told_s + 1):
        report(made, at_s, {group: 0})
    for at_s in range(last_told_s + 1, last_told_s + 300):
        report(made, at_s, {})
    assert reissues(made) == []
    report(made, last_told_s + 300, {})
    assert [issued_of(one).attempt for one in reissues(made)] == [1]


def test_who_still_holds_an_older_attempt_does_not_speak_for_the_newest() -> None:
    made = plan(pacing=Pacing(groups_per_step=1, max_staleness=0, reissue_s=10.0))
    (task,) = rollouts(made)
    group = issued_of(task).group
    for at_s in range(1, 12):
        report(made, at_s, None)
    assert [issued_of(one).attempt for one in reissues(made)] == [1]
    for at_s in range(12, 23):
        report(made, at_s, {group: 0})
    assert [issued_of(one).attempt for one in reissues(made)] == [2]


def test_an_eval_that_runs_long_is_issued_once() -> None:
    made = plan(MasterConfig(evals=(EvalSuite(suite="dev", tasks=1),)), split="dev")
    made.policy(PolicyEvent(event="published", policy="main", version=0, token=1, manifest="m"), 0)
    (task,) = eval_tasks(made)
    group = issued_of(task).group
    for at_s in range(1, HALF_AN_HOUR_S, REPORT_S):
        report(made, at_s, {group: 0})
        assert reissues(made) == []
    for at_s in range(HALF_AN_HOUR_S, HALF_AN_HOUR_S + 302, REPORT_S):
        report(made, at_s, {})
    assert [issued_of(one).group for one in reissues(made)] == [group]


def test_a_word_on_what_was_never_issued_changes_nothing() -> None:
    made = plan()
    report(made, 1, {"task.7": 0, "eval-dev-3.0": 0, "eval-other-9.4": 2})
    assert not made.admission.outstanding and not made.evals.requests


def test_an_explorer_reports_what_it_runs_and_what_waits_with_it_until_it_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        log = await memory_log()
        heard = TopicArrivals(log, REPORTS)
        assert FLOOR.pacing.reissue_s == 300.0, "told often enough, since the settings of the test report every 0.05 s"
        floor = replace(FLOOR, pacing=replace(FLOOR.pacing, reissue_s=0.15))
        engine = ScriptedEngine(token_s=0.2)
        loops = explorer(log, folder_store(tmp_path), engine, EXPLORE, floor=floor)
        async with running(loops, asyncio.create_task(heard.listen())):
            await log.publish(TASKS, issue("now", attempt=3))
            await log.publish(TASKS, issue("later", min_version=9))
            await log.publish(TASKS, ask(5))
            eval_group = issued_of(ask(5)).group

            def last() -> dict[str, int] | None:
                told = [one.holds for one in heard.of(Progress) if one.holds is not None]
                return told[-1] if told else None

            await until(lambda: last() == {"now.0": 3, "later.0": 0, eval_group: 0})
            await until(lambda: last() == {"later.0": 0, eval_group: 0})
            assert heard.of(Progress)[-1].partitions == {TASKS.name: (0, 1)}, "which the master sends to"

    asyncio.run(run())


def test_no_report_holds_more_than_a_record_may_and_what_runs_goes_first() -> None:
    scheduler = Scheduler(max_episodes=3)
    for sequence in range(4):
        scheduler.waiting.add(issue(f"t{sequence}", sequence))
    assert scheduler.take(0) is not None
    assert scheduler.holds(2) == {"t0.0": 0, "t1.0": 0}
