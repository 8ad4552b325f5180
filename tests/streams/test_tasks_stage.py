"""tasks: cleaned, each question once, what cannot be used dead-lettered."""

import asyncio

from infra.bus.bus import Record
from infra.bus.log import Message as LogMessage
from schemas import DeadLetter, Message, Task, encode
from schemas.topics import DEAD_LETTERS, TASKSET
from streams.tasks_stage import TaskCleaner


def task(id: str, content: str = "37+45=", answer: str | None = "82") -> Task:
    return Task(id=id, messages=(Message(role="user", content=content),), answer=answer)


def through(*tasks: Task) -> list[tuple[str, object]]:
    cleaner = TaskCleaner()
    found = []
    for offset, one in enumerate(tasks):
        message = LogMessage(Record("app.taskset.raw", 0, offset, 1, b"", encode(one)), value=one)
        result = asyncio.run(cleaner.handle(message))
        found += [(output.topic.name, output.record) for output in (*result.first, *result.then)]
    return found


def test_blanks_around_question_and_answer_are_taken_off() -> None:
    assert through(task("a", " 37+45=  \n", " 82 ")) == [(TASKSET.name, task("a"))]


def test_the_same_question_under_another_id_is_dead_lettered() -> None:
    kept, dead = through(task("a"), task("b"))
    assert kept == (TASKSET.name, task("a"))
    assert dead[0] == DEAD_LETTERS.name
    assert isinstance(dead[1], DeadLetter)
    assert dead[1].reason == "duplicate task"


def test_a_redelivered_task_passes_again() -> None:
    assert through(task("a"), task("a")) == [(TASKSET.name, task("a"))] * 2


def test_a_task_that_asks_nothing_is_dead_lettered() -> None:
    ((topic, dead),) = through(task("a", "  "))
    assert topic == DEAD_LETTERS.name
    assert isinstance(dead, DeadLetter)
    assert "messages" in dead.error
