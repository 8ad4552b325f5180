"""tasks: cleaned, each question once, filtered; what does not go on is dead-lettered with its reason."""

import asyncio
from typing import Any

import msgspec
import pytest

from infra.chain.chain import Context, make_step, new_memories, run_task_chain
from infra.chain.processor import Drop, processor, score
from infra.log.bus import Partition, Record
from infra.log.log import Log, LogMessage
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.settings.config import decode
from schemas import DeadLetter, Experience, Message, Task, encode
from schemas.errors import ConfigError
from schemas.topics import DEAD_LETTERS, TASKSET, TASKSET_RAW
from streams.config import StreamsConfig
from streams.stages.chain_builder import build_tasks
from streams.stages.driver import WindowDriver
from streams.stages.tasks_stage import TaskStage
from tests.actors.rig import until
from tests.streams.deliveries import KeptDelivery, memory_log, stored, values

HERE = "tests.streams.test_tasks_stage"
EXACT = {"name": "exact", "use": "streams.scores.exact:exact"}


def task(id: str, content: str = "37+45=", answer: str | None = "82", **fields: Any) -> Task:
    return Task(id=id, messages=(Message(role="user", content=content),), answer=answer, **fields)


def config(**tables: Any) -> StreamsConfig:
    return decode(tables, StreamsConfig, "bot.toml")


def message(given_task: Task, offset: int) -> LogMessage:
    return LogMessage(Record("app.taskset.raw", offset % 2, offset, 1, b"", encode(given_task)), value=given_task)


def through(*tasks: Task, stage: TaskStage | None = None, **tables: Any) -> list[tuple[str, object]]:
    """Outputs of the stage, one partition after the other in turn."""
    stage = stage or TaskStage(build_tasks(config(**tables)))

    async def run() -> list[tuple[str, object]]:
        found = []
        for offset, given_task in enumerate(tasks):
            result = await stage.handle(message(given_task, offset))
            assert result.num_in == 1 and result.num_out == len(result.first)
            found += [(output.topic.name, output.record) for output in (*result.first, *result.then)]
        return found

    return asyncio.run(run())


def ids(outputs: list[tuple[str, object]]) -> list[str]:
    """Ids that went on, and "reason: …" of those that did not."""
    return [output.id if isinstance(output, Task) else f"{output.reason}: {output.error}" for _, output in outputs]  # type: ignore[attr-defined]


@processor(version=1)
def upper(task: Task, *, mark: str = "") -> Task:
    return msgspec.structs.replace(task, answer=(task.answer or "").upper() + mark, priority=3.0)


@processor(version=1)
def renames(task: Task) -> Task:
    return msgspec.structs.replace(task, id="other")


@processor(version=1)
def orphan(task: Task) -> list[Task]:
    return [task, msgspec.structs.replace(task, id="child")]


@processor(version=1)
def vanishes(task: Task) -> list[Task]:
    return []


@score(version=1)
def picky(experience: Experience) -> float:
    return float(len(experience.response) < 5)


@processor(version=1)
def raises(task: Task) -> Task | Drop:
    raise KeyError("field")


def test_the_same_question_under_another_id_is_dead_lettered_whatever_its_partition() -> None:
    kept, dead = through(task("a"), task("b"))
    assert kept == (TASKSET.name, task("a"))
    assert dead[0] == DEAD_LETTERS.name
    assert isinstance(dead[1], DeadLetter)
    assert dead[1].reason == "duplicate task"


def test_a_task_that_asks_nothing_is_dead_lettered() -> None:
    ((topic, dead),) = through(task("a", "  "))
    assert topic == DEAD_LETTERS.name
    assert isinstance(dead, DeadLetter)
    assert "messages" in dead.error


async def test_questions_are_remembered_across_a_restart() -> None:
    log = Log(MemoryBus(), "app")
    await log.create_topics(partitions=2, keep_ms=1)
    await log.publish(TASKSET, task("a"))
    stage, at = TaskStage(build_tasks(config())), Partition(log.name(TASKSET_RAW), 0)
    await stage.recall(log, at, 0, lambda: None)
    first = await stage.handle(message(task("b"), 0))
    stage.forget()
    await log.publish(TASKSET, task("c", "1+1="))
    await stage.recall(log, at, 1, lambda: None)
    second = await stage.handle(message(task("d", "1+1="), 1))
    assert [output.record.error for output in (*first.then, *second.then)]  # type: ignore[union-attr] == ["task b: the same question as a", "task d: the same question as c"]


