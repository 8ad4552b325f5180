"""Errors of the Kafka client in our words, and how often a failed call is tried again."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
)

from schemas.errors import BrokerDenies, BrokerUnavailable

DENIED = (TopicAuthorizationFailedError, GroupAuthorizationFailedError, ClusterAuthorizationFailedError)


def may_pass(error: Exception) -> bool:
    """True if the same call may succeed once the broker is well again.

    aiokafka does not mark its own timeout so: a broker that keeps silent past a request answers the next one.
    """
    return not isinstance(error, KafkaError) or error.retriable or isinstance(error, KafkaTimeoutError)


def unavailable(address: str, what: str, deadline_s: float, last: Exception | None) -> BrokerUnavailable:
    """The error that names the address. last: why what was tried last did not succeed."""
    if isinstance(last, DENIED):
        return BrokerDenies(
            f"Kafka at {address} does not allow: {what} ({last}); `headrace check --connect` names every missing right"
        )
    return BrokerUnavailable(
        f"Kafka at {address} is not reachable: {what} did not succeed within {deadline_s:g} s"
        + (f" ({last!r})" if last else "")
    )


Result = TypeVar("Result")


async def retry(
    attempt: Callable[[], Awaitable[Result]], pauses: Iterable[float], again: Callable[[Exception], bool]
) -> Result:
    """Result of `attempt`, which is called again after an error that may pass, once for each pause.

    pauses: seconds, read one at a time as they are needed. again: whether an error may pass; asked once of each.
    Raises the last error.
    """
    left = iter(pauses)
    while True:
        try:
            return await attempt()
        except Exception as error:
            pause_s = next(left, None) if again(error) else None
            if pause_s is None:
                raise
        await asyncio.sleep(pause_s)


def doubling(first_s: float, most_s: float = math.inf) -> Iterator[float]:
    """Pauses without end, each twice the one before, up to most_s.

    >>> from itertools import islice
    >>> list(islice(doubling(0.5, 3.0), 4))
    [0.5, 1.0, 2.0, 3.0]
    """
    while True:
        yield min(first_s, most_s)
        first_s *= 2


def within(give_up_s: float, pauses: Iterable[float]) -> Iterator[float]:
    """The pauses that end within give_up_s from now, by the clock of the running loop."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + give_up_s

    def read() -> Iterator[float]:
        for pause_s in pauses:
            if clock() + pause_s > give_up_at:
                return
            yield pause_s

    return read()
