"""Work over tensors in threads keeps the order, and stops at what fails."""

import os
import threading

import pytest

from infra.policies.threads import in_threads


def test_results_come_in_the_order_of_the_items() -> None:
    assert in_threads(lambda item: item * item, range(100)) == [item * item for item in range(100)]
    assert in_threads(str, []) == []


def test_the_largest_begin_and_results_keep_the_order_of_the_items() -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def work(item: int) -> int:
        with lock:
            begun.append(item)
        return -item

    items = [3, 900, 7, 50, 1, 0]
    assert in_threads(work, items, size=abs) == [-one for one in items]
    if len(os.sched_getaffinity(0)) > 1:
        assert begun.index(900) < 2 and begun.index(0) >= 4


def test_items_that_are_the_same_are_worked_on_once() -> None:
    worked: list[int] = []

    def work(item: int) -> int:
        worked.append(item)
        return item % 3

    assert in_threads(work, range(9), same=lambda item: item % 3) == [0, 1, 2] * 3
    assert len(worked) == 3


def test_no_more_threads_than_most_are_at_work() -> None:
    working, worst, lock = 0, 0, threading.Lock()

    def work(item: int) -> int:
        nonlocal working, worst
        with lock:
            working += 1
            worst = max(worst, working)
        with lock:
            working -= 1
        return item

    in_threads(work, range(200), most=1)
    assert worst == 1


def test_what_the_first_item_that_failed_raised_is_raised() -> None:
    def work(item: int) -> int:
        if item in (3, 5):
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match="item 3"):
        in_threads(work, range(10))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensors")]
