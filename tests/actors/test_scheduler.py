"""The scheduler: what may start under which version, what an explorer says that it holds, and what is stopped and why."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec.structs import replace

from actors.config import ExploreConfig, MasterConfig
from actors.engines.scripted import ScriptedEngine
from actors.master.plan import Plan, rollout
from actors.rollout.explorer import run_explorer
from actors.rollout.scheduler import Scheduler, Stop, Waiting, require_issued
from actors.rollout.session import Session
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.config import Pacing
from schemas import Closure, Drawn, DropMarker, Issued, Message, Progress, Score, Task
from schemas.fields import GROUP_OVER
from schemas.records import MAX_HELD
from schemas.topics import EXPERIENCES, PROGRESS, REPORTS, TASKS, VERIFIED
from tests.actors.rig import (
    EOS,
    EXPLORE,
    FLOOR,
    MASTER,
    CharTokenizer,
    TopicArrivals,
    explorer,
    folder_store,
    memory_log,
    reissues,
    rollouts,
    running,
    task,
    until,
)
from tests.actors.test_explorer import ask, issue
from tests.role import role_of

turn = itertools.count()


async def never_ends(task: Task, session: Session) -> tuple[Score, ...]:
    await session.reply(task.messages)
    await asyncio.Event().wait()
    return ()


def named(name: str, **settings: object) -> ExploreConfig:
    return replace(EXPLORE, workflow=f"{__name__}:{name}", **settings)


class Rig:
    """An explorer with what it wrote. act: what happens; it ends when `act` returns."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.metrics = Metrics("explore")
        self.engine = ScriptedEngine()
        self.answers, self.markers, self.reports = (
            TopicArrivals(log, EXPERIENCES),
            TopicArrivals(log, VERIFIED),
            TopicArrivals(log, REPORTS),
        )

    def counters(self) -> dict[str, float]:
        return self.metrics.counters()

    def reasons(self) -> list[str]:
        return [marker.reason for marker in self.markers.of(DropMarker)]


def play(folder: Path, config: ExploreConfig, act: Callable[[Rig], Awaitable[None]]) -> Rig:
    global turn
    turn = itertools.count()

    async def run() -> Rig:
        rig = Rig(await memory_log())
        role = role_of("explore", FLOOR, rig.log, folder_store(folder), metrics=rig.metrics)
        heard = [item.listen() for item in (rig.answers, rig.markers, rig.reports)]
        loops = [run_explorer(role, config, rig.engine, CharTokenizer(), (EOS,)), *heard]
        async with running(*(asyncio.create_task(loop) for loop in loops)):
            await act(rig)
        return rig

    return asyncio.run(run())


def issue_group(name: str, *, episodes: int = 3, min_version: int = 0, attempt: int = 0) -> Task:
    config = replace(MASTER, num_episodes=episodes)
    return rollout(task(name), config, round=0, attempt=attempt, sequence=0, min_version=min_version)


def test_what_still_runs_of_a_group_that_was_closed_without_it_is_stopped(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.log.publish(TASKS, issue_group("add", attempt=1))
        await rig.log.publish(TASKS, issue_group("sub", attempt=1))
        await until(lambda: rig.metrics.gauges().get("episodes_in_flight") == 6)
        await rig.log.publish(PROGRESS, Closure(group="add.0", outcome="buffered", sequence=0))
        await until(lambda: len(rig.markers.records) == 3)

    rig = play(tmp_path, named("never_ends"), act)
    assert rig.reasons() == [GROUP_OVER] * 3
    assert {marker.group for marker in rig.markers.of(DropMarker)} == {"add.0"}
    assert {marker.attempt for marker in rig.markers.of(DropMarker)} == {1}, (
        "collect says of that attempt that it is over"
    )
    assert rig.counters()["episodes_cancelled{reason=group over}"] == 3


def test_what_waits_of_a_group_that_is_over_never_starts(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.log.publish(TASKS, issue_group("add", min_version=9))
        await until(lambda: rig.metrics.gauges().get("tasks_waiting") == 1)
        await rig.log.publish(PROGRESS, Drawn(token=1, step=1, version=1, groups=(), dropped={"add.0": "stale"}))
        await until(lambda: len(rig.markers.records) == 3)
        await until(lambda: rig.metrics.gauges().get("tasks_waiting") == 0)

    rig = play(tmp_path, named("never_ends"), act)
    assert rig.reasons() == [GROUP_OVER] * 3 and not rig.answers.experiences


async def test_an_episode_that_begins_when_its_group_is_stopped_is_stopped() -> None:
    stop = Stop()
    stop.now()
    episode = asyncio.create_task(asyncio.sleep(60))
    stop.watch(episode)
    await asyncio.wait([episode])
    assert episode.cancelled()


def waiting_task(
    group: str, *, attempt: int = 0, sequence: int = 0, min_version: int = 0, pinned: int | None = None
) -> Task:
    return Task(
        id="t",
        messages=(Message(role="user", content="?"),),
        issued=Issued(
            group=group,
            attempt=attempt,
            num_episodes=2,
            max_tokens=4,
            sequence=sequence,
            min_version=min_version,
            suite="" if pinned is None else "dev",
            version=-1 if pinned is None else pinned,
        ),
    )


def group_name(found: Task | None) -> str | None:
    return None if found is None else require_issued(found).group


def test_a_task_starts_only_under_a_version_that_it_allows_and_an_attempt_once() -> None:
    waiting = Waiting()
    for taken in (waiting_task("a", min_version=2), waiting_task("b", pinned=3), waiting_task("c", pinned=5)):
        assert waiting.add(taken)
    assert waiting.rollout(1) is None and group_name(waiting.rollout(2)) == "a"
    assert waiting.eval(2) is None and waiting.versions() == {3, 5}
    assert [group_name(passed) for passed in waiting.passed(4)] == ["b"], "its version will not come again"
    assert waiting.eval(3) is None and group_name(waiting.eval(5)) == "c" and len(waiting) == 0
    assert not waiting.add(waiting_task("a")), "it ran"
    assert waiting.add(waiting_task("a", attempt=1)) and waiting.add(waiting_task("a", attempt=2))
    newest = waiting.rollout(0)
    assert newest is not None and require_issued(newest).attempt == 2 and waiting.rollout(0) is None


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
    attempts = {require_issued(task).attempt}
    for at_s in range(1, HALF_AN_HOUR_S, REPORT_S):
        tells = at_s % (made.pacing.reissue_s / 3) < REPORT_S
        report(made, at_s, scheduler.holds(MAX_HELD) if tells else None)
        attempts |= {require_issued(reissue).attempt for reissue in reissues(made)}
    assert attempts == {0}


async def test_an_explorer_reports_what_it_runs_and_what_waits_with_it_until_it_has_ended(tmp_path: Path) -> None:
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
        eval_group = require_issued(ask(5)).group

        def last() -> dict[str, int] | None:
            told = [item.holds for item in heard.of(Progress) if item.holds is not None]
            return told[-1] if told else None

        await until(lambda: last() == {"now.0": 3, "later.0": 0, eval_group: 0})
        await until(lambda: last() == {"later.0": 0, eval_group: 0})


def test_no_report_holds_more_than_a_record_may_and_what_runs_goes_first() -> None:
    scheduler = Scheduler(max_episodes=3)
    for sequence in range(4):
        scheduler.waiting.add(issue(f"t{sequence}", sequence))
    assert scheduler.take(0) is not None
    assert scheduler.holds(2) == {"t0.0": 0, "t1.0": 0}
