"""All records of `policies`, folded one by one: what a trainer knows of versions, and what it makes summaries of.

Guarantee: a fold that begins with a summary and reads on says the same as one that read every record, but of versions below
`known_from`. Bound: of each policy twice `window` versions, and those that its channels serve. Pure.
"""

from infra.log.bus import Record, digest_of
from infra.log.log import LogMessage
from infra.policies.channel import Stable
from infra.policies.policy_feed import PolicyFeed
from infra.policies.summary import FORMAT, Learning, LeaseFence, PolicySummary, Summary, count, entries
from schemas import Directive, PolicyEvent

WINDOW = 64  # newest versions of a policy: more than a checkpoint, an evaluation or a verdict is usually behind


class PoliciesFold:
    """since: a summary of the records below `begun_at`. next_offset: of the first record that is not folded. learning:
    the newest word of an operator about it. window: how many of a policy's newest versions a summary has.
    """

    def __init__(self, since: Summary | None = None, *, window: int = WINDOW) -> None:
        self._window = window
        self._lease = -1 if since is None else since.lease
        self._last: Record | str = "" if since is None else since.last
        self._policies = {} if since is None else {one.policy: _OfPolicy(one, window) for one in since.policies}
        self.begun_at = self.next_offset = 0 if since is None else since.below
        self.learning: Learning = "" if since is None else since.learning

    def take(self, message: LogMessage) -> None:
        """Take the next record; one that was taken changes nothing."""
        if message.offset < self.next_offset:
            return
        self.next_offset, self._last = message.offset + 1, message.record
        if isinstance(message.value, Directive):
            self._directive(message.value, message.offset)
        elif isinstance(message.value, PolicyEvent):
            policy = message.value.policy
            if policy not in self._policies:
                begun = PolicySummary(policy, Stable(lease=self._lease))
                self._policies[policy] = _OfPolicy(begun, self._window)
            self._policies[policy].take(message.value, message.offset)

    def of(self, policy: str) -> PolicySummary:
        """What was said of a policy."""
        return self.summary().of(policy)

    def summary(self) -> Summary:
        """Of all below `next_offset`."""
        return Summary(
            format=FORMAT,
            below=self.next_offset,
            last=self._last if isinstance(self._last, str) else digest_of(self._last),
            lease=self._lease,
            learning=self.learning,
            policies=tuple(one.summary() for one in self._policies.values()),
        )

    def _directive(self, directive: Directive, offset: int) -> None:
        if directive.order == "drain" or directive.order == "pause" or directive.order == "continue":
            self.learning = directive.order
        if directive.order == "lease":
            self._lease = max(self._lease, offset)
        for one in self._policies.values():
            one.feed.fence(directive, offset)


class _OfPolicy:
    def __init__(self, since: PolicySummary, window: int) -> None:
        self._window = window
        self.feed = PolicyFeed(since.policy, since=since)
        self._policy = since.policy
        self._known_from = since.known_from
        self._fence = LeaseFence(since.token)
        self._published = since.published()

    def take(self, event: PolicyEvent, offset: int) -> None:
        self.feed.apply(event, offset)
        if self._fence.admits(event, offset):
            count(self._published, event)
        if len(self._published.keys() | self.feed.events.keys()) > 2 * self._window:
            self._trim()

    def summary(self) -> PolicySummary:
        self._trim()
        events = self.feed.events
        return PolicySummary(
            policy=self._policy,
            stable=self.feed.stable,
            token=self._fence.token,
            newest=self.feed.newest,
            known_from=self._known_from,
            announced=entries(events.values()),
            otherwise=entries(
                one
                for version, one in self._published.items()
                if one.event != "published" or events.get(version) != one
            ),
        )

    def _trim(self) -> None:
        stable, events = self.feed.stable, self.feed.events
        kept = {stable.version, stable.promoted, stable.trial, stable.before}
        for known in (self._published, events):  # each: the highest number that was given out is among the first
            kept |= set(sorted(known)[-self._window :])
        gone = (self._published.keys() | events.keys()) - kept
        for version in gone:
            self._published.pop(version, None)
            events.pop(version, None)
        self._known_from = max(self._known_from, max(gone, default=-1) + 1)
