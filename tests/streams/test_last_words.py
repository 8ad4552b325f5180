"""What a stream worker says as it ends for an error: the cause itself, also of several that failed together."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from schemas.errors import BrokerUnavailable, StoreError
from streams.stages.stage import EXIT_BROKER, EXIT_BUG, end_for, process_exit


class Ended(BaseException):
    """Instead of the end of the process."""


@contextmanager
def kept_exit() -> Iterator[list[tuple[str, int]]]:
    said: list[tuple[str, int]] = []

    def end(message: str, code: int) -> NoReturn:
        said.append((message, code))
        raise Ended

    token = process_exit.set(end)
    try:
        yield said
    finally:
        process_exit.reset(token)


def last_words(error: BaseException) -> tuple[str, int]:
    with kept_exit() as said, pytest.raises(Ended):
        end_for(error, "verify: app.experiences/0 981")
    return said[0]


def test_the_last_words_name_what_failed_in_a_group_of_tasks_and_not_the_group() -> None:
    denied = StoreError("put claims/ab: got AccessDenied, expected a key that may write")
    inner = BaseExceptionGroup("unhandled errors in a TaskGroup", [denied, ValueError("no such topic")])
    message, code = last_words(BaseExceptionGroup("unhandled errors in a TaskGroup", [inner]))
    assert message == (
        "verify: app.experiences/0 981: StoreError: put claims/ab: got AccessDenied, expected a key that may write; "
        "ValueError: no such topic; stopped before the acknowledgement"
    )
    assert code == EXIT_BUG


def test_what_failed_many_times_alike_is_said_once_and_many_causes_are_counted() -> None:
    alike = [StoreError("put claims/ab: refused") for _ in range(64)]
    assert "StoreError: put claims/ab: refused; stopped" in last_words(BaseExceptionGroup("", alike))[0]
    unlike = [StoreError(f"put claims/{number}: refused") for number in range(64)]
    message, _ = last_words(BaseExceptionGroup("", unlike))
    assert "claims/0: refused" in message and "and 61 other errors" in message and "claims/40" not in message


def test_a_broker_that_is_away_is_said_as_such_wherever_it_lies_in_the_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    away = BrokerUnavailable("kafka:9092 did not answer within 120 s")
    assert last_words(BaseExceptionGroup("", [ValueError("one"), away])) == (str(away), EXIT_BROKER)
