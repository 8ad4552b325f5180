"""`audit`: reads the kept log and accounts for every published experience. Safe while everything runs.

The topics are read downstream first, so that what moved on meanwhile shows as pending, never as lost.
"""

from collections.abc import Callable

from infra.ledger.account import Account, Ledger, fold_all
from infra.log.log import Log
from schemas import topics

# Downstream first: an id that is read here was published before.
ORDER = (
    topics.BATCHES, topics.PROGRESS, topics.BUFFER, topics.DEAD_LETTERS, topics.VERIFIED, topics.EXPERIENCES, topics.EXPERTS,
)  # fmt: skip


async def audit(log: Log, run: str, on_topic: Callable[[str], None] = lambda name: None) -> Account:
    """The account of the kept log; `on_topic` is called with the name of each topic before it is read."""
    begins = await log.bus.beginning_offsets(log.name(topics.BUFFER))
    ledger = Ledger(run, buffer_begins=min(begins.values()))
    for topic in ORDER:
        on_topic(topic.name)
        async for message in log.read_all(topic):
            fold_all(ledger, topic.name, (message,))
    return ledger.account()
