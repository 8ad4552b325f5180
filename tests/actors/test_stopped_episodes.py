"""Episodes that can no longer be of use are stopped: with a reason, counted, and so that their group still completes."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.config import ExploreConfig, MasterConfig
from actors.engines.scripted import ScriptedEngine
from actors.master.plan import rollout
from actors.rollout.explorer import run_explorer
from actors.rollout.scheduler import Stop, groups_over
from actors.rollout.session import Session
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas import Closure, Drawn, DropMarker, Score, Task
from schemas.fields import ENOUGH, GROUP_OVER
from schemas.topics import EXPERIENCES, PROGRESS, REPORTS, TASKS, VERIFIED
from tests.actors.rig import (
    EOS,
    EXPLORE,
    FLOOR,
    MASTER,
    CharTokenizer,
    TopicArrivals,
    folder_store,
    memory_log,
    running,
    task,
    until,
)
from tests.actors.test_explorer import ask
from tests.role import role_of

turn = itertools.count()


async def first_two_answer(task: Task, session: Session) -> tuple[Score, ...]:
    """The first two of a run's episodes answer, the others say one thing and then wait for what never comes."""
    number = next(turn)
    await session.reply(task.messages)
    if number >= 2:
        await asyncio.Event().wait()
    return ()


async def first_fails(task: Task, session: Session) -> tuple[Score, ...]:
    """Of three the first fails after it answered, the second answers, and the third waits for what never comes."""
    number = next(turn)
    await session.reply(task.messages)
    if number == 0:
        raise RuntimeError("the environment fell over")
    if number == 2:
        await asyncio.Event().wait()
    return ()


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
        return [one.reason for one in self.markers.of(DropMarker)]


def play(folder: Path, config: ExploreConfig, act: Callable[[Rig], Awaitable[None]]) -> Rig:
    global turn
    turn = itertools.count()

    async def run() -> Rig:
        rig = Rig(await memory_log())
        role = role_of("explore", FLOOR, rig.log, folder_store(folder), metrics=rig.metrics)
        heard = [one.listen() for one in (rig.answers, rig.markers, rig.reports)]
        loops = [run_explorer(role, config, rig.engine, CharTokenizer(), (EOS,)), *heard]
        async with running(*(asyncio.create_task(one) for one in loops)):
            await act(rig)
        return rig

    return asyncio.run(run())


def issue(name: str, *, episodes: int = 3, enough: int = 0, min_version: int = 0, attempt: int = 0) -> Task:
    config = replace(MASTER, num_episodes=episodes, enough=enough)
    return rollout(task(name), config, round=0, attempt=attempt, sequence=0, min_version=min_version)


def test_a_group_ends_when_enough_of_its_episodes_have_and_the_others_are_stopped(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.log.publish(TASKS, issue("add", episodes=5, enough=2))
        await until(lambda: len(rig.markers.records) == 3)

    rig = play(tmp_path, named("first_two_answer"), act)
    assert len(rig.answers.experiences) == 2
    assert rig.reasons() == [ENOUGH] * 3, "collect has all five, so the group is complete"
    assert rig.counters()["episodes_cancelled{reason=enough others}"] == 3
    assert rig.counters()["tokens_cancelled{reason=enough others}"] >= 3, "one turn each"
    assert rig.engine.num_running == 0


def test_an_episode_that_failed_is_none_of_the_enough(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.log.publish(TASKS, issue("add", enough=2))
        await until(lambda: len(rig.answers.experiences) == 2)
        published = len(rig.reports.records)
        await until(lambda: len(rig.reports.records) > published + 3)  # longer than finished episodes linger
        assert rig.markers.records == []

    play(tmp_path, named("first_fails"), act)


def test_what_still_runs_of_a_group_that_was_closed_without_it_is_stopped(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.log.publish(TASKS, issue("add", attempt=1))
        await rig.log.publish(TASKS, issue("sub", attempt=1))
        await until(lambda: rig.metrics.gauges().get("episodes_in_flight") == 6)
        await rig.log.publish(PROGRESS, Closure(group="add.0", outcome="buffered", sequence=0))
        await until(lambda: len(rig.markers.records) == 3)

    rig = play(tmp_path, named("never_ends"), act)
    assert rig.reasons() == [GROUP_OVER] * 3
    assert {one.group for one in rig.markers.of(DropMarker)} == {"add.0"}
    assert {one.attempt for one in rig.markers.of(DropMarker)} == {1}, "collect says of that attempt that it is over"
    assert rig.counters()["episodes_cancelled{reason=group over}"] == 3


def test_what_waits_of_a_group_that_is_over_never_starts(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.log.publish(TASKS, issue("add", min_version=9))
        await until(lambda: rig.metrics.gauges().get("tasks_waiting") == 1)
        await rig.log.publish(PROGRESS, Drawn(token=1, step=1, version=1, groups=(), dropped={"add.0": "stale"}))
        await until(lambda: len(rig.markers.records) == 3)
        await until(lambda: rig.metrics.gauges().get("tasks_waiting") == 0)

    rig = play(tmp_path, named("never_ends"), act)
    assert rig.reasons() == [GROUP_OVER] * 3 and not rig.answers.experiences


def test_a_later_verdict_or_an_evals_closure_stops_nothing() -> None:
    assert groups_over(Closure(group="add.0", outcome="buffered", sequence=0, revision=1)) == ()
    assert groups_over(Closure(group="eval-dev-3.0", outcome="dropped")) == ()
    assert groups_over(Closure(group="add.0", outcome="superseded", sequence=0)) == ("add.0",)
    assert groups_over(ask(3)) == ()


def test_an_episode_that_begins_when_its_group_is_stopped_is_stopped_and_the_first_reason_stays() -> None:
    async def run() -> Stop:
        stop = Stop()
        stop.now(ENOUGH)
        episode = asyncio.create_task(asyncio.sleep(60))
        stop.watch(episode)
        stop.now(GROUP_OVER)
        await asyncio.wait([episode])
        assert episode.cancelled()
        return stop

    assert asyncio.run(run()).reason == ENOUGH


def test_more_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match="got enough = 9, expected at most num_episodes = 8"):
        MasterConfig(enough=9)
