"""Feedback over HTTP, which the gateway wrote to the topic `feedback`.

    read -> the source of its path -> publish (confirmed) -> commit

Delivery: at least once, shared by all workers as a consumer group. Order: feedback of clients in its group's order, events of a
webhook in theirs. Loss: feedback without a source goes to dead letters. A repeated webhook body keeps its id and is skipped
while the worker remembers the id.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from infra.chain.processor import feedback
from infra.log.bus import CommitRefused, Partition, Reader
from infra.log.log import Log, LogMessage
from infra.observe.metrics import Metrics
from schemas import Feedback, Received
from schemas.errors import ConfigError, OffsetOutOfRange
from schemas.ids import ANSWER_PREFIX
from schemas.topics import FEEDBACK
from streams.config import FEEDBACK_PATH
from streams.sources.event import Event, EventSource, publish_events
from streams.stages.verify import REDELIVERED

POLL_S = 1.0
GROUP = "feedback"
MAX_READ = 65_536
logger = logging.getLogger(__name__)


@feedback(version=1)
def rating(body: dict[str, Any]) -> Feedback | None:
    """Feedback of clients through /v1/feedback: a value, thumbs (1 and 0), a label, a correction, or a retraction."""
    value = body.get("value")
    return Feedback(
        ref=body["answer_id"],
        id=body["id"],
        value=None if value is None else float(value),
        type=body.get("kind", "value"),
        text=body.get("correction") or body.get("label") or body.get("text"),
        rater=body.get("rater", ""),
    )


async def run_received(sources: Sequence[EventSource], log: Log, metrics: Metrics) -> None:
    """Read until cancelled. Raises ConfigError where retention deleted what was not read yet."""
    by_path = {source.webhook: source for source in sources}
    reader = await log.subscribed(FEEDBACK, group=GROUP)
    read: OrderedDict[str, None] = OrderedDict()
    try:
        while True:
            await take_once(by_path, reader, log, metrics, read)
    except OffsetOutOfRange as error:
        way_out = f"`headrace skip {GROUP}` continues at the oldest kept record, and prints the number of lost records"
        raise ConfigError(f"{GROUP}: records were deleted before they were read ({error}); {way_out}") from error
    finally:
        await reader.close()


async def take_once(
    by_path: Mapping[str, EventSource],
    reader: Reader,
    log: Log,
    metrics: Metrics,
    read: OrderedDict[str, None] | None = None,
    poll_s: float = POLL_S,
) -> int:
    """One round of the loop; returns how many records it took. read: ids of webhooks' events that were read and published.
    poll_s: how long it waits for a first record.
    """
    came_now: dict[str, None] = {}
    read = OrderedDict() if read is None else read
    messages = await log.read(reader, timeout_s=poll_s)
    events: dict[str, list[Event]] = {}
    nexts: dict[Partition, int] = {}
    for message in messages:
        nexts[Partition(message.record.topic, message.partition)] = message.offset + 1
        received = message.value
        if not isinstance(received, Received) or received.path not in by_path:
            await _unheard(message, log, metrics)
            continue
        # An operator redelivers it: it is no duplicate.
        again = any(name == REDELIVERED for name, _ in message.record.headers)
        if received.path != FEEDBACK_PATH and not again:
            if received.id in read or received.id in came_now:
                metrics.counter("feedback_events", source=by_path[received.path].name, outcome="repeated").inc()
                continue
            came_now[received.id] = None
        # The gateway seals the texts within clients' feedback, and a webhook's body as a whole.
        answer = received.ref.removeprefix(ANSWER_PREFIX) if received.path == FEEDBACK_PATH else ""
        events.setdefault(received.path, []).append(
            Event(received.body, message.record.topic, message.partition, message.offset, answer, ours=True)
        )
    for path, came in events.items():
        await publish_events(by_path[path], came, log, metrics)
    read |= came_now
    while len(read) > MAX_READ:
        read.popitem(last=False)
    try:
        if nexts:
            await reader.commit(nexts)
    except CommitRefused as error:  # a rebalance came between: the partition's new reader reads them again
        logger.info("commit_refused source=%s error=%s", GROUP, error)
    return len(messages)


async def _unheard(message: LogMessage, log: Log, metrics: Metrics) -> None:
    received = message.value
    reason = "no source for this webhook" if isinstance(received, Received) else "bad frame"
    error = f"path: got {received.path!r}, and no [[feedback]] listens to it" if isinstance(received, Received) else ""
    metrics.counter("dead_letters", reason=reason).inc()
    await log.dead_letter(message, stage=GROUP, reason=reason, error=error)
