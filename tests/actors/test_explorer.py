"""The explorer on the memory log: what it publishes, what it survives, which policy it serves."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from actors.config import CONVERSE, EvalSuite, ExploreConfig
from actors.engines.engine import EngineStopped
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.master.evaluation import VERSION_PASSED
from actors.master.plan import evaluation, rollout
from actors.rollout.session import Session
from infra.log.log import Log
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import from_numpy
from infra.settings.config import Use
from infra.store.store import Store
from schemas import Closure, DeadLetter, DropMarker, Experience, PolicyEvent, Score, Task
from schemas.ids import group_of
from schemas.topics import DEAD_LETTERS, EXPERIENCES, POLICIES, PROGRESS, TASKS, VERIFIED, Topic
from tests.actors.rig import EXPLORE, MASTER, TopicArrivals, explorer, folder_store, memory_log, running, task, until


def issue(name: str, sequence: int = 0, *, min_version: int = 0, attempt: int = 0, **fields: object) -> Task:
    return rollout(task(name, **fields), MASTER, round=0, attempt=attempt, sequence=sequence, min_version=min_version)


def ask(version: int, index: int = 0) -> Task:
    return evaluation(
        task(f"dev-{index}", "dev"), MASTER, suite=EvalSuite(suite="dev"), version=version, index=index, attempt=0
    )


async def announce(log: Log, store: Store, version: int, *, seed: int | None = None) -> PolicyEvent:
    table = np.random.default_rng(version if seed is None else seed).normal(size=(128, 128)).astype(np.float32)
    event = await asyncio.to_thread(
        publish,
        store,
        NewVersion(policy="main", token=0, version=version, parent=version - 1, step=version),
        {TENSOR: from_numpy(table)},
        previous=None,
        probe=None,
    )
    await log.publish(POLICIES, event)
    return event


def listening(*heard: TopicArrivals) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(record.listen()) for record in heard]


def explored(
    folder: Path,
    *tasks: Task,
    num: int = 3,
    topic: Topic = EXPERIENCES,
    config: ExploreConfig = EXPLORE,
    engine: ScriptedEngine | None = None,
) -> TopicArrivals:
    """The records that an explorer writes to a topic, once there are `num` of them."""

    async def run() -> TopicArrivals:
        log = await memory_log()
        heard = TopicArrivals(log, topic)
        async with running(explorer(log, folder_store(folder), engine or ScriptedEngine(), config), *listening(heard)):
            await log.publish_all(TASKS, tasks)
            await until(lambda: len(heard.experiences or heard.records) >= num)
        return heard

    return asyncio.run(run())


def named(name: str) -> ExploreConfig:
    """Settings in which a function of this file is a workflow."""
    return replace(EXPLORE, workflows={name: Use(use=f"{__name__}:{name}")})


async def one_episode_breaks(task: Task, session: Session) -> tuple[Score, ...]:
    await session.reply(task.messages)
    raise RuntimeError("the environment fell over")


async def nothing_happens(task: Task, session: Session) -> tuple[Score, ...]:
    raise RuntimeError("no environment")


def test_a_group_becomes_experiences_with_all_that_later_stages_need(tmp_path: Path) -> None:
    heard = explored(tmp_path, issue("add", 7, attempt=2, meta={"hidden": 1}))
    assert len(heard.records) == 1, "one block: they finished together"
    assert [experience.id for experience in heard.experiences] == ["add.0.2-0-0", "add.0.2-1-0", "add.0.2-2-0"]
    for item in heard.experiences:
        assert (item.group, item.attempt, item.sequence, item.group_size) == ("add.0", 2, 7, 3)
        assert (item.lane, item.suite, item.origin, item.last) == ("usual", "", "explore/test", True)
        assert (item.meta, item.answer, item.task, item.held_out) == ({"hidden": 1}, "yes", "add", False)
        assert item.messages[0].content == "add?"
        assert 1 <= item.num_sampled <= 4
        assert item.spans[0].start == len("add?")
        assert item.min_version == item.max_version == 0


def test_a_failed_episode_is_recorded_with_what_it_sampled(tmp_path: Path) -> None:
    task = issue("add", workflow="one_episode_breaks")
    for experience in explored(tmp_path, task, config=named("one_episode_breaks")).experiences:
        assert experience.end == "failed"
        assert "fell over" in experience.failure


def test_an_episode_that_sampled_nothing_still_completes_its_group(tmp_path: Path) -> None:
    task = issue("add", 3, workflow="nothing_happens")
    stubs = explored(tmp_path, task, topic=VERIFIED, config=named("nothing_happens")).of(DropMarker)
    assert {(stub.group, stub.sequence) for stub in stubs} == {("add.0", 3)}
    assert sorted(stub.episode for stub in stubs) == [0, 1, 2]
    assert {(stub.reason, stub.group_size, stub.stage) for stub in stubs} == {("episode failed", 3, "explore")}
    assert all(group_of(stub.id) == stub.group for stub in stubs)


async def says_half_a_character(task: Task, session: Session) -> tuple[Score, ...]:
    await session.reply(task.messages)
    session.note("answer", "half \ud83d")
    raise RuntimeError("half \ud83d")


async def scores_no_number(task: Task, session: Session) -> tuple[Score, ...]:
    await session.reply(task.messages)
    return (Score(name="odd", value=float("nan")),)


async def samples_nothing(task: Task, session: Session) -> tuple[Score, ...]:
    return (Score(name="exact", value=1.0),)


def test_half_a_character_in_a_note_or_a_failure_is_replaced(tmp_path: Path) -> None:
    task = issue("add", workflow="says_half_a_character")
    for experience in explored(tmp_path, task, config=named("says_half_a_character")).experiences:
        assert (experience.notes, experience.failure) == ({"answer": "half ?"}, "RuntimeError: half ?")


def test_an_episode_that_no_record_can_hold_fails_alone(tmp_path: Path) -> None:
    tasks = issue("odd", workflow="scores_no_number"), issue("add", workflow="nothing_happens")
    config = replace(EXPLORE, workflows=named("scores_no_number").workflows | named("nothing_happens").workflows)
    stubs = explored(tmp_path, *tasks, num=6, topic=VERIFIED, config=config).of(DropMarker)
    assert {(stub.group, stub.reason) for stub in stubs} == {("odd.0", "episode failed"), ("add.0", "episode failed")}


def test_each_sample_of_an_eval_is_a_record_of_its_own_also_where_there_is_nothing_to_record(tmp_path: Path) -> None:
    suite = EvalSuite(suite="dev", samples=4, temperature=1.0)
    samples = evaluation(task("dev", "dev"), MASTER, suite=suite, version=0, index=0, attempt=0)
    for workflow in ("nothing_happens", "scores_no_number", "samples_nothing"):
        heard = explored(tmp_path, replace(samples, workflow=workflow), num=4, config=named(workflow))
        ended = sorted((entry.episode, entry.num_sampled, entry.end, entry.last) for entry in heard.experiences)
        assert ended == [(episode, 0, "failed", True) for episode in range(4)]


SOURCE = "from pathlib import Path\nPath({mark!r}).write_text('imported')\nraise SystemExit(3)\n"


def test_a_task_imports_nothing_and_is_closed_with_its_reason(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "of_a_dataset.py").write_text(SOURCE.format(mark=str(mark)))
    sys.path.append(str(tmp_path))
    names = ("of_a_dataset:run", "unittest.__main__:x", "lib2to3.__main__:x", "os:system", "", CONVERSE)

    async def run() -> tuple[list[DropMarker], list[Closure], list[Experience]]:
        log = await memory_log()
        stubs, closures, heard = (TopicArrivals(log, topic) for topic in (VERIFIED, PROGRESS, EXPERIENCES))
        role = explorer(log, folder_store(tmp_path), ScriptedEngine())
        async with running(role, *listening(stubs, closures, heard)):
            for index, name in enumerate(names):
                await log.publish(TASKS, issue(f"t{index}", workflow=name))
            await log.publish(TASKS, replace(ask(0), workflow=names[0]))
            await until(lambda: len(stubs.of(DropMarker)) == 12 and len(heard.experiences) == 6)
            await until(lambda: bool(closures.of(Closure)))
        return stubs.of(DropMarker), closures.of(Closure), heard.experiences

    try:
        stubs, closures, answers = asyncio.run(run())
    finally:
        sys.path.remove(str(tmp_path))
    assert not mark.exists()
    assert {stub.group for stub in stubs} == {"t0.0", "t1.0", "t2.0", "t3.0"}
    assert {stub.reason for stub in (*stubs, *closures)} == {"unknown workflow"}
    assert {answer.group for answer in answers} == {"t4.0", "t5.0"}, "what ships and what is configured runs"


async def test_evals_of_the_model_folder_are_answered_before_newer_policies_are_followed(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log()
    heard = TopicArrivals(log, EXPERIENCES)
    await log.publish_all(TASKS, [ask(0, index) for index in range(5)])
    await announce(log, store, 1)
    engine = ScriptedEngine(token_s=0.005)
    async with running(explorer(log, store, engine), *listening(heard)):
        await until(lambda: len(heard.experiences) == 5 and engine.version == 1)
    assert engine.version == 1
    assert {(experience.min_version, experience.max_version) for experience in heard.experiences} == {(0, 0)}
    assert {(experience.suite, experience.group_size) for experience in heard.experiences} == {("dev", 1)}


async def test_a_version_an_eval_waits_for_is_not_skipped_and_one_that_is_past_is_given_up(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log()
    heard, progress = TopicArrivals(log, EXPERIENCES), TopicArrivals(log, PROGRESS)
    for version in (1, 2, 3):
        await announce(log, store, version)
    await log.publish_all(TASKS, [ask(2, 0), ask(2, 1)])
    engine = ScriptedEngine(token_s=0.005)
    async with running(explorer(log, store, engine), *listening(heard, progress)):
        await until(lambda: len(heard.experiences) == 2 and engine.version == 3)
        await log.publish(TASKS, ask(1))
        await until(lambda: bool(progress.of(Closure)))
    assert {(experience.min_version, experience.max_version) for experience in heard.experiences} == {(2, 2)}
    assert [(closure.group, closure.outcome, closure.reason) for closure in progress.of(Closure)] == [
        ("eval-dev-1.0", "dropped", VERSION_PASSED)
    ]


async def test_a_backlog_larger_than_the_queue_waits_for_no_version_for_ever(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log()
    await log.publish_all(TASKS, [issue(f"t{number}", number, min_version=1) for number in range(501)])  # two reads
    await announce(log, store, 1)
    engine = ScriptedEngine()
    async with running(explorer(log, store, engine, replace(EXPLORE, max_held=2))):
        await until(lambda: engine.version == 1, seconds=20.0)


async def test_a_task_is_committed_before_it_runs_so_a_killed_explorer_repeats_no_id(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log()
    heard = TopicArrivals(log, EXPERIENCES)
    slow = ScriptedEngine(token_s=30.0)
    async with running(*listening(heard)):
        async with running(explorer(log, store, slow)):
            await log.publish(TASKS, issue("lost"))
            await until(lambda: slow.num_running > 0)
        async with running(explorer(log, store, ScriptedEngine())):
            await log.publish(TASKS, issue("add"))
            await until(lambda: len(heard.experiences) == 3)
    assert {item.group for item in heard.experiences} == {"add.0"}


def test_a_straggler_does_not_hold_back_the_finished_members_of_its_group(tmp_path: Path) -> None:
    calls = iter(range(3))

    def script(prompt: tuple[int, ...]) -> list[int]:
        return [65] * (400 if next(calls) == 2 else 1) + [0]

    issued = rollout(task("add"), replace(MASTER, max_tokens=400), round=0, attempt=0, sequence=0, min_version=0)
    heard = explored(tmp_path, issued, num=2, engine=ScriptedEngine(script=script, token_s=0.02))
    assert {experience.end for experience in heard.experiences} == {"terminal"}


async def test_what_is_no_issued_task_goes_to_the_dead_letters_and_its_neighbours_go_on(tmp_path: Path) -> None:
    log = await memory_log()
    heard, dead = TopicArrivals(log, EXPERIENCES), TopicArrivals(log, DEAD_LETTERS)
    async with running(explorer(log, folder_store(tmp_path), ScriptedEngine()), *listening(heard, dead)):
        await log.bus.send(log.name(TASKS), b"nonsense", key=b"add.0")
        await log.publish(TASKS, issue("add"))
        await until(lambda: len(heard.experiences) == 3 and len(dead.records) == 1)
    assert [(item.topic, item.stage, item.reason) for item in dead.of(DeadLetter)] == [
        ("tasks", "explore", "bad frame")
    ]


async def test_a_stop_lets_running_groups_finish(tmp_path: Path) -> None:
    log = await memory_log()
    heard = TopicArrivals(log, EXPERIENCES)
    stop = asyncio.Event()
    engine = ScriptedEngine(script=lambda prompt: [65, 65, 0], token_s=0.05)
    role = explorer(log, folder_store(tmp_path), engine, replace(EXPLORE, drain_s=5.0), stop=stop)
    async with running(*listening(heard)):
        await log.publish(TASKS, issue("add"))
        await until(lambda: engine.num_running > 0)
        stop.set()
        await role
        await until(lambda: len(heard.experiences) == 3)
    assert {item.end for item in heard.experiences} == {"terminal"}


async def engine_is_gone(task: Task, session: Session) -> tuple[Score, ...]:
    raise EngineStopped("its process is gone")


def test_an_engine_that_is_gone_ends_the_process_instead_of_failing_every_episode(tmp_path: Path) -> None:
    async def run() -> None:
        log = await memory_log()
        await log.publish(TASKS, issue("add", workflow="engine_is_gone"))
        await explorer(log, folder_store(tmp_path), ScriptedEngine(), named("engine_is_gone"))

    with pytest.raises(EngineStopped):
        asyncio.run(run())
