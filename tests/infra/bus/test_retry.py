"""The one loop that repeats: how often, after which errors, and until when."""

import asyncio
from itertools import islice

import pytest

from infra.log.retry import doubling, retry, within


class Failing:
    """Raises its errors one by one, and then returns how often it was called."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.calls


def passing(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_what_may_pass_is_tried_again_and_its_result_returned() -> None:
    assert asyncio.run(retry(Failing(OSError(), OSError()), [0.0, 0.0], passing)) == 3


def test_an_error_that_does_not_pass_is_raised_at_once() -> None:
    attempt = Failing(OSError(), KeyError("a"))
    with pytest.raises(KeyError):
        asyncio.run(retry(attempt, doubling(0.0), passing))
    assert attempt.calls == 2


def test_after_the_last_pause_the_last_error_is_raised() -> None:
    attempt = Failing(OSError("1"), OSError("2"), OSError("3"), OSError("4"))
    with pytest.raises(OSError, match="3"):
        asyncio.run(retry(attempt, islice(doubling(0.0), 2), passing))
    assert attempt.calls == 3


def test_pauses_end_before_the_time_to_give_up_which_counts_from_the_call() -> None:
    async def left() -> tuple[list[float], list[float]]:
        soon, late = within(0.5, [0.01, 0.02, 3.0, 0.01]), within(0.05, doubling(0.01))
        await asyncio.sleep(0.06)
        return list(soon), list(late)

    assert asyncio.run(left()) == ([0.01, 0.02], [])


def test_a_cancelled_attempt_is_not_repeated() -> None:
    async def cancelled() -> int:
        attempt = Failing(asyncio.CancelledError())  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await retry(attempt, doubling(0.0), lambda error: True)
        return attempt.calls

    assert asyncio.run(cancelled()) == 1
