"""Records of `policies` about a policy, and the decisions in them: from a summary far enough back, or from the start."""

from contextlib import aclosing

import msgspec

from infra.log.log import Log
from infra.policies.beginning import LOOK, newest_summary
from infra.policies.fold import LeaseFence, Stable, Summary, fenced, moved
from schemas import Directive, PolicyEvent, topics
from schemas.fields import Channel, Numbers

RECENT = 2 * LOOK  # records that a look back shows at least
MOVES = ("promoted", "held", "pinned", "rolled_back")
NAMES = {
    "held": "held back", "rolled_back": "rolled back", "pause": "learning paused", "continue": "learning resumed",
    "drain": "drained",
}  # fmt: skip


class ChannelDecision(msgspec.Struct, frozen=True):
    """A decision about serving or learning. version: -1 for none. numbers: Evidence for the decision."""

    time_ms: int
    event: str
    version: int
    by: str
    reason: str
    numbers: Numbers = {}
    channel: Channel = "stable"

    @property
    def word(self) -> str:
        """Name of the decision for people."""
        if self.channel == "canary" and self.event == "promoted":
            return "watch" if self.by == "watch" else "on trial"
        if self.event == "pinned" and self.version < 0:
            return "unpinned"
        return NAMES.get(self.event, self.event)


class PolicyWords(msgspec.Struct, frozen=True):
    """Records of one policy and of learning. events: with their times, without events of a fenced trainer. orders: of
    operators about learning. moves: of the stable channel, each with its time, to another version. stable: state of the
    policy's channel after them. is_whole: no older record was left out.
    """

    events: list[tuple[int, PolicyEvent]]
    orders: list[tuple[int, Directive]]
    moves: list[tuple[int, int]]
    stable: Stable
    is_whole: bool

    @property
    def decisions(self) -> list[ChannelDecision]:
        """Moves of the channel and orders about learning, in the order of their times."""
        found = [ChannelDecision(time_ms, order.order, -1, order.owner, order.reason) for time_ms, order in self.orders]
        found += [
            ChannelDecision(time_ms, event.event, event.version, event.owner, event.reason, event.stats, event.channel)
            for time_ms, event in self.events
            if event.channel != "candidate" and event.event in MOVES
        ]
        return sorted(found, key=lambda decision: decision.time_ms)


async def _words_since(log: Log, policy: str, since: Summary | None) -> PolicyWords:
    begins, ends = await log.bounds(topics.POLICIES)
    known = None if since is None else since.of(policy)
    stable, fence = (Stable(), LeaseFence(-1)) if known is None else (known.stable, LeaseFence(known.token))
    start = begins[0] if since is None else max(begins[0], since.below)
    events: list[tuple[int, PolicyEvent]] = []
    orders: list[tuple[int, Directive]] = []
    moves: list[tuple[int, int]] = []
    async with aclosing(log.scan(topics.POLICIES, {0: start}, {0: ends[0]})) as messages:
        async for message in messages:
            record = message.value
            if isinstance(record, Directive):
                stable = fenced(stable, record, message.offset)
                if record.is_of_learning:
                    orders.append((message.timestamp_ms, record))
            elif isinstance(record, PolicyEvent) and record.policy == policy:
                by_trainer = record.event in ("lease", "published", "orphaned")
                if not by_trainer or fence.admits(record, message.offset):
                    events.append((message.timestamp_ms, record))
                before, stable = stable.version, moved(stable, record, policy)
                if stable.version != before:
                    moves.append((message.timestamp_ms, stable.version))
    return PolicyWords(events, orders, moves, stable, since is None)


async def recent_words(log: Log, policy: str, *, at_least: int | None = RECENT) -> PolicyWords:
    """The newest records, and more where a summary lies further back; all records where `at_least` is None."""
    since = None
    if at_least is not None:
        low = (await log.bounds(topics.POLICIES))[1][0] - at_least
        since = await newest_summary(log, fits=lambda summary: summary.below <= low)
    return await _words_since(log, policy, since)


async def words_about(log: Log, policy: str, version: int) -> PolicyWords:
    """Records from some place before this version was published on."""
    return await _words_since(
        log, policy, await newest_summary(log, fits=lambda summary: summary.of(policy).newest < version)
    )
