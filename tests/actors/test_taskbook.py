"""The task book: order, priorities, and that evals keep their places whatever is measured."""

from msgspec.structs import replace

from actors.master.taskbook import TaskBook
from schemas import Message, Task


def task(name: str, **fields: object) -> Task:
    return replace(Task(id=name, messages=(Message(role="user", content=name),)), **fields)


def rated(book: TaskBook, name: str, reward: float, times: int = 1) -> None:
    for round in range(times):
        book.issued(name, round)
        book.rewarded(f"{name}.{round}", reward)


def order(book: TaskBook, *, measured: bool) -> list[str]:
    return [one.id for one in book.pool("train", measured=measured).tasks]


def test_tasks_without_a_difficulty_are_ordered_by_the_success_that_was_measured() -> None:
    book = TaskBook()
    for one in (task("a"), task("b"), task("c"), task("d", difficulty=0.3)):
        book.add(one)
    assert order(book, measured=True) == ["d", "a", "b", "c"]
    rated(book, "c", 1.0, times=40)
    rated(book, "a", 0.0, times=40)
    assert order(book, measured=True) == ["c", "d", "b", "a"]  # 0 measured, 0.3 given, 0.5 unknown, 1 measured
    assert [one.id for one in book.of_split("train")] == ["d", "a", "b", "c"], "evals count on their places"


def test_the_order_is_not_made_anew_with_every_group() -> None:
    book = TaskBook()
    for name in "ab":
        book.add(task(name))
    first = book.pool("train", measured=True)
    rated(book, "b", 1.0)
    assert book.pool("train", measured=True) is first


def test_a_task_that_is_replaced_brings_its_new_priority_and_split() -> None:
    book = TaskBook()
    for name in "ab":
        book.add(task(name))
    assert book.pool("train").priorities == [1.0, 2.0]
    book.add(task("a", priority=3.0))
    assert book.pool("train").priorities == [3.0, 4.0]
    book.add(task("a", split="dev"))
    assert order(book, measured=False) == ["b"] and [one.id for one in book.of_split("dev")] == ["a"]
