"""Kafka clients: their start and end, their errors in our words, and how often a failed call is tried again."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
)

from schemas.errors import BrokerDenies, BrokerUnavailable

DENIED = (TopicAuthorizationFailedError, GroupAuthorizationFailedError, ClusterAuthorizationFailedError)


CLOSE_S = 5.0
Client = TypeVar("Client", AIOKafkaConsumer, AIOKafkaProducer, AIOKafkaAdminClient)

logger = logging.getLogger(__name__)


def may_pass(error: Exception) -> bool:
    """True if the same call may succeed once the broker is well again.

    aiokafka does not mark its own timeout so: a broker that keeps silent past a request answers the next one.
    """
    return not isinstance(error, KafkaError) or error.retriable or isinstance(error, KafkaTimeoutError)


def unavailable(address: str, what: str, deadline_s: float, last: Exception | None) -> BrokerUnavailable:
    """The error that names the address. what: the failed operation. last: error of the last attempt."""
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


async def begin(client: Client) -> Client:
    """Start an aiokafka client; its connections are closed again if that fails."""
    try:
        await client.start()  # type: ignore[attr-defined]
    except BaseException:
        await stop(client)
        raise
    return client


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient) -> None:
    """End an aiokafka client within CLOSE_S, in any state; never raises."""
    await asyncio.sleep(0)  # one that has just started would choke on tasks of its own that have not begun
    if await _ends(client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop()):
        return
    # A consumer whose fetch is waiting for a lost broker lets that fetch's CancelledError out and stops halfway.
    for part in (getattr(client, "_fetcher", None), getattr(client, "_client", None), getattr(client, "client", None)):
        if part is not None:
            await _ends(part.close())


async def _ends(closing: Coroutine[object, object, None]) -> bool:
    """True if `closing` returned in time; its errors, cancellation included, stay its own."""
    task = asyncio.create_task(closing)
    await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_S)
    if task.done() and not task.cancelled() and task.exception() is None:
        return True
    logger.info("kafka.close.forced error=%r", None if task.cancelled() or not task.done() else task.exception())
    return False
