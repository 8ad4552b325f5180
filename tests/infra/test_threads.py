"""Work over tensors in threads keeps the order, and stops at what fails."""

import threading

import pytest

from infra.policies.threads import in_threads


def test_results_come_in_the_order_of_the_items() -> None:
    assert in_threads(lambda item: item * item, range(100)) == [item * item for item in range(100)]
    assert in_threads(str, []) == []


def test_what_the_first_item_that_failed_raised_is_raised() -> None:
    def work(item: int) -> int:
        if item in (3, 5):
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match="item 3"):
        in_threads(work, range(10))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensors")]