async def test_what_is_remembered_at_a_start_takes_no_task_its_time() -> None:
    async with memory_log() as log, asyncio.TaskGroup() as tasks:
        await log.publish(TASKSET, task("a"))
        for record in (task("b"), task("c", "1+1=")):
            await log.publish(TASKSET_RAW, record)
        driver = WindowDriver("tasks", TaskStage(build_tasks(config())), log, Metrics("process"), tasks, timeout_s=0)
        deliveries = [KeptDelivery(sent.record) for sent in await stored(log, TASKSET_RAW)]
        for delivery in deliveries:
            await driver.accept(delivery)
        await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))
        assert [dead.reason for dead in await values(log, DEAD_LETTERS)] == ["duplicate task"]  # type: ignore[union-attr]


def test_a_task_without_what_its_workflow_needs_is_dropped_with_the_field() -> None:
    needs = {"filter": {"require": ["meta.source"], "workflows": {"guess": ["answer"]}}}
    given_ = {"meta": {"source": "web"}}
    found = through(
        task("a", "1", **given_), task("b", "2"), task("c", "3", None, workflow="guess", **given_),
        task("d", "4", None, **given_), task("e", "5", "", workflow="guess", **given_), tasks=needs,
    )  # fmt: skip
    assert ids(found) == [
        "a",
        "task incomplete: task b has no meta.source",
        "task incomplete: task c has no answer (workflow guess)",
        "d",
        "task incomplete: task e has no answer (workflow guess)",
    ]


def test_a_task_that_no_score_can_verify_is_dropped() -> None:
    picky = {"name": "picky", "use": f"{HERE}:picky"}
    tables = {"score": [EXACT, picky], "tasks": {"filter": {"scores": ["exact", "picky"]}}}
    found = through(task("a", "1"), task("b", "2", None), task("c", "3", "long answer"), **tables)
    assert ids(found) == [
        "a",
        "not verifiable: task b has no answer",
        "not verifiable: task c: its own answer gets picky 0.0",
    ]
    with pytest.raises(ConfigError, match=r"tasks\.filter\.scores: got \"math\", expected one of exact"):
        build_tasks(config(score=[EXACT], tasks={"filter": {"scores": ["math"]}}))


def test_difficulty_comes_from_the_success_rate_a_task_brings() -> None:
    limits = {"difficulty": {"field": "pass", "easiest": 0.1, "hardest": 0.9}}
    found = through(
        task("a", "1", meta={"pass": 0.25}), task("b", "2", meta={"pass": 1.0}), task("c", "3", meta={"pass": 0}),
        task("d", "4", meta={"pass": "often"}), task("e", "5", difficulty=0.5, meta={"pass": 0.1}),
        task("f", "6", split="held-out", meta={"pass": 1.0}), tasks=limits,
    )  # fmt: skip
    kept = {found_item.id: found_item.difficulty for _, found_item in found if isinstance(found_item, Task)}
    assert kept == {"a": 0.75, "d": None, "e": 0.5, "f": 0.0}
    assert ids(found)[1:3] == [
        "too easy: difficulty 0, expected 0.1 or more",
        "too hard: difficulty 1, expected at most 0.9",
    ]


def test_a_processor_of_ones_own_is_inserted_into_the_stage() -> None:
    mine = {"use": f"{HERE}:upper", "stage": "tasks", "after": "clean", "options": {"mark": "!"}}
    ((_, kept),) = through(task("a", answer=" yes "), processor=[mine])
    assert isinstance(kept, Task) and (kept.answer, kept.priority) == ("YES!", 3.0)
    names = [step.name for step in build_tasks(config(processor=[mine], tasks={"dedupe": {"on": False}}))]
    assert names == ["clean", "upper", "filter", "difficulty"]


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("renames", "processor returned nonsense", "got a 0 times"),
        ("orphan", "processor returned nonsense", "parent: got '' on child, expected 'a'"),
        ("vanishes", "processor returned nonsense", "got a 0 times"),
        ("raises", "processor failed", "KeyError"),
    ],
)
async def test_what_a_step_does_wrong_is_the_tasks_reason(name: str, reason: str, detail: str) -> None:
    steps = (make_step(name, globals()[name]),)
    kept, gone = await run_task_chain(steps, task("a"), Context(memories=new_memories(steps)))
    assert kept == [] and gone[0].reason == reason
    assert detail in gone[0].detail and gone[0].processor == f"{name}@1"
