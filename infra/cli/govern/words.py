"""Records of `policies`, event by event: from a summary on that lies far enough back, or from the first record."""

from contextlib import aclosing

from infra.log.log import Log, LogMessage
from infra.policies.beginning import LOOK, newest_summary
from infra.policies.fold import LeaseFence, Stable, Summary, fenced, moved
from schemas import Directive, PolicyEvent, topics

RECENT = 8 * LOOK  # records that a look back shows at least


class PolicyWords:
    """Records of one policy and of learning in `policies`, folded record by record. events: with their times, without what an
    overtaken trainer wrote. stable: where its channel is then. orders: an operator's orders about learning.
    is_whole: nothing lies before them. since: of what is not read. at_most: events that are kept, by default all.
    """

    def __init__(self, policy: str, since: Summary | None = None, *, at_most: int | None = None) -> None:
        self._policy = policy
        self._at_most = at_most
        self._begin(since)

    def _begin(self, since: Summary | None) -> None:
        self.events: list[tuple[int, PolicyEvent]] = []
        self.orders: list[tuple[int, Directive]] = []
        self.is_whole = since is None
        self.next_offset = 0 if since is None else since.below
        self.stable = Stable() if since is None else since.of(self._policy).stable
        self._fence = LeaseFence(-1 if since is None else since.of(self._policy).token)

    async def read_on(self, log: Log) -> None:
        """Fold what has come since the last time."""
        begins, ends = await log.bounds(topics.POLICIES)
        if ends[0] < self.next_offset:  # the log began anew
            self._begin(None)
        async with aclosing(log.chunks(topics.POLICIES, {0: max(begins[0], self.next_offset)}, {0: ends[0]})) as chunks:
            async for records in chunks:
                for record in records:
                    self._fold(await log.decoded(record))
                    self.next_offset = record.offset + 1
                self._trim()

    def _trim(self) -> None:
        if self._at_most is not None and len(self.events) + len(self.orders) > 2 * self._at_most:
            self.events, self.orders = self.events[-self._at_most :], self.orders[-self._at_most :]
            self.is_whole = False

    def _fold(self, message: LogMessage) -> None:
        record = message.value
        if isinstance(record, Directive):
            self.stable = fenced(self.stable, record, message.offset)
            if record.is_of_learning:
                self.orders.append((message.timestamp_ms, record))
        elif isinstance(record, PolicyEvent) and record.policy == self._policy:
            by_trainer = record.event in ("lease", "published", "orphaned")
            if not by_trainer or self._fence.admits(record, message.offset):
                self.events.append((message.timestamp_ms, record))
            self.stable = moved(self.stable, record, self._policy)


async def recent_words(log: Log, policy: str, *, at_least: int | None, at_most: int | None = None) -> PolicyWords:
    """The newest records, and more where a summary lies further back; of all records where that is None."""
    since = None
    if at_least is not None:
        low = (await log.bounds(topics.POLICIES))[1][0] - at_least
        since = await newest_summary(log, fits=lambda summary: summary.below <= low)
    words = PolicyWords(policy, since, at_most=at_most)
    await words.read_on(log)
    return words


async def words_about(log: Log, policy: str, version: int) -> PolicyWords:
    """Records from some place before this version was published on."""
    words = PolicyWords(policy, await newest_summary(log, fits=lambda summary: summary.of(policy).newest < version))
    await words.read_on(log)
    return words
