"""What an error of aiokafka means: wait, ask for a right, or mend the caller."""

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
    """Whether the same call may succeed once the broker is well again.

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
